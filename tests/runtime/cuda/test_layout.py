"""Copies between layouts on a GPU, exact but for the rounding to a 16-bit type."""

import cuda_kernels
import numpy as np
import pytest
from cuda_operator import alignment, raw, values_of

from bnfuse.runtime.kernels.cuda import layout
from bnfuse.runtime.kernels.kernel import MapType

SHAPES = [((2, 3, 7, 9), 3, 0), ((1, 5, 3, 3), 11, 4), ((3, 33, 4, 4), 40, 7), ((1, 1, 1, 1), 1, 0)]
SHAPES += [((1, 128, 9, 10), 256, 64), ((2, 66, 7, 3), 68, 2), ((1, 3, 40, 40), 3, 0)]


def kind_of(shape, stride, offset, dtype):
    n, c, h, w = shape
    return MapType(n, h, w, c, stride, dtype, alignment(c, stride, offset))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("shape", "stride", "offset"), SHAPES)
def test_to_nhwc_and_back(shape, stride, offset, dtype):
    n, c, h, w = shape
    kind, target = kind_of(shape, stride, offset, dtype), cuda_kernels.gpu()
    x = values_of(raw(np.random.default_rng(0).normal(size=shape), dtype), dtype)
    before = np.full((n, h, w, stride), 5.0, np.float32)
    given = {"x": x, "y": raw(before, dtype)}
    moved = cuda_kernels.run_kernel(layout.nchw_to_nhwc(kind, target), given, {"y": offset})["y"]
    before[..., offset : offset + c] = x.transpose(0, 2, 3, 1)
    assert (values_of(moved, dtype) == before.reshape(-1)).all()
    back = cuda_kernels.run_kernel(layout.nhwc_to_nchw(kind, target), {"x": moved}, {"x": offset})["y"]
    assert (back.reshape(shape) == x).all()


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float64", "int64"])
def test_other_types_to_nhwc_and_back(dtype):
    shape, target = (2, 5, 4, 3), cuda_kernels.gpu("bf16")
    kind = kind_of(shape, 5, 0, dtype)
    x = np.arange(120).reshape(shape).astype(dtype)
    moved = cuda_kernels.run_kernel(layout.nchw_to_nhwc(kind, target, dtype), {"x": x})["y"]
    assert (moved == x.transpose(0, 2, 3, 1).reshape(-1)).all()
    back = cuda_kernels.run_kernel(layout.nhwc_to_nchw(kind, target, dtype), {"x": moved})["y"]
    assert (back.reshape(shape) == x).all()


@pytest.mark.parametrize(
    ("source", "result"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")]
)
@pytest.mark.parametrize(("c", "strides", "offsets"), [(18, (30, 41), (5, 23)), (24, (32, 48), (8, 16))])
def test_from_slot_to_slot(source, result, c, strides, offsets):
    x_kind, y_kind = (
        kind_of((2, c, 3, 5), stride, offset, dtype)
        for stride, offset, dtype in zip(strides, offsets, (source, result), strict=True)
    )
    x = raw(np.random.default_rng(0).normal(size=(30, strides[0])), source)
    y = raw(np.zeros((30, strides[1])), result)
    kernel = layout.copy_map(x_kind, y_kind, cuda_kernels.gpu(), result)
    given = dict(zip(("x", "y"), offsets, strict=True))
    found = cuda_kernels.run_kernel(kernel, {"x": x, "y": y}, given)["y"]
    moved = values_of(x, source)[:, offsets[0] : offsets[0] + c]
    y[:, offsets[1] : offsets[1] + c] = raw(moved, result)
    assert (found == y.reshape(-1)).all()


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_slots_of_other_types(dtype):
    kind = kind_of((1, 9, 3, 5), 9, 0, dtype)
    x = np.arange(135).astype(dtype)
    found = cuda_kernels.run_kernel(layout.copy_map(kind, kind, cuda_kernels.gpu("bf16"), dtype), {"x": x})["y"]
    assert (found == x).all()


@pytest.mark.parametrize("elements", [1, 16, 20_003])
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "uint16"])
def test_copy(elements, dtype):
    x = np.arange(elements).astype(dtype)
    kernel = layout.copy(elements, cuda_kernels.gpu(), {"uint16": "bfloat16"}.get(dtype, dtype))
    assert (cuda_kernels.run_kernel(kernel, {"x": x})["y"] == x).all()


@pytest.mark.parametrize("arch", cuda_kernels.ARCHITECTURES)
def test_no_spills(arch):
    target = cuda_kernels.gpu("bf16", arch, 132)
    image = MapType(64, 224, 224, 3, 3, "bfloat16", 1)
    wide = MapType(64, 56, 56, 256, 512, "bfloat16", 8)
    for kernel in (
        layout.nchw_to_nhwc(image, target),
        layout.nhwc_to_nchw(wide, target),
        layout.copy_map(wide, wide, target, "bfloat16"),
        layout.copy(1 << 24, target),
    ):
        cuda_kernels.assert_no_spills(kernel)
