"""The stand-alone halves of a GroupNorm against the numpy reference in float64, on a CPU and on an interpreted GPU."""

import cuda_kernels
import numpy as np
import pytest
from cuda_operator import alignment, nhwc, raw, rounded

from bnfuse.opset import plain, reference
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.common.group_norm import GroupProblem
from bnfuse.runtime.kernels.cpu import group_norm as on_cpu
from bnfuse.runtime.kernels.cuda import group_norm as on_gpu
from bnfuse.runtime.kernels.kernel import MapType

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

TARGET = resolve("cpu", 2)


def in_slot(x, stride, offset, dtype="float32"):
    n, c, h, w = x.shape
    buffer = np.full((n, h, w, stride), 9.0, np.float32)
    buffer[..., offset : offset + c] = nhwc(x)
    return buffer, MapType(n, h, w, c, stride, dtype, 0)


def on_gpu_slot(x, stride, offset, dtype):
    buffer, kind = in_slot(x, stride, offset, dtype)
    return raw(buffer, dtype), MapType(kind.n, kind.h, kind.w, kind.c, stride, dtype, alignment(kind.c, stride, offset))


def expected(name, operands, **attributes):
    return reference.run(plain.PLAIN_OPS[name], {k: v.astype(np.float64) for k, v in operands.items()}, attributes)


def assert_close(found, wanted, tolerance):
    for name, value in wanted.items():
        error = np.abs(found[name].reshape(value.shape) - value).max()
        assert error <= tolerance * np.abs(value).max(), (name, error)


@pytest.mark.parametrize("ratio", [0.0, 1e3])
@pytest.mark.parametrize(("n", "c", "h", "w"), [(3, 37, 9, 7), (1, 16, 1, 5), (5, 4, 6, 6)])
def test_statistics(n, c, h, w, ratio):
    x = (np.random.default_rng(0).normal(size=(n, c, h, w)) + ratio).astype(np.float32)
    buffer, kind = in_slot(x, 50, 6)
    found = execute.call(on_cpu.group_norm_statistics(kind, TARGET), {"x": buffer}, {"x": 6})
    assert_close(found, expected("GroupNormStatistics", {"x": x}), 1e-5)


@pytest.mark.parametrize(("dtype", "ratio"), [("float32", 0), ("float32", 1e3), ("bfloat16", 0), ("float16", 3)])
@pytest.mark.parametrize(("c", "stride", "offset"), [(37, 50, 6), (24, 32, 8), (3, 3, 0)])
def test_statistics_on_a_gpu(dtype, ratio, c, stride, offset):
    x = rounded(np.random.default_rng(0).normal(size=(3, c, 9, 7)) + ratio, dtype)
    buffer, kind = on_gpu_slot(x, stride, offset, dtype)
    found = cuda_kernels.run_kernel(
        on_gpu.group_norm_statistics(kind, cuda_kernels.gpu()), {"x": buffer}, {"x": offset}
    )
    assert_close(found, expected("GroupNormStatistics", {"x": x}), 1e-5)


def reduced_case(seed, dtype="float32", shape=(3, 21, 8, 5)):
    rng = np.random.default_rng(seed)
    operands = {name: rounded(rng.normal(size=shape), dtype) for name in ("dz", "x")}
    return operands | {name: rounded(rng.uniform(0.5, 2, size=shape[:2]), "float32") for name in ("mean", "inv_std")}


def test_grad_reduce():
    operands = reduced_case(2)
    (dz, dz_kind), (x, x_kind) = in_slot(operands["dz"], 21, 0), in_slot(operands["x"], 40, 11)
    kernel = on_cpu.group_norm_grad_reduce(dz_kind, x_kind, TARGET)
    narrow = {name: operands[name].astype(np.float32) for name in ("mean", "inv_std")}
    found = execute.call(kernel, {**narrow, "dz": dz, "x": x}, {"x": 11})
    assert_close(found, expected("GroupNormGradReduce", operands), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("c", [21, 24])
def test_grad_reduce_on_a_gpu(dtype, c):
    operands = reduced_case(2, dtype, (3, c, 8, 5))
    (dz, dz_kind), (x, x_kind) = on_gpu_slot(operands["dz"], c, 0, dtype), on_gpu_slot(operands["x"], 40, 8, dtype)
    kernel = on_gpu.group_norm_grad_reduce(dz_kind, x_kind, cuda_kernels.gpu())
    found = cuda_kernels.run_kernel(kernel, {**operands, "dz": dz, "x": x}, {"x": 8})
    assert_close(found, expected("GroupNormGradReduce", operands), 1e-6)


COEFFICIENTS = [(3, 12, 3), (2, 37, 1), (4, 6, 6), (1, 10, 5), (2, 300, 2)]


@pytest.mark.parametrize(("samples", "channels", "groups"), COEFFICIENTS)
@pytest.mark.parametrize("op", ["GroupNormFinalize", "GroupNormGradFinalize"])
@pytest.mark.parametrize("raw", [0, 1])
@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_coefficients(target, raw, op, samples, channels, groups):
    rng = np.random.default_rng(samples)
    of_channels = ("scale", "bias")
    operands = {
        name: rng.uniform(0.5, 2, size=channels if name in of_channels else (samples, channels)).astype(np.float32)
        for name in plain.PLAIN_OPS[op].operands
    }
    number = {"epsilon": 1e-3} if op == "GroupNormFinalize" else {"count": 7 * channels // groups}
    problem = GroupProblem(op, samples, channels, groups, float(*number.values()), bool(raw))
    if target == "cpu":
        found = execute.call(on_cpu.group_coefficients(problem, TARGET), operands)
    else:
        found = cuda_kernels.run_kernel(on_gpu.group_coefficients(problem, cuda_kernels.gpu()), operands)
    assert_close(found, expected(op, operands, groups=groups, raw=raw, **number), 1e-6)


@pytest.mark.parametrize("arch", cuda_kernels.ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_spills(arch, dtype):
    target = cuda_kernels.gpu("bf16", arch, 132)
    kind = MapType(64, 56, 56, 256, 256, dtype, 8)
    cuda_kernels.assert_no_spills(on_gpu.group_norm_statistics(kind, target))
    cuda_kernels.assert_no_spills(on_gpu.group_norm_grad_reduce(kind, kind, target))
    for op in ("GroupNormFinalize", "GroupNormGradFinalize"):
        cuda_kernels.assert_no_spills(on_gpu.group_coefficients(GroupProblem(op, 64, 256, 32, 1.0), target))
