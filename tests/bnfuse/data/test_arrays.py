"""Arrays of an .npz: all parts by one rule, or a line that says why not."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.data import load_data

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (4, 5, 5), np.uint8)
BYTES[:, 0, 0] = 255
LABELS = np.array([0, 1, 0, 1])


def load(tmp_path, **arrays):
    path = tmp_path / "a.npz"
    np.savez(path, **{"y": LABELS, **{key.replace("x", "y"): LABELS for key in arrays if key[0] == "x"}, **arrays})
    return load_data(path)


def message_of(tmp_path, **arrays) -> str:
    with pytest.raises(BnfuseError) as caught:
        load(tmp_path, **arrays)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{tmp_path / 'a.npz'}: ")


@pytest.mark.parametrize(
    ("x", "scale"),
    [
        (BYTES, 255),
        (BYTES.astype(np.float32), 1),
        (BYTES / 255, 1),
        (BYTES.astype(np.int16) - 100, 1),
        (BYTES.astype(np.int64), 1),
        (BYTES.astype(np.float16), 1),
        (BYTES.astype(">f4"), 1),
    ],
)
def test_all_parts_of_one_type_are_scaled_alike(tmp_path, x, scale):
    data = load(tmp_path, x=x, x_val=x[::-1], x_test=x)
    expected = x[:, None].astype(np.float64) / scale
    assert np.allclose(data.train_x, expected, rtol=1e-6)
    assert np.allclose(data.test_x, expected, rtol=1e-6)
    assert np.allclose(data.val_x, expected[::-1], rtol=1e-6)
    assert data.scale == scale
    assert data.mean[0] == pytest.approx(expected.mean())  # of the source's numbers, divided by the scale
    assert all(part.dtype == np.float32 for part in (data.train_x, data.val_x, data.test_x))


def test_floats_of_two_widths_are_alike(tmp_path):
    data = load(tmp_path, x=(BYTES / 255).astype(np.float32), x_test=BYTES / 255)
    assert np.allclose(data.train_x, data.test_x)


@pytest.mark.parametrize(
    "other", [BYTES.astype(np.float32), BYTES / 255, BYTES.astype(np.int16), BYTES.astype(np.int8)]
)
def test_bytes_beside_other_numbers_are_refused(tmp_path, other):
    said = message_of(tmp_path, x=BYTES, x_test=other)
    assert said.startswith(f"x is uint8 and x_test {other.dtype}: bytes are divided by 255, other numbers are not")
    assert message_of(tmp_path, x=other, x_val=BYTES).startswith(f"x is {other.dtype} and x_val uint8: ")


def test_numbers_of_two_scales_are_refused(tmp_path):
    said = message_of(tmp_path, x=BYTES / 255, x_test=BYTES.astype(np.float64))
    assert said == "x has values up to 1 and x_test up to 255: bring both to one scale"
    assert "x_test has values up to 1 and x up to 255" in message_of(tmp_path, x=BYTES * 1.0, x_test=BYTES / 255)
    assert "x has values up to 1 and x_test up to 255" in message_of(tmp_path, x=BYTES // 255, x_test=BYTES)
    assert load(tmp_path, x=BYTES / 255, x_test=BYTES / 128).final is None  # brighter, not of another unit
    assert load(tmp_path, x=BYTES / 64 - 2.0, x_test=BYTES / 255).final is None  # may be anything
    assert "x has values up to 1 and x_test up to 255" in message_of(tmp_path, x=BYTES / 127.5 - 1, x_test=BYTES * 1.0)
    standard = (BYTES - BYTES.mean()) / BYTES.std()
    assert "bring both to one scale" in message_of(tmp_path, x=BYTES * 1.0, x_test=standard)
    assert "bring both to one scale" in message_of(tmp_path, x=BYTES.astype(np.uint16), x_test=BYTES * np.uint16(257))
    outlier = standard.copy()
    outlier[0, 0, 0] = 1e3
    assert load(tmp_path, x=standard, x_test=outlier).final is None
    assert load(tmp_path, x=standard, x_test=standard * 0).final is None


def test_numbers_that_are_none(tmp_path):
    for value in (np.nan, np.inf, -np.inf):
        bad = BYTES / 255
        bad[1, 2, 3] = value
        assert message_of(tmp_path, x=BYTES / 255, x_test=bad) == "x_test holds values that are not finite"
    assert "x holds values up to 1e+300, beyond float32" in message_of(tmp_path, x=np.full((4, 5, 5), 1e300))


def test_shapes(tmp_path):
    assert load(tmp_path, x=np.zeros((4, 6, 5, 3)), x_test=np.zeros((4, 3, 6, 5))).shape == (3, 6, 5)
    assert load(tmp_path, x=np.zeros((4, 6, 5, 4))).shape == (4, 6, 5)
    said = message_of(tmp_path, x=np.zeros((4, 5, 5)), x_test=np.zeros((4, 6, 6)))
    assert said == "x and x_test hold images of different shapes, 1x5x5 and 1x6x6"
    with pytest.raises(BnfuseError, match=r"a\.npz: images of 4 channels do not become images of 3"):
        load_data(tmp_path / "a.npz", channels=3) if load(tmp_path, x=np.zeros((4, 6, 5, 4))) else None


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.bool_, ">i4"])
def test_labels_of_any_integer_type(tmp_path, dtype):
    data = load(tmp_path, x=BYTES, y=LABELS.astype(dtype), x_test=BYTES)
    assert data.train_y.dtype == np.int64
    assert data.train_y.tolist() == LABELS.tolist()
    assert load(tmp_path, x=BYTES, x_test=BYTES, y=LABELS[:, None]).train_y.tolist() == LABELS.tolist()


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"y_test": LABELS * 1.0}, "its labels of x_test are float64: they must be integers"),
        ({"y_test": LABELS - 1}, "has labels of x_test from -1 to 0: they must count classes from 0"),
        (
            {"y": np.eye(4, dtype=int)},
            "has 4 images but labels of shape [4, 4]: it needs one for each: take its argmax",
        ),
        ({"y_test": LABELS[:2]}, "has 4 images of x_test but labels of shape [2]"),
        ({"y": np.array(["a"] * 4)}, "its labels are <U1: they must be integers"),
    ],
)
def test_labels_that_are_none(tmp_path, arrays, said):
    assert message_of(tmp_path, x=BYTES, x_test=BYTES, **arrays).startswith(said)


def test_half_a_part_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    for lost, there in (("x_test", "y_test"), ("y_val", "x_val")):
        np.savez(path, x=BYTES, y=LABELS, **{there: BYTES if there[0] == "x" else LABELS})
        with pytest.raises(BnfuseError, match=f"has '{there}' but no '{lost}': it needs both or none"):
            load_data(path)


def test_a_class_that_is_not_trained_is_noted(tmp_path):
    data = load(tmp_path, x=BYTES, y=LABELS + 1, x_test=BYTES, y_test=LABELS + 2)
    assert data.about[-1] == f"note: {tmp_path / 'a.npz'}: the training part has no image of class 0, 3"


def test_sizes_are_asked_before_anything_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez(path, x=BYTES, y=LABELS)
    monkeypatch.setattr("bnfuse.data.dataset.MAX_BYTES", 1 << 10)
    monkeypatch.setattr("bnfuse.data.arrays.map_of", lambda *_: pytest.fail("was read"))
    with pytest.raises(BnfuseError, match=r"4 images of 3x64x64 take .* GiB as float32"):
        load_data(path, image=64, channels=3)


def test_arrays_of_other_names_are_named(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=BYTES, y=LABELS, x_valid=BYTES, y_valid=LABELS)
    assert load_data(path).about[-1] == (
        f"note: {path}: left out: 'x_valid', 'y_valid': it may have x, y, x_val, y_val, x_test, y_test"
    )


def test_a_single_array_or_a_pickle_is_no_npz(tmp_path):
    path = tmp_path / "a.npz"
    with path.open("wb") as stream:
        np.save(stream, BYTES)
    for data in (path.read_bytes(), b"", b"text", b"\x80\x04K\x01."):
        path.write_bytes(data)
        with pytest.raises(BnfuseError) as caught:
            load_data(path)
        assert str(caught.value) == f"{path}: cannot be read: it is no .npz, or is cut short: numpy.savez writes one"


def header(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<i8", "fortran_order": False, "shape": shape})
    return stream.getvalue()


@pytest.mark.parametrize(("name", "shape"), [("y", (1 << 40,)), ("y", (4, 1 << 40)), ("x", (1 << 40, 2))])
def test_what_is_no_image_is_not_read_where_it_is_huge(tmp_path, name, shape):
    path = tmp_path / "a.npz"
    np.savez(path, **({"y": LABELS} if name == "x" else {"x": BYTES}))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{name}.npy", header(shape))
    with pytest.raises(BnfuseError) as caught:
        load_data(path)
    assert str(caught.value) == f"{path}: {name} claims the shape {list(shape)}: it is too large"


def test_values_that_float32_takes_for_zero_are_refused(tmp_path):
    assert message_of(tmp_path, x=BYTES * 1e-60, x_test=BYTES * 1e-60) == (
        "x holds values up to 2.55e-58, 0 in float32: scale them"
    )


def test_elements_that_are_no_numbers_are_not_read(tmp_path):
    said = message_of(tmp_path, x=np.zeros((4, 5, 5), "V2048"))
    assert said == "x has elements of 2048 bytes: give numbers"
