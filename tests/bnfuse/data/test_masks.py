"""Folders of images with masks."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from bnfuse.core.errors import BnfuseError
from bnfuse.data import load_data
from bnfuse.data.targets import Target

RNG = np.random.default_rng(0)
TARGET = Target("labels", (6, 6), np.dtype(np.int64), 3, ignored=255)


def write(folder, name: str, side: int = 6, mask: np.ndarray | None = None, mode: str = "L", suffix: str = ".png"):
    """An image and its mask."""
    image = RNG.integers(0, 256, (side, side, 3), dtype=np.uint8)
    mask = RNG.integers(0, 3, (side, side), dtype=np.uint8) if mask is None else mask
    for kind, picture in (("images", Image.fromarray(image)), ("masks", as_mode(mask, mode))):
        path = folder / kind / f"{name}{'.png' if kind == 'images' else suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    return image, mask


def as_mode(mask: np.ndarray, mode: str) -> Image.Image:
    picture = Image.fromarray(mask)
    if mode == "P":  # colours of no meaning
        picture = Image.frombytes("P", picture.size, mask.tobytes())
        picture.putpalette(RNG.integers(0, 256, 768).tolist())
    return picture.convert("RGB") if mode == "RGB" else picture


def load(folder, **options):
    return load_data(folder, image=6, channels=3, targets=[TARGET], **options)


def test_masks_are_the_numbers_of_their_files(tmp_path):
    expected = {}
    for part, names in (("train", ("b", "a/1", "a/2")), ("val", ("x",))):
        for name in names:
            mask = RNG.integers(0, 3, (6, 6), dtype=np.uint8)
            mask[0] = 255
            mode = "P" if name == "b" else "L"
            image, _ = write(tmp_path / part, name, mask=mask, mode=mode, suffix=".tif" if name == "x" else ".png")
            expected[part, name] = (image, mask)
    data = load(tmp_path)
    assert data.train_y.dtype == np.int64 and data.train_y.shape == (3, 6, 6)
    found = {x.tobytes(): y for x, y in zip(data.train_x, data.train_y, strict=True)}
    for (part, _), (image, mask) in expected.items():
        x = (image.transpose(2, 0, 1) / np.float32(255)).astype(np.float32)
        y = found[x.tobytes()] if part == "train" else data.test_y[0]
        assert np.array_equal(y, mask)
    assert data.classes == 3 and np.array_equal(data.test_x[0], x)


def test_a_mask_of_another_size_is_brought_to_the_graphs_by_its_nearest_pixels(tmp_path):
    for name in ("1", "2"):
        _, mask = write(tmp_path, name, side=13)
    data = load(tmp_path)
    masks = [*data.train_y, *data.test_y]
    nearest = mask[np.ix_(*[((np.arange(6) + 0.5) * 13 / 6).astype(int)] * 2)]
    assert any(np.array_equal(found, nearest) for found in masks)
    assert data.train_x.shape == (1, 3, 6, 6)


def test_what_has_no_pair_is_counted_or_refused(tmp_path):
    for name in ("1", "2", "3"):
        write(tmp_path, name)
    (tmp_path / "images" / "3.png").unlink()
    (tmp_path / "notes.txt").write_text("")
    about = " ".join(load(tmp_path).about)
    assert "masks without an image (masks/3.png)" in about and "beside images and masks (notes.txt)" in about
    (tmp_path / "masks" / "2.png").unlink()
    with pytest.raises(BnfuseError, match=r"2\.png: has no mask: it would be .*masks/2\.png"):
        load(tmp_path)
    (tmp_path / "images" / "2.png").write_bytes(b"no image")
    (tmp_path / "masks" / "2.png").write_bytes(b"no image")
    with pytest.raises(BnfuseError, match="--skip-unreadable"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "RGB"}, r"2\.png: is of colours \(mode RGB\)"),
        ({"mask": np.full((6, 6), 3, np.uint8)}, r"labels from . to 3: they must be from 0 to 2 \(or 255"),
        ({"mask": np.zeros((6, 5), np.uint8)}, r"2\.png: is 5x6, its image 6x6"),
        ({"suffix": ".webp"}, "a mask is one of"),
    ],
)
def test_what_is_no_mask_is_told_with_its_file(given, message, tmp_path):
    write(tmp_path, "1")
    write(tmp_path, "2", **given)
    with pytest.raises(BnfuseError, match=message) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_options_that_masks_do_not_follow_are_refused(tmp_path):
    write(tmp_path, "1")
    for options in ({"stream": True}, {"crop_share": 0.9}):
        with pytest.raises(BnfuseError, match="images with masks are read as a whole"):
            load(tmp_path, **options)
    (tmp_path / "masks").rename(tmp_path / "other")
    with pytest.raises(BnfuseError, match="has no folder masks/"):
        load(tmp_path)
