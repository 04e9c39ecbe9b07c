"""Every mode of Pillow: the right values, by formulas in numpy, or one line that names the file."""

from __future__ import annotations

import colorsys
import struct

import numpy as np
import pytest
from PIL import Image

from bnfuse.core.errors import BnfuseError
from bnfuse.data import load_data
from bnfuse.data.pictures import FRAMES, ROTATION, TRANSPARENCY, ValueNotKnown, pixels, read_picture

BYTES = np.array([[0, 51, 102], [153, 204, 255]], np.uint8)
WORDS = np.array([[0, 1, 300], [32768, 65534, 65535]], np.uint16)
COLOURS = np.stack([BYTES, BYTES[::-1], BYTES[:, ::-1]], axis=2)  # [H, W, C]


def image(mode: str, values: np.ndarray) -> Image.Image:
    height, width = values.shape[:2]
    return Image.frombytes(mode, (width, height), np.ascontiguousarray(values).tobytes())


def luminance(rgb: np.ndarray) -> np.ndarray:
    """ITU-R BT.601."""
    return np.round(rgb.astype(np.float64) @ [0.299, 0.587, 0.114])


def test_grey_and_black_and_white():
    assert np.array_equal(pixels(image("L", BYTES)), BYTES[None])
    assert np.array_equal(pixels(image("L", BYTES).convert("1", dither=0)), np.where(BYTES > 127, 255, 0)[None])
    assert np.array_equal(pixels(image("L", BYTES), channels=3), np.stack([BYTES] * 3))


def test_colour():
    found = pixels(image("RGB", COLOURS))
    assert found.dtype == np.uint8
    assert np.array_equal(found, COLOURS.transpose(2, 0, 1))
    grey = pixels(image("RGB", COLOURS), channels=1)
    assert grey.shape == (1, 2, 3)
    assert np.abs(grey[0] - luminance(COLOURS)).max() <= 1


@pytest.mark.parametrize("mode", ["RGBA", "RGBX"])
def test_what_lies_beside_the_colours_is_left_out(mode):
    values = np.concatenate([COLOURS, BYTES[..., None]], axis=2)
    assert np.array_equal(pixels(image(mode, values)), COLOURS.transpose(2, 0, 1))


def test_grey_with_transparency():
    assert np.array_equal(pixels(image("LA", np.stack([BYTES, BYTES[::-1]], 2))), BYTES[None])


@pytest.mark.filterwarnings("ignore:Palette images")
@pytest.mark.parametrize("transparent", [False, True])
def test_a_palette_is_looked_up(transparent):
    palette = np.random.default_rng(0).integers(0, 256, (256, 3), np.uint8)
    picture = image("P", BYTES)
    picture.putpalette(palette.tobytes())
    if transparent:
        picture.info["transparency"] = bytes(range(256))
    assert np.array_equal(pixels(picture), palette[BYTES].transpose(2, 0, 1))
    assert np.abs(pixels(picture, channels=1)[0] - luminance(palette[BYTES])).max() <= 1


def test_cmyk_is_what_inks_leave_of_white():
    inks = np.concatenate([COLOURS, BYTES[..., None]], axis=2).astype(np.float64) / 255
    expected = 255 * (1 - inks[..., :3]) * (1 - inks[..., 3:])
    found = pixels(image("CMYK", np.concatenate([COLOURS, BYTES[..., None]], axis=2)))
    assert np.abs(found - expected.transpose(2, 0, 1)).max() <= 1


def test_ycbcr_is_jpegs():
    y, cb, cr = np.moveaxis(COLOURS.astype(np.float64), 2, 0)
    red, green = y + 1.402 * (cr - 128), y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128)
    expected = np.clip([red, green, y + 1.772 * (cb - 128)], 0, 255)
    assert np.abs(pixels(image("YCbCr", COLOURS)) - expected).max() <= 1.5


def test_hue_saturation_and_value():
    expected = [255 * np.array(colorsys.hsv_to_rgb(*(c / 255))) for c in COLOURS.reshape(-1, 3).astype(np.float64)]
    found = pixels(image("HSV", COLOURS)).transpose(1, 2, 0).reshape(-1, 3)
    assert np.abs(found - expected).max() <= 4  # hues of 8 bits


def test_lab_white_black_and_middle_grey():
    values = np.array([[[255, 0, 0], [0, 0, 0], [137, 0, 0]]], np.uint8)  # L of 8 bits; a and b are signed
    try:
        found = pixels(image("LAB", values))
    except ValueError:
        pytest.skip("this Pillow has no conversion from LAB, and such a file is refused")
    assert np.abs(found.astype(int) - np.array([255, 0, 128])[None, None]).max() <= 2
    assert np.abs(pixels(image("LAB", values), channels=1)[0, 0].astype(int) - [255, 0, 128]).max() <= 2


@pytest.mark.parametrize(("mode", "order"), [("I;16", "<u2"), ("I;16L", "<u2"), ("I;16B", ">u2")])
def test_sixteen_bits_in_any_order_of_bytes(mode, order):
    found = pixels(image(mode, WORDS.astype(order)))
    assert found.dtype == np.float32
    assert np.allclose(found, WORDS[None] / 65535, atol=1e-7)
    assert np.array_equal(pixels(image(mode, WORDS.astype(order)), channels=3), np.concatenate([found] * 3))


