"""Reductions over any axes, softmax and its relatives.

A reduction has two forms. If the last axis stays, vectors run along it and each lane sums its own column; if it goes,
vectors run along it too, and their lanes are joined at the end. Sums and means of floats are taken in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.generic import (
    GenericProblem,
    store,
)
from bnfuse.runtime.kernels.common.generic_reduce import (
    BY_ROWS,
    FOLDINGS,
    Axes,
    Folding,
    Row,
    accumulator_of,
    place,
    reduced_axes,
    rows_of,
)
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.generic_nest import Emit, nothing, parallel_rows
from bnfuse.runtime.kernels.cpu.rows import ThreadRows
from bnfuse.runtime.kernels.cpu.sweep import Args, Vector, vectors
from bnfuse.runtime.targets.target import CpuTarget


def reduction(folding: Folding) -> Emit:
    """Give what emits a reduction, in one of the two forms of the module's docstring."""

    def emit(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
        shape, split, accumulator = problem.shape(), reduced_axes(problem), accumulator_of(folding, problem)

        def take(at: Expr) -> Expr:
            return folding.take(tirx.Cast(accumulator, args["in0"][at]))

        def put(at: Expr, value: Expr) -> None:
            value = folding.finish(value, split.reduced_count)
            store(args, "out0", at, tirx.Cast(problem.out_dtype, value))

        if math.prod(shape) == 0:
            nothing()
        elif split.last_is_kept:
            _columns(split, folding, accumulator, target, take, put)
        else:
            _rows(split, folding, accumulator, target, take, put)

    return emit


Take = Callable[[Expr], Expr]
Put = Callable[[Expr, Expr], None]


def _columns(axes: Axes, folding: Folding, dtype: str, target: CpuTarget, take: Take, put: Put) -> None:
    """Reduce where the last axis stays: a vector of it at a time, over all that is reduced."""
    *outer, (inner, _) = axes.kept
    count = axes.kept_count // inner

    def column(row: Expr, vector: Vector) -> None:
        total = vector.local(dtype)
        base = T.bind(place(row, tuple(outer)))
        with vector.each() as j:
            T.buffer_store(total, folding.start(dtype), [j])
        with T.serial(0, axes.reduced_count) as r:
            start = T.bind(base + place(r, axes.reduced))
            with vector.each() as j:
                T.buffer_store(total, folding.join(total[j], take(start + vector.base + j)), [j])
        with vector.each() as j:
            put(row * inner + vector.base + j, total[j])

    if count >= target.threads:
        parallel_rows(count, target, lambda row: _each(vectors(inner, target.lanes), lambda v: column(row, v)))
        return
    whole = inner // target.lanes
    with T.serial(0, count) as row:
        if whole:
            parallel_rows(whole, target, lambda v: column(row, Vector(v * target.lanes, target.lanes)))
        if inner % target.lanes:
            column(row, Vector(tirx.const(whole * target.lanes, "int32"), inner % target.lanes))


def _each(items: Any, emit: Callable[[Any], None]) -> None:
    for item in items:
        emit(item)


def _rows(axes: Axes, folding: Folding, dtype: str, target: CpuTarget, take: Take, put: Put) -> None:
    """Reduce where the last axis goes: vectors of it, joined lane by lane, then across."""
    *outer, (inner, _) = axes.reduced or ((1, 1),)
    count, lanes = math.prod(size for size, _ in outer), target.lanes

    def row(kept: Expr) -> None:
        total = tir.registers(lanes, dtype)
        base = T.bind(place(kept, axes.kept))
        with T.vectorized(0, lanes) as j:
            T.buffer_store(total, folding.start(dtype), [j])
        with T.serial(0, count) as r:
            start = T.bind(base + place(r, tuple(outer)))
            for vector in vectors(inner, lanes):
                with vector.each() as j:
                    T.buffer_store(total, folding.join(total[j], take(start + vector.base + j)), [j])
        with T.serial(1, lanes) as lane:
            T.buffer_store(total, folding.join(total[0], total[lane]), [0])
        put(kept, total[0])

    parallel_rows(axes.kept_count, target, row)


# Row by row


def by_rows(row: Row) -> Emit:
    """Give what emits an operator row by row."""

    def emit(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
        rows = ThreadRows.of(rows_of(problem))
        if math.prod(problem.shape()) == 0:
            nothing()
            return
        rows.each(target, lambda index, at: row(problem, target, args, rows, index, at))

    return emit


OPS: dict[str, Emit] = {
    **{name: reduction(folding) for name, folding in FOLDINGS.items()},
    **{name: by_rows(row) for name, row in BY_ROWS.items()},
}
