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

from bnfuse.runtime.kernels.common.generic import Along, GenericProblem, Shape, View, collapse, starts_of, walked_by
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
from bnfuse.runtime.kernels.cuda.device import Block, Expr, Stage, registers, stage, when
from bnfuse.runtime.kernels.cuda.generic_reduce import fold_stages, folds_of, row_stage
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
    return problem.op_type in FOLDINGS


def _stages(
    name: str, problem: GenericProblem, target: CudaTarget, params: tuple[Param, ...], scalars: Any
) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    if _folds(problem):
        for i, fold in enumerate(folds_of(problem)):
            stages += fold_stages(f"{name}_{i}", fold, params, f"partials{i}", target)
    elif problem.op_type in BY_ROWS:
        if math.prod(problem.shape()):
            stages.append(row_stage(name, problem, params, target))
    else:
        nests = Nests(name, params, scalars, target)
        with walked_by(nests):
            if problem.op_type == "Dropout":
                _dropout(problem, nests)
            else:
                NESTED[problem.op_type](problem, nests)
        stages += nests.stages
    return tuple(stages) or (_nothing(name, params),)


def _nothing(name: str, params: Sequence[Param]) -> Stage:
    """Build a stage for tensors that have no elements."""
    with stage(name, params, grid=(1, 1, 1), threads=32) as block:
        T.evaluate(tirx.const(0, "int32"))
    return block.stage


class Nests:
    """Walks, each made a stage. To the operators it also is their arguments: those of the stage that is open."""

    busy = 4096  # chosen by hand

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
        self.each(math.prod(space), lambda i: emit(*(T.bind(at) for at in starts_of(i, space, views))))

    def each(self, count: int, emit: Callable[[Expr], None]) -> None:
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

    def rows(self, count: int, inner: int, emit: Callable[[Expr, Along], None]) -> None:
        """Make a stage of `emit(row, along)` for row < count: a thread has one element of each row."""

        def element(i: Expr) -> None:
            row = T.bind(tirx.floordiv(i, inner))
            place = T.bind(i - row * inner)
            emit(row, lambda visit: visit(place))

        self.each(count * inner, element)

    def register(self, dtype: str) -> Any:
        """Give a buffer of one element, a thread's own."""
        return registers(1, dtype)


def _dropout(problem: GenericProblem, nests: Nests) -> None:
    def point(at: Expr) -> None:
        key = dropout_key(problem, nests.scalar("seed"), nests.scalar("step"))
        dropout_point(problem, nests, key, at)

    dropout_ratio(problem)
    nests.each(math.prod(problem.out_shape), point)
