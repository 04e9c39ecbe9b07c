"""Gemm on tensor cores, interpreted, against numpy in float64 on operands rounded to the precision's type."""

import dataclasses
import pathlib

import ml_dtypes
import numpy as np
import pytest
import source_files
from cuda_kernels import assert_no_spills, gpu, run_kernel

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common.dense import GemmProblem, batch_axes
from bnfuse.runtime.kernels.cuda import dense
from bnfuse.runtime.kernels.cuda.dense import SHAPES, choose_tiles, gemm, steps_of
from bnfuse.runtime.targets.target import CudaTarget

CASES = [
    GemmProblem(16, 10, 70, trans_b=True, bias=(10,)),
    GemmProblem(9, 103, 331, trans_b=True, alpha=0.5, beta=2.0, bias=(1, 103)),
    GemmProblem(16, 72, 12),
    GemmProblem(37, 77, 150, alpha=-1.0, bias=(37, 1)),
    GemmProblem(102, 34, 16, trans_a=True, bias=(102, 34)),
    GemmProblem(5, 6, 7, trans_a=True, trans_b=True, bias=()),
    GemmProblem(100, 132, 64, trans_a=True),
    GemmProblem(1, 1, 1, trans_b=True),
    GemmProblem(3, 40, 9, beta=0.0, bias=(40,)),
    GemmProblem(8, 64, 1024, trans_b=True, bias=(64,)),
]
BY_TURNS = (("fp32", "bf16"), ("bf16", "fp32"))  # of one share and of three


def rounded(x, precision):
    if precision == "tf32":
        return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return x if precision == "fp32" else x.astype({"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[precision])


def check(problem, precision):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(problem.m, problem.k)).astype(np.float32)
    b = rng.normal(size=(problem.k, problem.n)).astype(np.float32)
    c = rng.normal(size=problem.bias or ()).astype(np.float32)
    operands = {"a": a.T if problem.trans_a else a, "b": b.T if problem.trans_b else b, "c": c}
    kernel = gemm(problem, gpu(precision))
    found = run_kernel(kernel, {n: v for n, v in operands.items() if n != "c" or problem.bias is not None})["y"]
    wanted = problem.alpha * (rounded(a, precision).astype(np.float64) @ rounded(b, precision).astype(np.float64))
    scale = np.abs(wanted).max()
    if problem.bias is not None:
        wanted = wanted + problem.beta * c
    assert np.abs(found.reshape(problem.m, problem.n) - wanted).max() <= 3e-6 * scale


@pytest.mark.parametrize(
    ("problem", "precision"),
    [
        (problem, precision)
        for i, problem in enumerate(CASES)
        for precision in (("fp32", "bf16"), ("tf32", "fp16"))[i % 2]
    ],
    ids=str,
)
def test_equals_numpy(problem, precision):
    check(problem, precision)


@pytest.mark.parametrize(
    ("shape", "shares", "precision"),
    [(shape, *way) for i, shape in enumerate(SHAPES) for way in zip((1, 3), BY_TURNS[i % 2], strict=True)],
    ids=lambda value: f"{value.rows}x{value.columns}" if isinstance(value, type(SHAPES[0])) else str(value),
)
def test_every_tile(shape, shares, precision, monkeypatch):
    tiles = dataclasses.replace(shape, shares=shares, ahead=3)
    monkeypatch.setattr(dense, "choose_tiles", lambda problem, target: tiles)
    check(GemmProblem(shape.rows + 4, shape.columns + 6, 100, trans_a=True, bias=(shape.columns + 6,)), precision)
    check(GemmProblem(shape.rows, shape.columns + 1, 132, trans_b=True), precision)


on_cpu = source_files.load(pathlib.Path(__file__).parents[1] / "test_dense.py")


@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (True, True)])
@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize(("a", "b"), on_cpu.SHAPES)
def test_batches_equal_numpy(a, b, trans_a, trans_b, shares, monkeypatch):
    monkeypatch.setattr(dense, "choose_tiles", lambda *_: dataclasses.replace(SHAPES[4], shares=shares, ahead=2))
    x, y = (np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate((a, b)))
    wanted = np.matmul(x.astype(np.float64), y)
    problem = GemmProblem(a[-2], b[-1], a[-1], trans_a, trans_b, batch=batch_axes(a[:-2], b[:-2]))
    given = {"a": x.swapaxes(-1, -2) if trans_a else x, "b": y.swapaxes(-1, -2) if trans_b else y}
    found = run_kernel(gemm(problem, gpu("fp32", multiprocessors=2)), given)["y"]
    assert np.abs(found.reshape(wanted.shape) - wanted).max() <= 3e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize(
    "problem",
    [GemmProblem(64, 4096, 25088, trans_b=True), GemmProblem(64, 1000, 1024, trans_b=True), GemmProblem(16, 1000, 64)],
    ids=str,
)
def test_tiles_fit_and_fill_the_gpu(problem, arch):
    target = CudaTarget(arch, 108)
    tiles = choose_tiles(problem, target)
    assert tiles.shared <= dense.shared_limit(arch)
    blocks = -(-problem.m // tiles.rows) * -(-problem.n // tiles.columns) * tiles.shares
    assert blocks >= 0.8 * target.multiprocessors or steps_of(problem) // tiles.shares < 8


def test_a_bias_that_does_not_broadcast_is_refused():
    with pytest.raises(BnfuseError, match="does not broadcast"):
        gemm(GemmProblem(4, 5, 6, bias=(4,)), gpu())


@pytest.mark.parametrize(("arch", "precision"), [("sm_80", "fp32"), ("sm_90", "bf16")])
def test_compiles_without_spills(arch, precision):
    target = CudaTarget(arch, 108, precision)
    for problem in (
        GemmProblem(64, 4096, 2508, trans_b=True, bias=(4096,)),
        GemmProblem(4096, 2508, 64, trans_a=True),
        GemmProblem(49, 49, 32, trans_b=True, batch=batch_axes((64, 4), (4,))),
    ):
        assert_no_spills(gemm(problem, target))
