"""Coefficients that each sample has of its own, as of a GroupNorm, in the kernels of both targets."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest
from cuda_conv import CudaCase, assert_close, run_case
from cuda_kernels import gpu
from cuda_operator import operator as on_gpu
from source_files import load

from bnfuse.opset.spec import may_be_of_samples
from bnfuse.runtime.backends.cpu.execute import operator as on_cpu
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu import conv_backward, conv_forward, pointwise, pool
from bnfuse.runtime.kernels.cuda import conv_backward as cuda_conv_backward
from bnfuse.runtime.kernels.cuda import conv_forward as cuda_conv_forward
from bnfuse.runtime.kernels.cuda import pointwise as cuda_pointwise
from bnfuse.runtime.kernels.cuda import pool as cuda_pool

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

make_case = load(pathlib.Path(__file__).parents[1] / "bnfuse/opset/conftest.py").make_case
TARGET = dataclasses.replace(resolve("cpu"), threads=2)

SWEEPS = [
    "NormalizePointwise",
    "NormalizeReluPointwiseStatistics",
    "NormalizeSkipHardSwishAddPointwise",
    "NormalizeReluAddNormalizedReluPointwise",
    "NormalizeWhereReluPointwise",
    "BatchNormGradPointwiseGrad",
    "NormalizePointwiseGradReluGrad",
    "NormalizePointwiseGradQuickGeluGradReduce",
    "SliceBatchNormGradPointwiseGradAddGradientAddBatchNormGrad",
    "LeakyReluGradBatchNormGradPointwiseGradAddGradientReduceOtherReduceLeakyReluGrad",
]
POOLS = [
    "NormalizeReluMaxPoolStatistics",
    "NormalizeReluGlobalAveragePool",
    "NormalizeHardSwishAveragePool",
    "NormalizeMaxPoolGradAddGradientReluGrad",
    "NormalizeGlobalAveragePoolGradReluGrad",
    "BatchNormGradNormalizeAveragePoolGradClipGradReduce",
]


def made(name, **more):
    """An operator with operands as its kernel takes them: coefficients are maps of one pixel a sample."""
    case = make_case(name, by_sample=True, **more)
    operands = {
        key: value[..., None, None] if may_be_of_samples(key) and value.ndim == 2 else value
        for key, value in case.operands.items()
    }
    return case, operands, case.expected()


def compare(found, expected, tolerance=1e-5):
    for name, value in expected.items():
        if name != "indices":
            error = np.linalg.norm(found[name] - value) / (np.linalg.norm(value) + 1e-30)
            assert error < tolerance, (name, error)


def run(name, modules, operator, target, shape):
    case, operands, expected = made(name, shape=shape)
    if case.op.core == "MaxPoolGrad":
        operands["indices"] = in_window(case, shape)
    forward, backward = modules
    generator = backward if case.op.is_gradient else forward
    shapes = {key: value.shape for key, value in expected.items()}
    compare(operator(generator, target, name, operands, shapes, case.attributes), expected)


def in_window(case, shape):
    """The places of maxima inside their windows, of flat indices into NCHW as the file has them."""
    flat, attributes = case.operands["indices"], case.attributes
    rows, columns = np.indices(flat.shape)[2:]
    pixel = flat % (shape[2] * shape[3])
    found = []
    for axis, place in ((0, pixel // shape[3]), (1, pixel % shape[3])):
        start = (rows, columns)[axis] * attributes["strides"][axis] - attributes["pads"][axis]
        found.append((place - start) // attributes["dilations"][axis])
    return (found[0] * attributes["kernel_shape"][1] + found[1]).astype(np.uint8)


@pytest.mark.parametrize("shape", [(3, 37, 5, 4), (2, 16, 3, 3)])
@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps(name, shape):
    modules = pointwise.pointwise_forward, pointwise.pointwise_backward
    run(name, modules, on_cpu, TARGET, shape)
    modules = cuda_pointwise.pointwise_forward, cuda_pointwise.pointwise_backward
    run(name, modules, on_gpu, gpu(), shape)


@pytest.mark.parametrize("shape", [(3, 21, 8, 6), (2, 16, 7, 7)])
@pytest.mark.parametrize("name", POOLS)
def test_pools(name, shape):
    run(name, (pool.pool_forward, pool.pool_backward), on_cpu, TARGET, shape)
    run(name, (cuda_pool.pool_forward, cuda_pool.pool_backward), on_gpu, gpu(), shape)


FORWARD = ["NormalizeReluConvStatistics", "NormalizeReluAddNormalizedConvBias", "NormalizeQuickGeluConv"]
BACKWARD = [
    "BatchNormGradNormalizeReluConvGradReluGrad",
    "BatchNormGradNormalizeReluConvGradAddGradientAddBatchNormGradReluGradReduceOther",
    "ReluGradBatchNormGradConvGradReduceReduceReluGrad",
    "SliceBatchNormGradNormalizeQuickGeluConvGradInputQuickGeluGrad",
    "BatchNormGradNormalizeReluConvGradWeight",
]
IMAGES = [  # on a GPU, and of depthwise ones, their sums are swept apart
    "NormalizeReluAddNormalizedConvImageStatistics",
    "BatchNormGradNormalizeReluConvGradReluGradImageReduce",
    "BatchNormGradConvGradAddGradientReluGradImageReduceOther",
]
WINDOWS = {
    "1x1": {"kernel_shape": [1, 1], "pads": [0] * 4},
    "3x3": {},
    "strided": {"strides": [2, 2]},
    "grouped": {"group": 2},
    "depthwise": {"group": 6, "strides": [2, 1]},
}


CONVOLUTIONS = [(name, window) for name in FORWARD + BACKWARD + IMAGES for window in WINDOWS]


@pytest.mark.parametrize(("name", "window"), [c for c in CONVOLUTIONS if c[0] not in IMAGES or c[1] != "depthwise"])
def test_convolutions(name, window):
    """As a processor does them, and in another of the ways that it has: by turns, so that each operator meets them."""
    conv = WINDOWS[window]
    case, operands, expected = made(name, shape=(3, 6, 9, 8), out_channels=6, conv=conv)
    module = conv_backward if case.op.is_gradient else conv_forward
    generator = getattr(module, module.__name__.rsplit(".", 1)[-1])
    shapes = {key: value.shape for key, value in expected.items()}

    def every(problem, target):
        ways.extend(module.choices(problem, target))
        return generator(problem, target)

    ways = []
    compare(on_cpu(every, TARGET, name, operands, shapes, case.attributes), expected)
    if others := ways[1:4]:
        way = others[CONVOLUTIONS.index((name, window)) % len(others)]
        chosen = lambda problem, target: generator(problem, target, way.algorithm, way.plan)  # noqa: E731
        compare(on_cpu(chosen, TARGET, name, operands, shapes, case.attributes), expected, 1e-4)


GPU_CASES = {
    "1x1": {"kernel": (1, 1)},
    "3x3": {"kernel": (3, 3), "pads": (1, 1, 1, 1)},
    "strided": {"kernel": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 2)},
    "depthwise": {"kernel": (3, 3), "pads": (1, 1, 1, 1), "group": 24},
}


@pytest.mark.parametrize("window", GPU_CASES)
@pytest.mark.parametrize("name", FORWARD[:2] + BACKWARD[:3])
def test_convolutions_on_a_gpu(name, window):
    precision, dtype = ("bf16", "bfloat16") if window == "3x3" else ("fp32", "float32")
    case = CudaCase(name, 2, 6, 5, 24, 24, dtype=dtype, by_sample=True, **GPU_CASES[window])
    module = cuda_conv_backward.conv_backward if "Grad" in name else cuda_conv_forward.conv_forward
    found, expected, _ = run_case(case, module, gpu(precision))
    assert_close(found, expected, case.dtype_of, 1e-5 if precision == "fp32" else 1e-3)
