"""Reductions over any axes, softmax and its relatives: what is folded, and one row.

Sums and means of floats are taken in float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.generic import GenericProblem, Shape, dtype_of, row_major, store
from bnfuse.runtime.kernels.common.generic_elementwise import larger, smaller
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
    return "float64" if folding.is_sum and problem.out_dtype.startswith("float") else problem.out_dtype


# at a point, from dy, a and b: what adds to da and to db
DIV_GRADS: tuple[Callable[[Expr, Expr, Expr], Expr], ...] = (
    lambda dy, a, b: f64(dy) / f64(b),
    lambda dy, a, b: f64(0.0) - f64(dy) * f64(a) / (f64(b) * f64(b)),
)


def softmax_rows(problem: GenericProblem) -> Rows:
    """Give the rows along the axis of a softmax, the last axis unless given."""
    shape = problem.shape()
    axis = problem.axis(-1)
    return Rows(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


def softmax_row(problem: GenericProblem, target: Target, args: Any, rows: Any, logarithm: bool, at: At) -> None:
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


def softmax_grad_row(problem: GenericProblem, target: Target, args: Any, rows: Any, logarithm: bool, at: At) -> None:
    """Write one row of dy, y -> dx = y*(dy - sum dy*y), or dy - exp(y)*sum dy for the logarithm."""
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
