"""Operators that only move elements: each is a copy (or a few) between two views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.cpu.generic_nest import (
    Emit,
    GenericProblem,
    Shape,
    View,
    dense_view,
    dtype_of,
    nest,
    parallel_rows,
    row_major,
    store,
)
from bnfuse.runtime.kernels.cpu.steps import Expr
from bnfuse.runtime.kernels.cpu.sweep import Args, vectors
from bnfuse.runtime.targets.target import CpuTarget


def move(args: Args, target: CpuTarget, space: Shape, source: tuple[str, View], result: tuple[str, View]) -> None:
    """Copy the space, seen through a view of one tensor, to a view of another."""
    (read, read_view), (written, written_view) = source, result
    nest(space, [written_view, read_view], target, lambda to, at: store(args, written, to, args[read][at]))


def fill(args: Args, target: CpuTarget, name: str, shape: Shape, value: Any, dtype: str) -> None:
    nest(shape, [dense_view(shape)], target, lambda at: store(args, name, at, tirx.const(value, dtype)))


def transpose(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    shape = problem.shape()
    order = problem.attribute("perm") or tuple(reversed(range(len(shape))))
    strides = row_major(shape)
    view = View(tuple(strides[axis] for axis in order))
    move(args, target, problem.out_shape, ("in0", view), ("out0", dense_view(problem.out_shape)))


def sliced(problem: GenericProblem, shape: Shape) -> View:
    """The part of a tensor that starts, ends, axes and steps select."""
    starts, ends = problem.attribute("starts"), problem.attribute("ends")
    axes = problem.attribute("axes") or tuple(range(len(starts)))
    steps = problem.attribute("steps") or (1,) * len(starts)
    strides, base = list(row_major(shape)), 0
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(shape)
        first, _, step = slice(int(start), int(end), int(step)).indices(shape[axis])
        base += first * strides[axis]
        strides[axis] *= step
    return View(tuple(strides), base)


def slice_(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    view = sliced(problem, problem.shape())
    move(args, target, problem.out_shape, ("in0", view), ("out0", dense_view(problem.out_shape)))


def slice_grad(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    """dy -> dx: zero but where the slice was."""
    fill(args, target, "out0", problem.out_shape, 0, problem.out_dtype)
    space, view = problem.shape(), sliced(problem, problem.out_shape)
    move(args, target, space, ("in0", dense_view(space)), ("out0", view))


def concat(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    axis, start = problem.axis(0), 0
    strides = row_major(problem.out_shape)
    for i, (shape, _) in enumerate(problem.inputs):
        part = View(strides, start * strides[axis])
        move(args, target, shape, (f"in{i}", dense_view(shape)), ("out0", part))
        start += shape[axis]


def split(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    axis, start = problem.axis(0), 0
    strides = row_major(problem.shape())
    for i, (shape, _) in enumerate(problem.outputs):
        part = View(strides, start * strides[axis])
        move(args, target, shape, ("in0", part), (f"out{i}", dense_view(shape)))
        start += shape[axis]


def pad(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    """Constant padding, where negative pads crop."""
    if problem.attribute("mode", "constant") != "constant":
        raise BnfuseError(f"Pad: mode '{problem.attribute('mode')}' is not supported: pad with a constant")
    shape, out = problem.shape(), problem.out_shape
    pads = problem.attribute("pads")
    axes = problem.attribute("axes") or tuple(range(len(shape)))
    before, after = [0] * len(shape), [0] * len(shape)
    for i, axis in enumerate(axes):
        before[axis % len(shape)], after[axis % len(shape)] = pads[i], pads[i + len(axes)]
    cropped = [max(0, -b) for b in before]
    space = tuple(n + min(b, 0) + min(a, 0) for n, b, a in zip(shape, before, after, strict=True))
    read, written = row_major(shape), row_major(out)
    source = View(read, _dot(cropped, read))
    result = View(written, _dot([max(0, b) for b in before], written))
    if space != out:
        fill(args, target, "out0", out, problem.number("value", 0), problem.out_dtype)
    move(args, target, space, ("in0", source), ("out0", result))


def _dot(places: Sequence[int], strides: Sequence[int]) -> int:
    return sum(place * stride for place, stride in zip(places, strides, strict=True))


def tile(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    """Each axis is walked as (repeat, place): a repeat goes on in the result and nowhere in the operand."""
    space, source, result = [], [], []
    shape, repeats = problem.shape(), problem.attribute("repeats")
    for size, repeat, read, written in zip(shape, repeats, row_major(shape), row_major(problem.out_shape), strict=True):
        space += [repeat, size]
        source += [0, read]
        result += [size * written, written]
    move(args, target, tuple(space), ("in0", View(tuple(source))), ("out0", View(tuple(result))))


def constant_of_shape(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    fill(args, target, "out0", problem.out_shape, problem.number("value", 0), problem.out_dtype)


def gather(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    """data, indices -> y. Indices beyond the data are clamped to it."""
    outer, _, inner, count = gather_sizes(problem, problem.shape(0), problem.shape(1))

    def row(at: Expr) -> None:
        base = T.bind(gathered(problem, args, at))
        _along(inner, target, lambda k: store(args, "out0", at * inner + k, args["in0"][base + k]))

    _rows_or_nothing(outer * count * inner, outer * count, target, row)


def gathered(problem: GenericProblem, args: Any, row: Expr) -> Expr:
    """Where in the data a row of the result (its elements behind the axis) begins."""
    _, length, inner, count = gather_sizes(problem, problem.shape(0), problem.shape(1))
    image, place = tirx.floordiv(row, count), tirx.floormod(row, count)
    return (image * length + gather_index(args["in1"][place], length)) * inner


def gather_grad(problem: GenericProblem, target: CpuTarget, args: Args) -> None:
    """indices, dy -> dx. The threads share what lies before the axis, or nothing: an index may come twice."""
    outer, length, inner, count = gather_sizes(problem, problem.out_shape, problem.shape(0))
    fill(args, target, "out0", problem.out_shape, 0, problem.out_dtype)

    def image(outer_at: Expr) -> None:
        with T.serial(0, count) as i:
            index = T.bind(gather_index(args["in0"][i], length))

            def add(k: Expr) -> None:
                to = (outer_at * length + index) * inner + k
                store(args, "out0", to, args["out0"][to] + args["in1"][(outer_at * count + i) * inner + k])

            _along(inner, target, add)

    _rows_or_nothing(outer * count * inner, outer, target, image)


def gather_sizes(problem: GenericProblem, data: Shape, indices: Shape) -> tuple[int, int, int, int]:
    """Elements before the axis, along it, behind it, and the number of indices."""
    axis = int(problem.attribute("axis", 0)) % len(data)
    return math.prod(data[:axis]), data[axis], math.prod(data[axis + 1 :]), math.prod(indices)


def gather_index(value: Expr, length: int) -> Expr:
    """An index as ONNX has it, as one of the data."""
    zero, size = tirx.const(0, dtype_of(value)), tirx.const(length, dtype_of(value))
    value = tirx.Select(value < zero, value + size, value)
    return tirx.Cast("int32", tirx.Max(zero, tirx.Min(value, size - tirx.const(1, dtype_of(value)))))


def _along(count: int, target: CpuTarget, emit: Callable[[Expr], None]) -> None:
    for vector in vectors(count, target.lanes):
        with vector.each() as j:
            emit(vector.base + j)


def _rows_or_nothing(elements: int, rows: int, target: CpuTarget, emit: Callable[[Expr], None]) -> None:
    if elements:
        parallel_rows(rows, target, emit)
    else:
        T.evaluate(tirx.const(0, "int32"))


OPS: dict[str, Emit] = {
    "Transpose": transpose,
    "Slice": slice_,
    "SliceGrad": slice_grad,
    "Concat": concat,
    "ConcatTraining": concat,
    "Split": split,
    "SplitTraining": split,
    "Pad": pad,
    "Tile": tile,
    "ConstantOfShape": constant_of_shape,
    "Gather": gather,
    "GatherGrad": gather_grad,
}
