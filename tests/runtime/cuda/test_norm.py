"""The stand-alone halves of a BatchNorm and sums of maps on a GPU, against float64."""

import cuda_kernels
import numpy as np
import pytest
from cuda_operator import alignment, nhwc, raw, rounded, values_of

from bnfuse.opset import plain, reference
from bnfuse.runtime.kernels.cuda.norm import batch_norm_grad_reduce, batch_norm_statistics
from bnfuse.runtime.kernels.cuda.sum_maps import sum_maps
from bnfuse.runtime.kernels.kernel import MapType


def in_slot(x, stride, offset, dtype):
    n, c, h, w = x.shape
    buffer = np.full((n, h, w, stride), 9.0, np.float32)
    buffer[..., offset : offset + c] = nhwc(x)
    return raw(buffer, dtype), MapType(n, h, w, c, stride, dtype, alignment(c, stride, offset))


@pytest.mark.parametrize("sweeps", [1, 2])
@pytest.mark.parametrize(("dtype", "ratio"), [("float32", 0), ("float32", 1e3), ("bfloat16", 0), ("float16", 3)])
@pytest.mark.parametrize(("c", "stride", "offset"), [(37, 50, 6), (24, 32, 8)])
def test_statistics(sweeps, dtype, ratio, c, stride, offset):
    x = rounded(np.random.default_rng(0).normal(size=(3, c, 9, 7)) + ratio, dtype)
    buffer, kind = in_slot(x, stride, offset, dtype)
    kernel = batch_norm_statistics(kind, cuda_kernels.gpu(), sweeps)
    found = cuda_kernels.run_kernel(kernel, {"x": buffer}, {"x": offset})
    mean, variance = reference.statistics(x)
    np.testing.assert_allclose(found["mean"], mean, rtol=2e-7, atol=1e-7)
    np.testing.assert_allclose(found["variance"], variance, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_grad_reduce(dtype):
    rng = np.random.default_rng(2)
    operands = {name: rounded(rng.normal(size=(2, 21, 8, 5)), dtype) for name in ("dz", "x")}
    operands |= {name: rounded(rng.uniform(0.5, 2, size=21), "float32") for name in ("mean", "inv_std")}
    (dz, dz_kind), (x, x_kind) = in_slot(operands["dz"], 21, 0, dtype), in_slot(operands["x"], 40, 11, dtype)
    kernel = batch_norm_grad_reduce(dz_kind, x_kind, cuda_kernels.gpu())
    found = cuda_kernels.run_kernel(kernel, {**operands, "dz": dz, "x": x}, {"x": 11})
    for name, value in reference.run(plain.PLAIN_OPS["BatchNormGradReduce"], operands, {}).items():
        assert np.abs(found[name] - value).max() <= 1e-6 * np.abs(value).max(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_sums_of_maps(count, dtype):
    rng = np.random.default_rng(count)
    xs = [rounded(rng.normal(size=(2, 19, 5, 3)), dtype) for _ in range(count)]
    buffers, kinds = zip(*(in_slot(x, 19 + i, i, dtype) for i, x in enumerate(xs)), strict=True)
    offsets = {f"x{i}": i for i in range(count)}
    kernel = sum_maps(kinds, MapType(2, 5, 3, 19, 19, dtype, 1), cuda_kernels.gpu())
    found = cuda_kernels.run_kernel(kernel, {f"x{i}": b for i, b in enumerate(buffers)}, offsets)["y"]
    exact = nhwc(np.sum(xs, axis=0)).reshape(-1)
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    np.testing.assert_allclose(values_of(found, dtype), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "float32"), ("sm_90", "bfloat16")])
def test_no_spills(arch, dtype):
    target = cuda_kernels.gpu("bf16", arch, 132)
    kind = MapType(64, 56, 56, 256, 256, dtype, 8)
    cuda_kernels.assert_no_spills(batch_norm_statistics(kind, target))
    cuda_kernels.assert_no_spills(batch_norm_statistics(kind, target, 2))
    cuda_kernels.assert_no_spills(batch_norm_grad_reduce(kind, kind, target))
    cuda_kernels.assert_no_spills(sum_maps((kind,) * 6, kind, target))
