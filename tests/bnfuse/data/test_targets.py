"""Labels of several inputs: by name, in an .npz or a folder of .npy files, looked at before the work."""

from __future__ import annotations

import numpy as np
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.data import load_data
from bnfuse.data.targets import Target, fed_labels, scored

RNG = np.random.default_rng(0)
INTEGERS, FLOATS = np.dtype(np.int64), np.dtype(np.float32)
TARGETS = (Target("kind", (), INTEGERS, 3), Target("mask", (2, 2), INTEGERS, 4, -1), Target("depth", (1,), FLOATS))
ARRAYS = {
    "x": RNG.standard_normal((6, 5, 5)),
    "kind": np.array([0, 1, 2, 0, 1, 2], np.int32),
    "mask": np.resize([-1, 0, 3], (6, 2, 2)),
    "depth": np.arange(6)[:, None],
}
HELD_OUT = {f"{name}_test": array[:2] for name, array in ARRAYS.items()}


def load(tmp_path, targets=TARGETS, **arrays):
    np.savez(tmp_path / "a.npz", **{name: array for name, array in arrays.items() if array is not None})
    return load_data(tmp_path / "a.npz", targets=targets, classes=3)


def message_of(tmp_path, **arrays) -> str:
    with pytest.raises(BnfuseError) as caught:
        load(tmp_path, **{**ARRAYS, **HELD_OUT, **arrays})
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{tmp_path / 'a.npz'}: ")


def test_each_input_has_the_labels_of_its_name_in_its_type(tmp_path):
    data = load(tmp_path, **ARRAYS, **HELD_OUT)
    kind, depth, mask = fed_labels(data.train_y, ["kind", "depth", "mask"])
    assert (kind.dtype, depth.dtype, mask.dtype) == (INTEGERS, FLOATS, INTEGERS)
    for found, name in ((kind, "kind"), (depth, "depth"), (mask, "mask")):
        assert np.array_equal(found, ARRAYS[name]) and found.flags.c_contiguous
    assert np.array_equal(scored(data.test_y), [0, 1]) and data.classes == 3


def test_a_share_is_held_out_of_all_alike(tmp_path):
    data = load(tmp_path, **ARRAYS)
    assert len(data.test_y) == 1 and {*data.train_y["depth"][:, 0], *data.test_y["depth"][:, 0]} == {*range(6)}
    for y, x in ((data.train_y, data.train_x), (data.test_y, data.test_x)):
        rows = y["depth"][:, 0].astype(int)
        assert np.array_equal(y["kind"], ARRAYS["kind"][rows])
        assert np.allclose(x[:, 0], ARRAYS["x"][rows])


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (
            {"mask": None},
            "has no array 'mask' (it has x, kind, depth, x_test, kind_test, mask_test): it needs x, kind, ",
        ),
        ({"depth_test": None}, "has 'x_test' but no 'depth_test': it needs all of x_test, kind_test, mask_test, "),
        ({"kind": ARRAYS["kind"][:5]}, "kind has the shape [5]: the graph takes [6], one for each image"),
        ({"mask": ARRAYS["mask"][:, :1]}, "mask has the shape [6, 1, 2]: the graph takes [6, 2, 2]"),
        ({"mask": ARRAYS["mask"] + 0.5}, "mask is float64: the graph takes integers (int64)"),
        (
            {"mask": ARRAYS["mask"] + 1},
            "mask has labels from 0 to 4: they must be from 0 to 3 (or -1, which counts for",
        ),
        ({"kind": ARRAYS["kind"] + 1}, "kind has labels from 1 to 3: they must be from 0 to 2"),
        ({"depth": ARRAYS["depth"] * np.nan}, "depth holds values that are not finite"),
        ({"depth": ARRAYS["depth"].astype(str)}, "depth is <U"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path, arrays, said):
    assert said in message_of(tmp_path, **arrays)


def test_arrays_that_no_input_takes_are_left_out_and_named(tmp_path):
    data = load(tmp_path, **ARRAYS, y=ARRAYS["kind"])
    assert any("left out: 'y': it may have x, kind, mask, depth, x_val" in line for line in data.about)


def test_one_label_for_each_image_is_that_of_inputs_that_are_alike(tmp_path):
    alike = (Target("main", (), INTEGERS, 3), Target("aux", (), INTEGERS, 3))
    data = load(tmp_path, alike, x=ARRAYS["x"], y=ARRAYS["kind"])
    assert data.train_y.dtype == np.int64 and all(found is data.train_y for found in fed_labels(data.train_y, "ab"))
    assert any("its labels are those of main and aux alike" in line for line in data.about)
    with pytest.raises(BnfuseError, match=r"has no arrays with the labels that the graph takes: 'kind' \(int64 \[\] "):
        load(tmp_path, TARGETS, x=ARRAYS["x"], y=ARRAYS["kind"])
    with pytest.raises(BnfuseError, match="digits: has one label for each image, the graph takes 'kind'"):
        load_data("digits", targets=TARGETS)


def test_labels_of_one_input_may_have_its_name(tmp_path):
    data = load(tmp_path, (Target("kind", (), INTEGERS, 3),), x=ARRAYS["x"], kind=ARRAYS["kind"])
    assert data.train_y.dtype == np.int64


def test_a_folder_of_arrays_is_read_as_one_file_of_them(tmp_path):
    for name, array in {**ARRAYS, **HELD_OUT}.items():
        np.save(tmp_path / f"{name}.npy", array)
    data, same = load_data(tmp_path, targets=TARGETS, classes=3), load(tmp_path, **ARRAYS, **HELD_OUT)
    assert np.array_equal(data.train_x, same.train_x) and np.array_equal(data.test_y, same.test_y)
    (tmp_path / "mask.npy").write_bytes(b"no array")
    with pytest.raises(BnfuseError, match="cannot be read"):
        load_data(tmp_path, targets=TARGETS, classes=3)
