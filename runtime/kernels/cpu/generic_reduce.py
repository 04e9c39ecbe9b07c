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
    Shape,
    View,
    broadcast_view,
    dense_view,
    nest,
    store,
)
from bnfuse.runtime.kernels.common.generic_reduce import (
    BY_ROWS,
    DIV_GRADS,
    FOLDINGS,
    Axes,
    Folding,
    Row,
    accumulator_of,
    place,
    reduced_axes,
    rows_of,
)
from bnfuse.runtime.kernels.common.steps import Expr, f64, to_f32
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


def div_grad(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    """Emit dy, a, b -> da = sum dy/b, [db = -sum dy*a/b^2], summed over the axes that a or b was broadcast along."""
    (space, _), (a_shape, _), (b_shape, _) = problem.inputs
    a_view, b_view, dy_view = broadcast_view(a_shape, space), broadcast_view(b_shape, space), dense_view(space)
    if math.prod(space) == 0:
        nothing()
        return

    for name, shape, term in zip(
        (p for p in ("out0", "out1") if p in args), (a_shape, b_shape), DIV_GRADS, strict=False
    ):
        _sum_to(shape, space, (dy_view, a_view, b_view), target, args, name, term)


def _sum_to(
    shape: Shape,
    space: Shape,
    views: tuple[View, View, View],
    target: CpuTarget,
    args: Args,
    out: str,
    term: Callable[[Expr, Expr, Expr], Expr],
) -> None:
    """Store in out[i] the sum of `term` over the points of the space that broadcasting maps to i."""
    aligned = (1,) * (len(space) - len(shape)) + shape
    gone = [i for i, (size, whole) in enumerate(zip(aligned, space, strict=True)) if size != whole]
    count = math.prod(space[i] for i in gone)
    total = tir.workspace(math.prod(shape), "float64")

    def walk(view: View, index: Expr) -> Expr:
        return place(index, tuple((space[i], view.strides[i]) for i in gone))

    kept = [dense_view(aligned), *(View(tuple(0 if i in gone else s for i, s in enumerate(v.strides))) for v in views)]

    def point(to: Expr, *at: Expr) -> None:
        T.buffer_store(total, f64(0.0), [to])

    nest(aligned, kept, point)
    with T.serial(0, count) as k:
        moved = [T.bind(walk(view, k)) for view in views]

        def add(to: Expr, *at: Expr) -> None:
            operands = [args[f"in{i}"][start + move] for i, (start, move) in enumerate(zip(at, moved, strict=True))]
            T.buffer_store(total, total[to] + term(*operands), [to])

        nest(aligned, kept, add)
    nest(aligned, kept[:1], lambda to: store(args, out, to, to_f32(total[to])))


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
    "DivGrad": div_grad,
    **{name: by_rows(row) for name, row in BY_ROWS.items()},
}
