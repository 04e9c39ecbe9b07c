"""Reductions over any axes, softmax and what else goes row by row: what is folded, and one row.

Sums and means of floats are taken in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.generic import GenericProblem, Shape, dtype_of, row_major, store
from bnfuse.runtime.kernels.common.generic_elementwise import is_nan, larger, like, smaller
from bnfuse.runtime.kernels.common.rows import At, Rows
from bnfuse.runtime.kernels.common.steps import Expr, f64, to_f32
from bnfuse.runtime.targets.target import Target


@dataclasses.dataclass(frozen=True)
class Folding:
    """How a reduction combines elements: `take` each (already in the accumulator's dtype), `join`, then `finish`."""

    join: Callable[[Expr, Expr], Expr]
    start: Callable[[str], Any]  # of the accumulator's dtype
    take: Callable[[Expr], Expr] = lambda x: x
    finish: Callable[[Expr, int], Expr] = lambda x, count: x
    is_wide: bool = True  # floats are joined in float64


def _least(dtype: str) -> Any:
    return tirx.const(float("-inf"), dtype) if dtype.startswith("float") else tirx.min_value(dtype)


def _greatest(dtype: str) -> Any:
    return tirx.const(float("inf"), dtype) if dtype.startswith("float") else tirx.max_value(dtype)


def _zero(dtype: str) -> Any:
    return tirx.const(0, dtype)


def _average(total: Expr, count: int) -> Expr:
    count = tirx.const(count, dtype_of(total))
    return total / count if dtype_of(total).startswith("float") else tirx.truncdiv(total, count)


def _log_of_sum(x: Expr, y: Expr) -> Expr:
    """Write log(e**x + e**y), of any x and y."""
    top, low = larger(x, y), smaller(x, y)
    is_infinite = tirx.Or(top == like(x, math.inf), top == like(x, -math.inf))
    return tirx.Select(is_infinite, top, top + tirx.log1p(tirx.exp(low - top)))


FOLDINGS: dict[str, Folding] = {
    "ReduceSum": Folding(lambda x, y: x + y, _zero),
    "ReduceMean": Folding(lambda x, y: x + y, _zero, finish=_average),
    "ReduceSumSquare": Folding(lambda x, y: x + y, _zero, take=lambda x: x * x),
    "ReduceL1": Folding(lambda x, y: x + y, _zero, take=tirx.abs),
    "ReduceL2": Folding(lambda x, y: x + y, _zero, take=lambda x: x * x, finish=lambda x, n: tirx.sqrt(x)),
    "ReduceProd": Folding(lambda x, y: x * y, lambda dtype: tirx.const(1, dtype)),
    "ReduceLogSum": Folding(lambda x, y: x + y, _zero, finish=lambda x, n: tirx.log(x)),
    "ReduceLogSumExp": Folding(_log_of_sum, _least),
    "ReduceMax": Folding(larger, _least, is_wide=False),
    "ReduceMin": Folding(smaller, _greatest, is_wide=False),
}


@dataclasses.dataclass(frozen=True)
class Axes:
    """The kept and the reduced axes of a dense tensor, as (size, stride), neighbours of one kind merged."""

    kept: tuple[tuple[int, int], ...]
    reduced: tuple[tuple[int, int], ...]
    last_is_kept: bool

    @property
    def kept_count(self) -> int:
        """Count the elements of the result."""
        return math.prod(size for size, _ in self.kept)

    @property
    def reduced_count(self) -> int:
        """Count the elements that go into one of the result."""
        return math.prod(size for size, _ in self.reduced)


def axes_of(shape: Shape, reduced: set[int]) -> Axes:
    """Part the axes of a dense tensor into those that stay and those in `reduced`; axes of size 1 are left out."""
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
    """Write the element offset of a flat index over these axes."""
    at: Expr = tirx.const(0, "int32")
    for position in reversed(range(len(axes))):
        size, stride = axes[position]
        at = at + (tirx.floormod(index, size) if position else index) * stride
        index = tirx.floordiv(index, size)
    return at


def reduced_axes(problem: GenericProblem) -> Axes:
    """Part the axes of a reduction's operand by its attributes `axes` and `noop_with_empty_axes`."""
    shape, axes = problem.shape(), problem.attribute("axes")
    if axes is None or (len(axes) == 0 and not problem.attribute("noop_with_empty_axes", 0)):
        axes = range(len(shape))
    return axes_of(shape, {axis % len(shape) for axis in axes} if shape else set())


def accumulator_of(folding: Folding, problem: GenericProblem) -> str:
    """Name the dtype in which a reduction adds up: float64 for sums of floats, else that of the result."""
    return "float64" if folding.is_wide and problem.out_dtype.startswith("float") else problem.out_dtype


AXES = {"ArgMax": 0, "ArgMin": 0}  # the axis where a node gives none: else the last one


def rows_of(problem: GenericProblem) -> Rows:
    """Give the rows along the axis of an operator of BY_ROWS."""
    shape = problem.shape()
    axis = problem.axis(AXES.get(problem.op_type, -1))
    return Rows(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


def softmax_row(
    logarithm: bool, problem: GenericProblem, target: Target, args: Any, rows: Any, row: Expr, at: At
) -> None:
    """Write one row of Softmax or LogSoftmax. `rows` walks along it (rows.py)."""
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


def lp_row(problem: GenericProblem, target: Target, args: Any, rows: Any, row: Expr, at: At) -> None:
    """Write one row divided by its norm, where that is not 0: of the absolute values, or of squares (`p` = 2)."""
    x, p = args["in0"], problem.attribute("p", 2)
    value = lambda k: f64(x[at(k)])  # noqa: E731
    size = (lambda k: value(k) * value(k)) if p == 2 else (lambda k: tirx.abs(value(k)))
    total = rows.fold(target, "float64", 0.0, lambda total, k: total + size(k), tirx.Add)
    norm = T.bind(tirx.sqrt(total) if p == 2 else total)
    zero = f64(0.0)

    def divided(k: Expr) -> None:
        quotient = tirx.Select(norm == zero, zero, value(k) / norm)
        store(args, "out0", at(k), tirx.Cast(problem.out_dtype, quotient))

    rows.along(target, divided)


def _place_of_extreme(
    pick: Callable[[Expr, Expr], Expr], problem: GenericProblem, target: Target, args: Any, rows: Any, at: At
) -> Expr:
    """Find where in a row its greatest or least element is, NaN where there is one: the first or the last of them."""
    x, dtype = args["in0"], problem.inputs[0][1]
    worst = (_least if pick is larger else _greatest)(dtype).value
    top = rows.fold(target, dtype, worst, lambda top, k: pick(x[at(k)], top), pick)
    is_last = bool(problem.attribute("select_last_index", 0))
    nowhere, join = (-1, tirx.Max) if is_last else (rows.length, tirx.Min)

    def found(k: Expr) -> Expr:
        is_there = tirx.Or(x[at(k)] == top, is_nan(x[at(k)]))
        return tirx.Select(is_there, tirx.Cast("int32", k), tirx.const(nowhere, "int32"))

    return rows.fold(target, "int32", nowhere, lambda so_far, k: join(so_far, found(k)), join)


def arg_row(
    pick: Callable[[Expr, Expr], Expr], problem: GenericProblem, target: Target, args: Any, rows: Any, row: Expr, at: At
) -> None:
    """Write ArgMax or ArgMin of one row."""
    place = _place_of_extreme(pick, problem, target, args, rows, at)
    rows.once(lambda: store(args, "out0", row, tirx.Cast("int64", place)))


def hardmax_row(problem: GenericProblem, target: Target, args: Any, rows: Any, row: Expr, at: At) -> None:
    """Write 1 where the first of the greatest elements of a row is, else 0."""
    place = _place_of_extreme(larger, problem, target, args, rows, at)
    one, zero = (tirx.const(value, problem.out_dtype) for value in (1, 0))
    rows.along(target, lambda k: store(args, "out0", at(k), tirx.Select(tirx.Cast("int32", k) == place, one, zero)))


Row = Callable[[GenericProblem, Target, Any, Any, Expr, At], None]  # (problem, target, args, rows, its number, at)
BY_ROWS: dict[str, Row] = {
    "Softmax": functools.partial(softmax_row, False),
    "LogSoftmax": functools.partial(softmax_row, True),
    "LpNormalization": lp_row,
    "ArgMax": functools.partial(arg_row, larger),
    "ArgMin": functools.partial(arg_row, smaller),
    "Hardmax": hardmax_row,
}
