"""Every operator that has no kernel of its own, on a GPU: the formulas of kernels/common/generic_ops.py.

Each loop nest of the CPU's operator is a stage here, with a thread for each point of its space, so that what a nest
writes is there for the next one (a fill, then a copy into it). Reductions are in generic_reduce.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.generic import GenericProblem, Shape, View, collapse, nested_by, starts_of, store
from bnfuse.runtime.kernels.common.generic_moves import fill, gather_index, gather_sizes, gathered
from bnfuse.runtime.kernels.common.generic_ops import (
    NESTED,
    SCALARS,
    dropout_key,
    dropout_point,
    dropout_ratio,
    generic_params,
)
from bnfuse.runtime.kernels.common.generic_reduce import BY_ROWS, FOLDINGS
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cuda.device import Block, Expr, Stage, stage, when
from bnfuse.runtime.kernels.cuda.generic_reduce import fold_stages, folds_of, softmax_stage
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CudaTarget

THREADS = 256
BLOCKS = 16  # for each multiprocessor, at most: chosen by hand


def generic(problem: GenericProblem, target: CudaTarget) -> Kernel:
    """Make the kernel: in0, in1, ... -> out0, out1, ...; scalars: SCALARS; scratch: partials of large reductions."""
    params = generic_params(problem)
    scalars = tuple((name, "int64") for name in SCALARS.get(problem.op_type, ()))
    if _folds(problem):
        for i, fold in enumerate(folds_of(problem)):
            if (shares := fold.shares(target)) > 1:
                params += (Param(f"partials{i}", "out", shares * fold.results, fold.dtype),)
    name = unique_name(problem.op_type, problem, target)
    return Kernel(
        name, problem, target, params, lambda: _stages(name, problem, target, params, scalars), scalars=scalars
    )


def _folds(problem: GenericProblem) -> bool:
    return problem.op_type in FOLDINGS or problem.op_type == "DivGrad"


def _stages(
    name: str, problem: GenericProblem, target: CudaTarget, params: tuple[Param, ...], scalars: Any
) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    if _folds(problem):
        for i, fold in enumerate(folds_of(problem)):
            stages += fold_stages(f"{name}_{i}", fold, params, f"partials{i}", target)
    elif problem.op_type in BY_ROWS:
        if math.prod(problem.shape()):
            stages.append(softmax_stage(name, problem, params, target))
    else:
        nests = Nests(name, params, scalars, target)
        with nested_by(nests.nest):
            OWN.get(problem.op_type, _nested)(problem, target, nests)
        stages += nests.stages
    return tuple(stages) or (_nothing(name, params),)


def _nothing(name: str, params: Sequence[Param]) -> Stage:
    """Build a stage for tensors that have no elements."""
    with stage(name, params, grid=(1, 1, 1), threads=32) as block:
        T.evaluate(tirx.const(0, "int32"))
    return block.stage


class Nests:
    """Nests, each made a stage. To the operators it also is their arguments: those of the stage that is open."""

    def __init__(self, name: str, params: Sequence[Param], scalars: Any, target: CudaTarget) -> None:
        self.name, self.params, self.scalars, self.target = name, params, scalars, target
        self.stages: list[Stage] = []
        self.block: Block | None = None

    def __getitem__(self, name: str) -> Any:
        assert self.block is not None
        return self.block[name]

    def __contains__(self, name: str) -> bool:
        return any(param.name == name for param in self.params)

    def scalar(self, name: str) -> Expr:
        """Read a run-time argument of the open stage, int64."""
        assert self.block is not None
        return self.block.scalars[name]

    def nest(self, space: Shape, views: Sequence[View], emit: Callable[..., None]) -> None:
        """Make a stage of `emit(index of each view)` for every point of the space."""
        if math.prod(space) == 0:
            return
        space, views = collapse(space, views)
        self.flat(math.prod(space), lambda i: emit(*(T.bind(at) for at in starts_of(i, space, views))))

    def flat(self, count: int, emit: Callable[[Expr], None]) -> None:
        """Make a stage of `emit(i)` for i < count."""
        if count == 0:
            return
        blocks = min(-(-count // THREADS), BLOCKS * self.target.multiprocessors)
        turns = -(-count // (blocks * THREADS))
        name = f"{self.name}_{len(self.stages)}"
        with stage(name, self.params, grid=(blocks, 1, 1), threads=THREADS, scalars=self.scalars) as block:
            self.block = block
            own = T.bind(block.x * THREADS + block.tid)
            with T.serial(0, turns) as turn:
                i = T.bind(turn * (blocks * THREADS) + own)
                when(True if count == turns * blocks * THREADS else i < count, lambda: emit(i))
        self.block = None
        self.stages.append(block.stage)


def _nested(problem: GenericProblem, target: CudaTarget, nests: Nests) -> None:
    NESTED[problem.op_type](problem, nests)


def _dropout(problem: GenericProblem, target: CudaTarget, nests: Nests) -> None:
    def point(at: Expr) -> None:
        key = dropout_key(problem, nests.scalar("seed"), nests.scalar("step"))
        dropout_point(problem, nests, key, at)

    dropout_ratio(problem)
    nests.flat(math.prod(problem.out_shape), point)


def _gather(problem: GenericProblem, target: CudaTarget, nests: Nests) -> None:
    """Emit data, indices -> y."""
    outer, _, inner, count = gather_sizes(problem, problem.shape(0), problem.shape(1))

    def point(at: Expr) -> None:
        row = T.bind(tirx.floordiv(at, inner))
        base = T.bind(gathered(problem, nests, row))
        store(nests, "out0", at, nests["in0"][base + (at - row * inner)])

    nests.flat(outer * count * inner, point)


def _gather_grad(problem: GenericProblem, target: CudaTarget, nests: Nests) -> None:
    """Emit indices, dy -> dx.

    A thread has a place before and behind the axis, and adds there what each index brings.
    """
    outer, length, inner, count = gather_sizes(problem, problem.out_shape, problem.shape(0))
    fill(nests, "out0", problem.out_shape, 0, problem.out_dtype)

    def point(at: Expr) -> None:
        image = T.bind(tirx.floordiv(at, inner))
        k = T.bind(at - image * inner)
        with T.serial(0, count) as i:
            index = T.bind(gather_index(nests["in0"][i], length))
            to = T.bind((image * length + index) * inner + k)
            added = nests["out0"][to] + nests["in1"][(image * count + i) * inner + k]
            store(nests, "out0", to, added)

    nests.flat(outer * inner if count else 0, point)


OWN: dict[str, Callable[[GenericProblem, CudaTarget, Nests], None]] = {
    "Dropout": _dropout,
    "Gather": _gather,
    "GatherGrad": _gather_grad,
}
