"""Copies between layouts, exact."""

import ml_dtypes
import numpy as np
import pytest

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu import layout
from bnfuse.runtime.kernels.kernel import MapType

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

TARGET = resolve("cpu", 2)


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [((2, 3, 7, 9), 3, 0), ((1, 5, 3, 3), 11, 4), ((3, 33, 4, 4), 40, 7), ((1, 1, 1, 1), 1, 0)],
)
def test_to_nhwc_and_back(shape, stride, offset):
    n, c, h, w = shape
    kind = MapType(n, h, w, c, stride)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    before = np.full((n, h, w, stride), 5.0, np.float32)
    moved = execute.call(layout.nchw_to_nhwc(kind, TARGET), {"x": x, "y": before}, {"y": offset})["y"]
    wanted = before.copy()
    wanted[..., offset : offset + c] = x.transpose(0, 2, 3, 1)
    assert (moved == wanted.reshape(-1)).all()
    back = execute.call(layout.nhwc_to_nchw(kind, TARGET), {"x": moved}, {"x": offset})["y"]
    assert (back.reshape(shape) == x).all()


def test_maps_of_16_bits_hold_the_nearest_of_two_the_even_one():
    kind = MapType(1, 2, 4, 1, 1, "bfloat16")
    x = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 3.4e38, np.inf, -np.nan, 1e-40], np.float32)
    x[6:7].view(np.uint32)[0] = 0x7FFFFFFF  # rounded like a number it would be -0
    moved = execute.call(layout.nchw_to_nhwc(kind, TARGET), {"x": x})["y"]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(moved, x.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(execute.call(layout.nhwc_to_nchw(kind, TARGET), {"x": moved})["y"], moved)


def test_from_slot_to_slot():
    source, target = MapType(2, 3, 5, 18, 30), MapType(2, 3, 5, 18, 41)
    x = np.random.default_rng(0).normal(size=(30, 30)).astype(np.float32)
    y = np.zeros((30, 41), np.float32)
    found = execute.call(layout.copy_map(source, target, TARGET), {"x": x, "y": y}, {"x": 5, "y": 23})["y"]
    y[:, 23:41] = x[:, 5:23]
    assert (found.reshape(30, 41) == y).all()


@pytest.mark.parametrize("elements", [1, 16, 100_003])
def test_fill_and_copy(elements):
    assert (execute.call(layout.fill(elements, 0.25, TARGET), {})["y"] == 0.25).all()
    x = np.arange(elements, dtype=np.int64)
    assert (execute.call(layout.copy(elements, TARGET, "int64"), {"x": x})["y"] == x).all()
