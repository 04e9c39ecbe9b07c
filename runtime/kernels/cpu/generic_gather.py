"""Gather and its gradient on a CPU: rows of what lies behind the axis."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.generic import (
    GenericProblem,
    store,
)
from bnfuse.runtime.kernels.common.generic_moves import fill, gather_index, gather_sizes, gathered
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.cpu.generic_nest import parallel_rows
from bnfuse.runtime.kernels.cpu.sweep import Args, vectors
from bnfuse.runtime.targets.target import CpuTarget


def gather(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    """Emit data, indices -> y. Indices beyond the data are clamped to it."""
    outer, _, inner, count = gather_sizes(problem, problem.shape(0), problem.shape(1))

    def row(at: Expr) -> None:
        base = T.bind(gathered(problem, args, at))
        _along(inner, target, lambda k: store(args, "out0", at * inner + k, args["in0"][base + k]))

    _rows_or_nothing(outer * count * inner, outer * count, target, row)


def gather_grad(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    """Emit indices, dy -> dx. The threads share what lies before the axis, or nothing: an index may come twice."""
    outer, length, inner, count = gather_sizes(problem, problem.out_shape, problem.shape(0))
    fill(args, "out0", problem.out_shape, 0, problem.out_dtype)

    def image(outer_at: Expr) -> None:
        with T.serial(0, count) as i:
            index = T.bind(gather_index(args["in0"][i], length))

            def add(k: Expr) -> None:
                to = (outer_at * length + index) * inner + k
                store(args, "out0", to, args["out0"][to] + args["in1"][(outer_at * count + i) * inner + k])

            _along(inner, target, add)

    _rows_or_nothing(outer * count * inner, outer, target, image)


def _along(count: int, target: CpuTarget, emit: Callable[[Expr], None]) -> None:
    for vector in vectors(count, target.lanes):
        with vector.each() as j:
            emit(vector.base + j)


def _rows_or_nothing(elements: int, rows: int, target: CpuTarget, emit: Callable[[Expr], None]) -> None:
    if elements:
        parallel_rows(rows, target, emit)
    else:
        T.evaluate(tirx.const(0, "int32"))


OPS = {"Gather": gather, "GatherGrad": gather_grad}