def test_wide_integers_and_floats_need_a_range():
    with pytest.raises(ValueNotKnown, match="no known range"):
        pixels(Image.fromarray(WORDS.astype(np.int32)))
    fractions = (BYTES / 255).astype(np.float32)
    assert np.allclose(pixels(Image.fromarray(fractions)), fractions[None])
    for wrong in (BYTES.astype(np.float32), -fractions, fractions * np.nan):
        with pytest.raises(ValueNotKnown, match=r"holds floats from .* they must be from 0 to 1"):
            pixels(Image.fromarray(wrong))


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_files_of_sixteen_bits(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    if ending == "pgm":
        path.write_bytes(b"P5 3 2 65535\n" + WORDS.astype(">u2").tobytes())
    else:
        Image.fromarray(WORDS).save(path)
    assert np.allclose(read_picture(path).values, WORDS[None] / 65535, atol=1e-7)


def tiff(path, values: np.ndarray, bits: int, photometric: int, order: str = "<", sample: int = 1) -> None:
    """A grey TIFF of one strip, written by hand."""
    data = values.tobytes()
    tags = [(256, 3), (257, 2), (258, bits), (259, 1), (262, photometric), (273, 8), (277, 1), (278, 2)]
    tags += [(279, len(data)), (339, sample)]
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8 + len(data))
    entries = b"".join(struct.pack(order + "HHII", tag, 4, 1, value) for tag, value in tags)
    path.write_bytes(head + data + struct.pack(order + "H", len(tags)) + entries + bytes(4))


def test_tiffs_of_other_meanings(tmp_path):
    path = tmp_path / "a.tif"
    tiff(path, WORDS.astype("<u2"), 16, photometric=0)  # white is zero
    assert np.allclose(read_picture(path).values, 1 - WORDS[None] / 65535, atol=1e-7)
    tiff(path, WORDS.astype(">u2"), 16, photometric=1, order=">")
    assert np.allclose(read_picture(path).values, WORDS[None] / 65535, atol=1e-7)
    tiff(path, WORDS.astype("<i2"), 16, photometric=1, sample=2)
    with pytest.raises(BnfuseError, match=r"a\.tif: holds 32-bit or signed integers"):
        read_picture(path)
    tiff(path, BYTES.astype("<f4"), 32, photometric=1, sample=3)
    with pytest.raises(BnfuseError, match=r"a\.tif: holds floats from 0 to 255"):
        read_picture(path)


def test_sixteen_bits_keep_their_precision_when_resized(tmp_path):
    Image.fromarray(np.full((4, 4), 300, np.uint16)).save(tmp_path / "a.png")
    assert np.allclose(read_picture(tmp_path / "a.png", 3, 3).values, np.full((3, 3, 3), 300 / 65535))


def test_what_is_ignored_is_remarked_on(tmp_path):
    path = tmp_path / "a.png"
    clear = np.concatenate([COLOURS, np.full((2, 3, 1), 255, np.uint8)], axis=2)
    image("RGBA", clear).save(path)
    assert read_picture(path).remarks == ()
    clear[0, 0, 3] = 0
    image("RGBA", clear).save(path)
    assert read_picture(path).remarks == (TRANSPARENCY,)
    frames = [image("L", BYTES), image("L", BYTES[::-1])]
    frames[0].save(tmp_path / "a.tif", save_all=True, append_images=frames[1:])
    found = read_picture(tmp_path / "a.tif")
    assert found.remarks == (FRAMES,)
    assert np.array_equal(found.values, BYTES[None])
    exif = Image.Exif()
    exif[0x0112] = 6
    image("RGB", COLOURS).save(tmp_path / "a.jpg", exif=exif)
    found = read_picture(tmp_path / "a.jpg")
    assert found.remarks == (ROTATION,)
    assert found.values.shape == (3, 2, 3)  # not turned


def test_images_that_are_too_large_or_hostile(tmp_path):
    path = tmp_path / "a.png"
    Image.new("1", (20000, 6000)).save(path)
    with pytest.raises(BnfuseError, match=r"a\.png: has 20000x6000 pixels, more than"):
        read_picture(path)
    for content in (b"", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n"):
        path.write_bytes(content)
        with pytest.raises(BnfuseError, match=r"a\.png: is no image that can be read: "):
            read_picture(path)
    with pytest.raises(BnfuseError, match=r"none\.png: is no image that can be read: No such file"):
        read_picture(tmp_path / "none.png")


@pytest.mark.parametrize("ending", ["png", "jpg", "bmp", "gif", "tif", "webp"])
def test_files_that_are_cut_short(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BnfuseError, match=rf"a\.{ending}: is no image that can be read") as caught:
        read_picture(path)
    assert "\n" not in str(caught.value)


def test_bytes_and_words_in_one_folder_mean_the_same(tmp_path):
    for name, values in (("bytes", BYTES), ("words", BYTES.astype(np.uint16) * 257)):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.fromarray(values).save(tmp_path / name / f"{number}.png")
    data = load_data(tmp_path)
    assert all(np.allclose(x, BYTES[None] / 255, atol=1e-7) for x in (*data.train_x, *data.test_x))
    assert data.shape == (1, 2, 3)
