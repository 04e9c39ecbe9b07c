"""What moves elements without changing them: their gradients are moved back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import rule

Contributions = Sequence[ir.Value | None]


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(g: Gradient) -> Contributions:
    """Give the operand's shape back."""
    return [g.dy if g.shape(g.x) == g.shape(g.y) else g.reshape(g.dy, g.shape(g.x))]


@rule("Transpose")
def transpose(g: Gradient) -> Contributions:
    """Permute back."""
    perm = g.attribute("perm", tuple(reversed(range(g.rank(g.x)))))
    return [g.transpose(g.dy, [int(axis) for axis in np.argsort(perm)])]


@rule("Expand")
def expand(g: Gradient) -> Contributions:
    """Sum over what was broadcast."""
    return [g.fit(g.dy, g.x)]


@rule("Tile")
def tile(g: Gradient) -> Contributions:
    """Sum over the copies."""
    repeats, shape = [int(n) for n in g.constant(1, "repeats")], g.shape(g.x)
    split = [size for pair in zip(repeats, shape, strict=True) for size in pair]
    return [g.sum(g.reshape(g.dy, split), range(0, 2 * len(shape), 2))]


@rule("Concat")
def concat(g: Gradient) -> Contributions:
    """Split."""
    axis = g.attribute("axis", 0) % g.rank(g.y)
    lengths = [g.shape(value)[axis] for value in g.operands]
    if len(lengths) == 1:
        return [g.dy]
    return g.ops("Split", [g.dy, g.ints(lengths)], len(lengths), axis=axis)


@rule("Split")
def split(g: Gradient) -> Contributions:
    """Concatenate; what nothing reads has a gradient of zeros."""
    axis = g.attribute("axis", 0) % g.rank(g.x)
    parts = [g.gradient(place) for place in range(len(g.node.outputs))]
    return [parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis=axis)]


@rule("Slice")
def slice_(g: Gradient) -> Contributions:
    """Put zeros where nothing was taken: between the elements (steps), before and behind."""
    shape, gradient = list(g.shape(g.x)), g.dy
    starts, ends = g.constant(1, "starts"), g.constant(2, "ends")
    axes = g.constant(3, "axes") if g.optional(3) is not None else np.arange(len(starts))
    steps = g.constant(4, "steps") if g.optional(4) is not None else np.ones(len(starts), np.int64)
    sizes = list(g.shape(g.y))
    before, after = [0] * len(shape), [0] * len(shape)
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes.tolist(), steps.tolist(), strict=True):
        axis %= len(shape)
        taken = range(*slice(start, _open(end, step, shape[axis]), step).indices(shape[axis]))
        if step < 0:
            gradient = g.op("Slice", gradient, g.ints([-1]), g.ints([-(2**31)]), g.ints([axis]), g.ints([-1]))
            taken = taken[::-1]
        if abs(step) > 1:
            gradient, sizes = _apart(g, gradient, sizes, axis, abs(step))
        before[axis] = taken[0] if taken else 0
        after[axis] = shape[axis] - before[axis] - sizes[axis]
    if not any(before) and not any(after):
        return [gradient]
    return [g.op("Pad", gradient, g.ints([*before, *after]), g.number(0.0, g.x))]


def _open(end: int, step: int, size: int) -> int | None:
    """Give an end as Python has it: one in front of the first element is none."""
    return None if step < 0 and end < -size else end


def _apart(g: Gradient, value: ir.Value, sizes: Sequence[int], axis: int, step: int) -> tuple[ir.Value, list[int]]:
    """Put step - 1 zeros between elements along an axis."""
    count, rank = sizes[axis], len(sizes)
    split = [*sizes[: axis + 1], 1, *sizes[axis + 1 :]]
    pads = [0] * (2 * (rank + 1))
    pads[rank + 1 + axis + 1] = step - 1
    padded = g.op("Pad", g.reshape(value, split), g.ints(pads), g.number(0.0, g.x))
    joined = [*sizes[:axis], count * step, *sizes[axis + 1 :]]
    length = max(count * step - (step - 1), 0)
    cut = g.op("Slice", g.reshape(padded, joined), g.ints([0]), g.ints([length]), g.ints([axis]))
    return cut, [*sizes[:axis], length, *sizes[axis + 1 :]]


@rule("Pad")
def pad(g: Gradient) -> Contributions:
    """Cut off what was added, and put zeros where something was cut. What was added by other elements goes to them."""
    mode = g.attribute("mode", "constant")
    shape = g.shape(g.x)
    given = [int(n) for n in g.constant(1, "pads")]
    axes = [int(a) % len(shape) for a in g.constant(3, "axes")] if g.optional(3) is not None else [*range(len(shape))]
    before, after = [0] * len(shape), [0] * len(shape)
    for place, axis in enumerate(axes):
        before[axis], after[axis] = given[place], given[len(axes) + place]
    if mode != "constant":
        from bnfuse.autodiff.resampling import padded_axes

        return [padded_axes(g, before, after, mode)]
    if not any(before) and not any(after):
        return [g.dy]
    gradient = g.op("Pad", g.dy, g.ints([-n for n in (*before, *after)]), g.number(0.0, g.x))
    fill = g.optional(2)
    if fill is None or not g.wants(2):
        return [gradient]
    rest = g.sub(g.op("ReduceSum", g.dy, keepdims=0), g.op("ReduceSum", gradient, keepdims=0))
    return gradient, None, g.reshape(rest, g.shape(fill))


@rule("DepthToSpace")
def depth_to_space(g: Gradient) -> Contributions:
    """Take the blocks apart again."""
    n, c, h, w = g.shape(g.x)
    b = g.attribute("blocksize", 1)
    parts = g.reshape(g.dy, [n, c // (b * b), h, b, w, b])
    order = [0, 3, 5, 1, 2, 4] if g.attribute("mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
    return [g.reshape(g.transpose(parts, order), [n, c, h, w])]


@rule("SpaceToDepth")
def space_to_depth(g: Gradient) -> Contributions:
    """Put the blocks together again."""
    return [g.op("DepthToSpace", g.dy, blocksize=g.attribute("blocksize", 1), mode="DCR")]


@rule("Trilu")
def triangle(g: Gradient) -> Contributions:
    """Take the same triangle."""
    return [g.op("Trilu", g.dy, g.optional(1), upper=g.attribute("upper", 1))]
