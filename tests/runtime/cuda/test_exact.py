"""Products at precision fp32, interpreted on tensor cores that cut sums off as a GPU's do."""

import lockstep_ops
import numpy as np
import pytest
import tensor_core
from cuda_conv import CudaCase, run_case
from cuda_kernels import gpu, run_kernel

from bnfuse.runtime.kernels.common.dense import GemmProblem
from bnfuse.runtime.kernels.cuda.conv_backward import conv_backward
from bnfuse.runtime.kernels.cuda.conv_forward import conv_forward
from bnfuse.runtime.kernels.cuda.dense import gemm

NAMES = ("x", "weight", "dy")
ONE = gpu("fp32", multiprocessors=1)


@pytest.fixture(autouse=True)
def hardware(monkeypatch):
    monkeypatch.setattr(lockstep_ops, "accumulate", tensor_core.accumulate)


@pytest.mark.parametrize(
    ("c", "product", "count", "wanted"),
    [
        (1, 2.0**-25, 4, 1 + 2.0**-23),  # two bits more than the result has
        (1, 2.0**-25, 7, 1 + 2.0**-23),  # and cut off in the end
        (1, 2.0**-26, 8, 1),  # cut off before
        (-1, -(2.0**-26), 8, -1),
        (1, -(2.0**-25), 1, 1 - 2.0**-24),
        (0, 2.0**-26, 8, 2.0**-23),
    ],
)
def test_a_tensor_core_cuts_off(c, product, count, wanted):
    left, right = np.zeros((2, 8), np.float32), np.ones((8, 1), np.float32)
    left[0, :count] = product
    found = tensor_core.accumulate(left, right, np.full((2, 1), c, np.float32))
    assert found.dtype == np.float32 and found.tolist() == [[wanted], [c]]


def error(found, exact):
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("k", [40, 1024])
def test_a_dense_layer_is_as_exact_as_float32(k):
    a, b = (np.random.default_rng(k).normal(size=shape).astype(np.float32) for shape in ((32, k), (k, 32)))
    found = run_kernel(gemm(GemmProblem(32, 32, k), ONE), {"a": a, "b": b})["y"].reshape(32, 32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert error(found, exact) < 2 * error(a @ b, exact)


SAME = {"kernel": (3, 3), "pads": (1, 1, 1, 1)}


def by_torch(name, x, weight, dy, pad):
    """A result of a convolution or of its gradients in float32; of arrays, as an array."""
    import torch

    x, weight, dy = (torch.from_numpy(array.astype(np.float32)) for array in (x, weight, dy))
    ways = {
        "y": lambda: torch.conv2d(x, weight, padding=pad),
        "dx": lambda: torch.nn.grad.conv2d_input(x.shape, weight, dy, padding=pad),
        "dweight": lambda: torch.nn.grad.conv2d_weight(x, weight.shape, dy, padding=pad),
    }
    return ways[name]().numpy()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("generator", "case"),
    [
        (conv_forward, CudaCase("Conv", 1, 8, 8, 512, 32)),
        (conv_forward, CudaCase("Conv", 1, 8, 8, 64, 32, **SAME)),
        (conv_backward, CudaCase("ConvGrad", 1, 24, 24, 32, 32)),
        (conv_backward, CudaCase("ConvGrad", 1, 16, 16, 32, 32, **SAME)),
    ],
    ids=["forward", "forward-halo", "gradients", "gradients-halo"],
)
def test_a_convolution_is_as_exact_as_float32(generator, case):
    operands = case.operands() | {"x": np.maximum(case.operands()["x"], 0)}
    found, expected, _ = run_case(case, generator, ONE, operands)
    for name, exact in expected.items():
        given = [operands.get(n, np.zeros(case.shape(n))) for n in NAMES]
        float32 = by_torch(name, *given, case.pads[0])
        assert error(found[name], exact) < 2 * error(float32, exact), name
