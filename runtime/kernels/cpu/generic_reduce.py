"""Reductions over any axes, softmax and its relatives.

A reduction has two forms. If the last axis stays, vectors run along it and each lane sums its own column; if it goes,
vectors run along it too, and their lanes are joined at the end. Sums and means of floats are taken in float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu import steps, tir
from bnfuse.runtime.kernels.cpu.generic_elementwise import larger, smaller
from bnfuse.runtime.kernels.cpu.generic_nest import (
    Emit,
    GenericProblem,
    Shape,
    View,
    broadcast_view,
    dense_view,
    dtype_of,
    nest,
    parallel_rows,
    row_major,
    store,
)
from bnfuse.runtime.kernels.cpu.rows import At, Rows
from bnfuse.runtime.kernels.cpu.steps import Expr
from bnfuse.runtime.kernels.cpu.sweep import Args, Vector, f64, to_f32, vectors
from bnfuse.runtime.targets.target import CpuTarget, Target


@dataclasses.dataclass(frozen=True)
class Folding:
    """How a reduction combines elements: `take` each (already in the accumulator's dtype), `join`, then `finish`."""

    join: Callable[[Expr, Expr], Expr]
    start: Callable[[str], Any]  # of the accumulator's dtype
    take: Callable[[Expr], Expr] = lambda x: x
    finish: Callable[[Expr, int], Expr] = lambda x, count: x
    is_sum: bool = True


def _least(dtype: str) -> Any:
    return tirx.const(float("-inf"), dtype) if dtype.startswith("float") else tirx.min_value(dtype)


def _greatest(dtype: str) -> Any:
    return tirx.const(float("inf"), dtype) if dtype.startswith("float") else tirx.max_value(dtype)


def _zero(dtype: str) -> Any:
    return tirx.const(0, dtype)


def _average(total: Expr, count: int) -> Expr:
    count = tirx.const(count, dtype_of(total))
    return total / count if dtype_of(total).startswith("float") else tirx.truncdiv(total, count)


FOLDINGS: dict[str, Folding] = {
    "ReduceSum": Folding(lambda x, y: x + y, _zero),
    "ReduceMean": Folding(lambda x, y: x + y, _zero, finish=_average),
    "ReduceSumSquare": Folding(lambda x, y: x + y, _zero, take=lambda x: x * x),
    "ReduceL1": Folding(lambda x, y: x + y, _zero, take=tirx.abs),
    "ReduceL2": Folding(lambda x, y: x + y, _zero, take=lambda x: x * x, finish=lambda x, n: tirx.sqrt(x)),
    "ReduceMax": Folding(larger, _least, is_sum=False),
    "ReduceMin": Folding(smaller, _greatest, is_sum=False),
}


@dataclasses.dataclass(frozen=True)
class Axes:
    """The kept and the reduced axes of a dense tensor, as (size, stride), neighbours of one kind merged."""

    kept: tuple[tuple[int, int], ...]
    reduced: tuple[tuple[int, int], ...]
    last_is_kept: bool

    @property
    def kept_count(self) -> int:
        return math.prod(size for size, _ in self.kept)

    @property
    def reduced_count(self) -> int:
        return math.prod(size for size, _ in self.reduced)


def axes_of(shape: Shape, reduced: set[int]) -> Axes:
    merged: list[tuple[bool, int, int]] = []
    for axis, (size, stride) in enumerate(zip(shape, row_major(shape), strict=True)):
        if size == 1:
            continue
        goes = axis in reduced
        if merged and merged[-1][0] == goes:
            merged[-1] = (goes, merged[-1][1] * size, stride)
        else:
            merged.append((goes, size, stride))
    kept, gone = (tuple((size, stride) for g, size, stride in merged if g == goes) for goes in (False, True))
    return Axes(kept, gone, bool(merged) and not merged[-1][0])


def place(index: Expr, axes: tuple[tuple[int, int], ...]) -> Expr:
    """The element offset of a flat index over these axes."""
    at: Expr = tirx.const(0, "int32")
    for position in reversed(range(len(axes))):
        size, stride = axes[position]
        at = at + (tirx.floormod(index, size) if position else index) * stride
        index = tirx.floordiv(index, size)
    return at


def reduced_axes(problem: GenericProblem) -> Axes:
    """The axes of the operand of a reduction."""
    shape, axes = problem.shape(), problem.attribute("axes")
    if axes is None or (len(axes) == 0 and not problem.attribute("noop_with_empty_axes", 0)):
        axes = range(len(shape))
    return axes_of(shape, {axis % len(shape) for axis in axes} if shape else set())


def accumulator_of(folding: Folding, problem: GenericProblem) -> str:
    return "float64" if folding.is_sum and problem.out_dtype.startswith("float") else problem.out_dtype


def reduction(folding: Folding) -> Emit:
    def emit(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
        shape, split, accumulator = problem.shape(), reduced_axes(problem), accumulator_of(folding, problem)

        def take(at: Expr) -> Expr:
            return folding.take(tirx.Cast(accumulator, args["in0"][at]))

        def put(at: Expr, value: Expr) -> None:
            value = folding.finish(value, split.reduced_count)
            store(args, "out0", at, tirx.Cast(problem.out_dtype, value))

        if math.prod(shape) == 0:
            T.evaluate(tirx.const(0, "int32"))
        elif split.last_is_kept:
            _columns(split, folding, accumulator, target, take, put)
        else:
            _rows(split, folding, accumulator, target, take, put)

    return emit


Take = Callable[[Expr], Expr]
Put = Callable[[Expr, Expr], None]


def _columns(axes: Axes, folding: Folding, dtype: str, target: CpuTarget, take: Take, put: Put) -> None:
    """The last axis stays: a vector of it at a time, over all that is reduced."""
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
    """The last axis goes: vectors of it, joined lane by lane, then across."""
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
    """dy, a, b -> da = sum dy/b, [db = -sum dy*a/b^2]; the sums are over the axes that a or b was broadcast along."""
    (space, _), (a_shape, _), (b_shape, _) = problem.inputs
    a_view, b_view, dy_view = broadcast_view(a_shape, space), broadcast_view(b_shape, space), dense_view(space)
    if math.prod(space) == 0:
        T.evaluate(tirx.const(0, "int32"))
        return

    for name, shape, term in zip(
        (p for p in ("out0", "out1") if p in args), (a_shape, b_shape), DIV_GRADS, strict=False
    ):
        _sum_to(shape, space, (dy_view, a_view, b_view), target, args, name, term)


# at a point, from dy, a and b: what adds to da and to db
DIV_GRADS: tuple[Callable[[Expr, Expr, Expr], Expr], ...] = (
    lambda dy, a, b: f64(dy) / f64(b),
    lambda dy, a, b: f64(0.0) - f64(dy) * f64(a) / (f64(b) * f64(b)),
)


def _sum_to(
    shape: Shape,
    space: Shape,
    views: tuple[View, View, View],
    target: CpuTarget,
    args: Args,
    out: str,
    term: Callable[[Expr, Expr, Expr], Expr],
) -> None:
    """out[i] = the sum of `term` over the points of the space that broadcasting maps to i."""
    aligned = (1,) * (len(space) - len(shape)) + shape
    gone = [i for i, (size, whole) in enumerate(zip(aligned, space, strict=True)) if size != whole]
    count = math.prod(space[i] for i in gone)
    total = tir.workspace(math.prod(shape), "float64")

    def walk(view: View, index: Expr) -> Expr:
        return place(index, tuple((space[i], view.strides[i]) for i in gone))

    kept = [dense_view(aligned), *(View(tuple(0 if i in gone else s for i, s in enumerate(v.strides))) for v in views)]

    def point(to: Expr, *at: Expr) -> None:
        T.buffer_store(total, f64(0.0), [to])

    nest(aligned, kept, target, point)
    with T.serial(0, count) as k:
        moved = [T.bind(walk(view, k)) for view in views]

        def add(to: Expr, *at: Expr) -> None:
            operands = [args[f"in{i}"][start + move] for i, (start, move) in enumerate(zip(at, moved, strict=True))]
            T.buffer_store(total, total[to] + term(*operands), [to])

        nest(aligned, kept, target, add)
    nest(aligned, kept[:1], target, lambda to: store(args, out, to, to_f32(total[to])))


# Softmax


def softmax_rows(problem: GenericProblem) -> Rows:
    shape = problem.shape()
    axis = problem.axis(-1)
    return Rows(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


def softmax_row(problem: GenericProblem, target: Target, args: Any, rows: Any, logarithm: bool, at: At) -> None:
    """One row of Softmax or LogSoftmax. `rows` walks along it (rows.py)."""
    x = args["in0"]
    top = rows.fold(target, "float32", float("-inf"), lambda top, k: steps.maximum(x[at(k)], top), tirx.Max)
    weight = lambda k: steps.exp(x[at(k)] - top)  # noqa: E731
    total = rows.fold(target, "float64", 0.0, lambda total, k: total + f64(weight(k)), tirx.Add)
    if logarithm:
        shift = T.bind(tirx.log(total))
        rows.along(target, lambda k: store(args, "out0", at(k), to_f32(f64(x[at(k)] - top) - shift)))
    else:
        scale = T.bind(to_f32(f64(1.0) / total))
        rows.along(target, lambda k: store(args, "out0", at(k), weight(k) * scale))


def softmax_grad_row(problem: GenericProblem, target: Target, args: Any, rows: Any, logarithm: bool, at: At) -> None:
    """One row of dy, y -> dx = y*(dy - sum dy*y), or dy - exp(y)*sum dy for the logarithm."""
    dy, y = args["in0"], args["in1"]

    def term(at: Expr) -> Expr:
        return f64(dy[at]) if logarithm else f64(dy[at]) * f64(y[at])

    total = rows.fold(target, "float64", 0.0, lambda total, k: total + term(at(k)), tirx.Add)
    total = T.bind(to_f32(total))

    def gradient(k: Expr) -> None:
        if logarithm:
            value = dy[at(k)] - steps.exp(y[at(k)]) * total
        else:
            value = y[at(k)] * (dy[at(k)] - total)
        store(args, "out0", at(k), value)

    rows.along(target, gradient)


Row = Callable[[GenericProblem, Target, Any, Any, bool, At], None]
BY_ROWS: dict[str, tuple[Row, bool]] = {
    "Softmax": (softmax_row, False),
    "LogSoftmax": (softmax_row, True),
    "SoftmaxGrad_13": (softmax_grad_row, False),
    "LogSoftmaxGrad_13": (softmax_grad_row, True),
}


def by_rows(row: Row, logarithm: bool) -> Emit:
    def emit(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
        rows = softmax_rows(problem)
        rows.each(target, lambda index, at: row(problem, target, args, rows, logarithm, at))

    return emit


OPS: dict[str, Emit] = {
    **{name: reduction(folding) for name, folding in FOLDINGS.items()},
    "DivGrad": div_grad,
    **{name: by_rows(*row) for name, row in BY_ROWS.items()},
}
