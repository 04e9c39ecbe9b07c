"""Operators that read or write at places that other operands name: gathers, scatters, one-hot codes.

An index counts from the end where it is negative, and is clamped to what there is. Several updates of one element are
joined in the order in which they stand, on every target: no result depends on how threads run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.generic import (
    Along,
    Buffers,
    Emit,
    GenericProblem,
    Shape,
    View,
    dense_view,
    dtype_of,
    nest,
    row_major,
    starts_of,
    store,
    walk,
)
from bnfuse.runtime.kernels.common.generic_elementwise import larger, smaller
from bnfuse.runtime.kernels.common.generic_moves import position
from bnfuse.runtime.kernels.common.steps import Expr

COMPARED = 1 << 23  # elements of a result each of which may look at all updates; chosen by hand

JOINS: dict[str, Callable[[Expr, Expr], Expr]] = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": larger,
    "min": smaller,
}


def clamped(value: Expr, length: int) -> Expr:
    """Write an index as ONNX has it, as one of the data: int32, in [0, length)."""
    zero, size = tirx.const(0, dtype_of(value)), tirx.const(length, dtype_of(value))
    value = tirx.Select(value < zero, value + size, value)
    return tirx.Cast("int32", tirx.Max(zero, tirx.Min(value, size - tirx.const(1, dtype_of(value)))))


def sizes_around(shape: Shape, axis: int) -> tuple[int, int, int]:
    """Count the elements before an axis, along it, and behind it."""
    axis %= len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def without(view: View, axis: int) -> View:
    """View the same at place 0 of an axis."""
    return View(tuple(0 if i == axis else stride for i, stride in enumerate(view.strides)), view.base)


# -- reading -------------------------------------------------------------------------------------------------------


def gather(problem: GenericProblem, args: Buffers) -> None:
    """Copy data, indices -> y: rows, of what lies behind the axis."""
    outer, length, inner = sizes_around(problem.shape(0), int(problem.attribute("axis", 0)))
    count = math.prod(problem.shape(1))

    def row(at: Expr, along: Along) -> None:
        image, place = tirx.floordiv(at, count), tirx.floormod(at, count)
        base = T.bind((image * length + clamped(args["in1"][place], length)) * inner)
        along(lambda k: store(args, "out0", at * inner + k, args["in0"][base + k]))

    walk().rows(outer * count, inner, row)


def gather_elements(problem: GenericProblem, args: Buffers) -> None:
    """Copy data, indices -> y: the element of the data at the same place but along the axis."""
    data, space, axis = problem.shape(0), problem.shape(1), problem.axis(0)
    stride = row_major(data)[axis]

    def point(to: Expr, base: Expr) -> None:
        store(args, "out0", to, args["in0"][base + clamped(args["in1"][to], data[axis]) * stride])

    nest(space, [dense_view(space), without(View(row_major(data)), axis)], point)


def gather_nd(problem: GenericProblem, args: Buffers) -> None:
    """Copy data, indices -> y: what the last axis of the indices names, of each of `batch_dims` batches its own."""
    data, indices = problem.shape(0), problem.shape(1)
    batched, depth = int(problem.attribute("batch_dims", 0)), indices[-1]
    named = data[batched : batched + depth]
    inner, each = math.prod(data[batched + depth :]), math.prod(indices[batched:-1])

    def row(at: Expr, along: Along) -> None:
        start = tirx.floordiv(at, each) * math.prod(named)
        base = T.bind((start + named_row(args["in1"], at, named)) * inner)
        along(lambda k: store(args, "out0", at * inner + k, args["in0"][base + k]))

    walk().rows(math.prod(indices[:-1]), inner, row)


def named_row(indices: Any, at: Expr, named: Shape) -> Expr:
    """Write which row of the axes `named` the index vector number `at` is."""
    found: Expr = tirx.const(0, "int32")
    for i, (size, stride) in enumerate(zip(named, row_major(named), strict=True)):
        found = found + clamped(indices[at * len(named) + i], size) * stride
    return found


def one_hot(problem: GenericProblem, args: Buffers) -> None:
    """Write indices, (off, on) -> `on` where the place along the axis is the index, else `off`."""
    space = problem.out_shape
    axis = int(problem.attribute("axis", -1)) % len(space)
    own = row_major(problem.shape())
    depth = space[axis]

    def point(to: Expr, at: Expr, place: Expr) -> None:
        index = tirx.Cast("int64", args["in0"][at])
        index = tirx.Select(index < tirx.const(0, "int64"), index + tirx.const(depth, "int64"), index)
        is_on = index == tirx.Cast("int64", place)
        store(args, "out0", to, tirx.Select(is_on, args["in1"][1], args["in1"][0]))

    nest(space, [dense_view(space), View((*own[:axis], 0, *own[axis:])), position(space, axis)], point)


def reverse_sequence(problem: GenericProblem, args: Buffers) -> None:
    """Copy data, lengths -> y: of each batch the first places in time in the other order, as many as its length."""
    space = problem.out_shape
    time, batch = (int(problem.attribute(name, d)) % len(space) for name, d in (("time_axis", 0), ("batch_axis", 1)))
    view = dense_view(space)

    def point(to: Expr, base: Expr, place: Expr, image: Expr) -> None:
        length = tirx.Cast("int32", args["in1"][image])
        at = tirx.Select(place < length, length - tirx.const(1, "int32") - place, place)
        store(args, "out0", to, args["in0"][base + at * view.strides[time]])

    nest(space, [view, without(view, time), position(space, time), position(space, batch)], point)


# -- writing -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scatter:
    """A scatter under construction. Data that are one number everywhere are no operand but the attribute `fill`."""

    problem: GenericProblem
    args: Buffers

    @property
    def shape(self) -> Shape:
        """Give the shape of the data and of the result."""
        return self.problem.out_shape

    def operand(self, index: int) -> Any:
        """Give the operand that has this number behind the data."""
        return self.args[f"in{self._number(index)}"]

    def shape_of(self, index: int) -> Shape:
        """Give the shape of the operand that has this number behind the data."""
        return self.problem.shape(self._number(index))

    def _number(self, index: int) -> int:
        return index + int(self.problem.attribute("fill") is None)

    def start(self, at: Expr) -> Expr:
        """Write what the result is before any update, at one place."""
        value = self.problem.attribute("fill")
        return self.args["in0"][at] if value is None else tirx.const(value, self.problem.out_dtype)

    def start_all(self) -> None:
        """Write what the result is before any update."""
        nest(self.shape, [dense_view(self.shape)], lambda at: store(self.args, "out0", at, self.start(at)))

    def join(self, to: Expr, value: Expr) -> None:
        """Join an update to what the result has there."""
        join = JOINS[str(self.problem.attribute("reduction", "none"))]
        store(self.args, "out0", to, join(self.args["out0"][to], value))


def scatter_elements(problem: GenericProblem, args: Buffers) -> None:
    """Join updates into a copy of the data at the same place but along the axis: data, indices, updates -> out0.

    Only updates along the axis can meet: a thread does all of them, in their order.
    """
    scatter = Scatter(problem, args)
    data, space = scatter.shape, scatter.shape_of(0)
    axis = int(problem.attribute("axis", 0)) % len(data)
    scatter.start_all()
    views = [dense_view(space), View(row_major(data))]
    kept = [i for i in range(len(space)) if i != axis]
    others = tuple(space[i] for i in kept)
    narrowed = [View(tuple(view.strides[i] for i in kept), view.base) for view in views]

    def line(index: Expr) -> None:
        update, base = (T.bind(start) for start in starts_of(index, others, narrowed))
        with T.serial(0, space[axis]) as i:
            at = T.bind(update + i * views[0].strides[axis])
            to = T.bind(base + clamped(scatter.operand(0)[at], data[axis]) * views[1].strides[axis])
            scatter.join(to, scatter.operand(1)[at])

    walk().each(math.prod(others) if space[axis] else 0, line)


def scatter_nd(problem: GenericProblem, args: Buffers) -> None:
    """Join updates into a copy of the data, row by row: data, indices, updates -> out0.

    The threads share what lies behind the axes that an index names, and go over all updates. Where that keeps too few
    of them busy, they share the whole result, and each looks for the updates of its own element.
    """
    scatter = Scatter(problem, args)
    data, indices = scatter.shape, scatter.shape_of(0)
    named = data[: indices[-1]]
    rows, inner, count = math.prod(named), math.prod(data[len(named) :]), math.prod(indices[:-1])
    scatter.start_all()

    def add(row: Expr, i: Expr, along: Along) -> None:
        along(lambda k: scatter.join(row * inner + k, scatter.operand(1)[i * inner + k]))

    def all_updates(_: Expr, along: Along) -> None:
        with T.serial(0, count) as i:
            add(T.bind(named_row(scatter.operand(0), i, named)), i, along)

    def own_updates(row: Expr, along: Along) -> None:
        with T.serial(0, count) as i, T.If(named_row(scatter.operand(0), i, named) == row), T.Then():
            add(row, i, along)

    if count == 0:
        return
    if inner < walk().busy and rows * inner <= COMPARED:
        walk().rows(rows, inner, own_updates)
    else:
        walk().rows(1, inner, all_updates)


def scatter_rows(problem: GenericProblem, args: Buffers) -> None:
    """Join updates into a copy of the data where it is known now which of them meet: data, updates, starts, order.

    To row r of the data come the updates order[starts[r]], order[starts[r] + 1], ... up to starts[r + 1].
    """
    scatter = Scatter(problem, args)
    rows = scatter.shape_of(1)[0] - 1
    inner = math.prod(scatter.shape) // rows

    def row(at: Expr, along: Along) -> None:
        along(lambda k: store(args, "out0", at * inner + k, scatter.start(at * inner + k)))
        first = T.bind(scatter.operand(1)[at])
        with T.serial(0, scatter.operand(1)[at + 1] - first) as i:
            base = T.bind(scatter.operand(2)[first + i] * inner)
            along(lambda k: scatter.join(at * inner + k, scatter.operand(0)[base + k]))

    walk().rows(rows, inner, row)


OPS: dict[str, Emit] = {
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "OneHot": one_hot,
    "ReverseSequence": reverse_sequence,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "ScatterRows": scatter_rows,
}
