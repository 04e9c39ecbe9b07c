"""Gemm, of one product and of batches, against float64 numpy."""

import numpy as np
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.common.dense import BatchAxis, GemmProblem, batch_axes
from bnfuse.runtime.kernels.cpu.dense import gemm

pytestmark = pytest.mark.usefixtures("optimized")

TARGET = resolve("cpu", 2)

CASES = [
    GemmProblem(16, 10, 70, trans_b=True, bias=(10,)),
    GemmProblem(9, 103, 2075, trans_b=True, alpha=0.5, beta=2.0, bias=(1, 103)),  # two blocks of k, every rest
    GemmProblem(16, 70, 10),
    GemmProblem(37, 77, 150, alpha=-1.0, bias=(37, 1)),
    GemmProblem(103, 33, 16, trans_a=True, bias=(103, 33)),
    GemmProblem(5, 6, 7, trans_a=True, trans_b=True, bias=()),
    GemmProblem(200, 3, 20),  # rows are shared
    GemmProblem(1, 1, 1, trans_b=True),
    GemmProblem(3, 40, 9, beta=0.0, bias=(40,)),
]


@pytest.mark.parametrize("problem", CASES, ids=str)
def test_equals_numpy(problem):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(problem.m, problem.k)).astype(np.float32)
    b = rng.normal(size=(problem.k, problem.n)).astype(np.float32)
    c = rng.normal(size=problem.bias or ()).astype(np.float32)
    kernel = gemm(problem, TARGET)
    operands = {"a": a.T if problem.trans_a else a, "b": b.T if problem.trans_b else b, "c": c}
    found = execute.call(kernel, {p.name: operands[p.name] for p in kernel.params if p.name != "y"})["y"]
    wanted = problem.alpha * (a.astype(np.float64) @ b.astype(np.float64))
    scale = np.abs(wanted).max()
    if problem.bias is not None:
        wanted = wanted + problem.beta * c
    assert np.abs(found.reshape(problem.m, problem.n) - wanted).max() <= 1e-6 * scale


def test_a_bias_that_does_not_broadcast_is_refused():
    with pytest.raises(BnfuseError, match="does not broadcast"):
        gemm(GemmProblem(4, 5, 6, bias=(4,)), TARGET)


# -- batches -------------------------------------------------------------------------------------------------------

SHAPES = [  # of A and of B
    ((4, 49, 8), (4, 8, 49)),
    ((2, 3, 5, 7), (2, 3, 7, 33)),
    ((3, 1, 20, 70), (1, 5, 70, 6)),  # two blocks of k
    ((5, 4, 9), (9, 17)),
    ((4, 9), (5, 9, 3)),
    ((2, 1, 3, 6, 5), (2, 1, 5, 4)),
    ((1, 4, 9), (1, 9, 3)),
]


@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_batches_equal_numpy(a, b, trans_a, trans_b):
    x, y = (np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate((a, b)))
    wanted = np.matmul(x.astype(np.float64), y)
    problem = GemmProblem(a[-2], b[-1], a[-1], trans_a, trans_b, batch=batch_axes(a[:-2], b[:-2]))
    given = {"a": x.swapaxes(-1, -2) if trans_a else x, "b": y.swapaxes(-1, -2) if trans_b else y}
    found = execute.call(gemm(problem, TARGET), given)["y"]
    assert np.abs(found.reshape(wanted.shape) - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_axes_of_a_batch_that_both_walk_alike_are_one():
    assert batch_axes((), ()) == batch_axes((1, 1), (1,)) == ()
    assert batch_axes((2, 3), (2, 3)) == (BatchAxis(6, 1, 1),)
    assert batch_axes((2, 3), ()) == (BatchAxis(6, 1, 0),)
    assert batch_axes((4, 2, 3), (2, 1)) == (BatchAxis(4, 6, 0), BatchAxis(2, 3, 1), BatchAxis(3, 1, 0))
    with pytest.raises(BnfuseError, match="do not broadcast"):
        batch_axes((2, 3), (2, 4))
