"""Operators that only move elements: each is a copy (or a few) between two views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common.generic import (
    Buffers,
    Emit,
    GenericProblem,
    Shape,
    View,
    dense_view,
    nest,
    row_major,
    store,
)
from bnfuse.runtime.kernels.common.steps import Expr


def move(args: Buffers, space: Shape, source: tuple[str, View], result: tuple[str, View]) -> None:
    """Copy the space, seen through a view of one tensor, to a view of another."""
    (read, read_view), (written, written_view) = source, result
    nest(space, [written_view, read_view], lambda to, at: store(args, written, to, args[read][at]))


def fill(args: Buffers, name: str, shape: Shape, value: Any, dtype: str) -> None:
    """Store a constant of `dtype` in every element of a dense tensor."""
    nest(shape, [dense_view(shape)], lambda at: store(args, name, at, tirx.const(value, dtype)))


def transpose(problem: GenericProblem, args: Buffers) -> None:
    """Permute the axes by the attribute `perm`, or reverse them."""
    shape = problem.shape()
    order = problem.attribute("perm") or tuple(reversed(range(len(shape))))
    strides = row_major(shape)
    view = View(tuple(strides[axis] for axis in order))
    move(args, problem.out_shape, ("in0", view), ("out0", dense_view(problem.out_shape)))


def sliced(problem: GenericProblem, shape: Shape) -> View:
    """View the part of a tensor that starts, ends, axes and steps select."""
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


def slice_(problem: GenericProblem, args: Buffers) -> None:
    """Copy the part of in0 that starts, ends, axes and steps select."""
    view = sliced(problem, problem.shape())
    move(args, problem.out_shape, ("in0", view), ("out0", dense_view(problem.out_shape)))


def concat(problem: GenericProblem, args: Buffers) -> None:
    """Copy the inputs side by side along `axis`, 0 unless given."""
    axis, start = problem.axis(0), 0
    strides = row_major(problem.out_shape)
    for i, (shape, _) in enumerate(problem.inputs):
        part = View(strides, start * strides[axis])
        move(args, shape, (f"in{i}", dense_view(shape)), ("out0", part))
        start += shape[axis]


def split(problem: GenericProblem, args: Buffers) -> None:
    """Copy parts of in0 along `axis`, 0 unless given, to the outputs: as long as their shapes say."""
    axis, start = problem.axis(0), 0
    strides = row_major(problem.shape())
    for i, (shape, _) in enumerate(problem.outputs):
        part = View(strides, start * strides[axis])
        move(args, shape, ("in0", part), (f"out{i}", dense_view(shape)))
        start += shape[axis]


def pad(problem: GenericProblem, args: Buffers) -> None:
    """Pad with a constant, where negative pads crop. Raises BnfuseError for other modes."""
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
        fill(args, "out0", out, problem.number("value", 0), problem.out_dtype)
    move(args, space, ("in0", source), ("out0", result))


def _dot(places: Sequence[int], strides: Sequence[int]) -> int:
    return sum(place * stride for place, stride in zip(places, strides, strict=True))


def tile(problem: GenericProblem, args: Buffers) -> None:
    """Repeat each axis, walked as (repeat, place): a repeat goes on in the result and nowhere in the operand."""
    space, source, result = [], [], []
    shape, repeats = problem.shape(), problem.attribute("repeats")
    for size, repeat, read, written in zip(shape, repeats, row_major(shape), row_major(problem.out_shape), strict=True):
        space += [repeat, size]
        source += [0, read]
        result += [size * written, written]
    move(args, tuple(space), ("in0", View(tuple(source))), ("out0", View(tuple(result))))


def constant_of_shape(problem: GenericProblem, args: Buffers) -> None:
    """Fill out0 with the attribute `value`, 0 unless given."""
    fill(args, "out0", problem.out_shape, problem.number("value", 0), problem.out_dtype)


def range_(problem: GenericProblem, args: Buffers) -> None:
    """Write start, start + delta, start + 2 delta, ..."""
    start, delta = (tirx.const(problem.number(name, 0), problem.out_dtype) for name in ("start", "delta"))
    view = dense_view(problem.out_shape)
    write = lambda at: store(args, "out0", at, start + tirx.Cast(problem.out_dtype, at) * delta)  # noqa: E731
    nest(problem.out_shape, [view], write)


def depth_to_space(problem: GenericProblem, args: Buffers) -> None:
    """Move blocks of channels to blocks of pixels: `mode` says whether a block is the outer part of the channels."""
    n, c, h, w = problem.shape()
    b = int(problem.attribute("blocksize"))
    kept = c // (b * b)
    if problem.attribute("mode", "DCR") == "DCR":
        _permuted(args, (n, b, b, kept, h, w), (0, 3, 4, 1, 5, 2))
    else:
        _permuted(args, (n, kept, b, b, h, w), (0, 1, 4, 2, 5, 3))


def space_to_depth(problem: GenericProblem, args: Buffers) -> None:
    """Move blocks of pixels to blocks of channels."""
    n, c, h, w = problem.shape()
    b = int(problem.attribute("blocksize"))
    _permuted(args, (n, c, h // b, b, w // b, b), (0, 3, 5, 1, 2, 4))


def _permuted(args: Buffers, shape: Shape, order: Sequence[int]) -> None:
    """Copy in0, seen in this shape, with its axes in another order."""
    space = tuple(shape[axis] for axis in order)
    strides = row_major(shape)
    move(args, space, ("in0", View(tuple(strides[axis] for axis in order))), ("out0", dense_view(space)))


def position(space: Shape, axis: int) -> View:
    """View the place along an axis: no tensor's."""
    return View(tuple(int(i == axis % len(space)) for i in range(len(space))))


def trilu(problem: GenericProblem, args: Buffers) -> None:
    """Keep the upper or the lower triangle of matrices, from diagonal `k` on, 0 elsewhere."""
    space, view = problem.out_shape, dense_view(problem.out_shape)
    k, is_upper = int(problem.number("k", 0)), problem.attribute("upper", 1)
    zero = tirx.const(0, problem.out_dtype)

    def point(at: Expr, row: Expr, column: Expr) -> None:
        kept = column - row >= k if is_upper else column - row <= k
        store(args, "out0", at, tirx.Select(kept, args["in0"][at], zero))

    nest(space, [view, position(space, -2), position(space, -1)], point)


def eye_like(problem: GenericProblem, args: Buffers) -> None:
    """Write 1 on diagonal `k`, 0 elsewhere."""
    space, k = problem.out_shape, int(problem.attribute("k", 0))
    one, zero = (tirx.const(value, problem.out_dtype) for value in (1, 0))

    def point(at: Expr, row: Expr, column: Expr) -> None:
        store(args, "out0", at, tirx.Select(column - row == k, one, zero))

    nest(space, [dense_view(space), position(space, 0), position(space, 1)], point)


OPS: dict[str, Emit] = {
    "Transpose": transpose,
    "Slice": slice_,
    "Concat": concat,
    "Split": split,
    "Pad": pad,
    "Tile": tile,
    "ConstantOfShape": constant_of_shape,
    "Range": range_,
    "DepthToSpace": depth_to_space,
    "SpaceToDepth": space_to_depth,
    "Trilu": trilu,
    "EyeLike": eye_like,
}
