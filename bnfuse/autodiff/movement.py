"""What moves elements without changing them: their gradients are moved back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.resampling import padded_axes
from bnfuse.autodiff.rules import Contributions, rule


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
    split: list[int] = []
    copies: list[int] = []
    for repeat, size in zip(repeats, shape, strict=True):
        if repeat != 1:
            copies.append(len(split))
            split.append(repeat)
        split.append(size)
    return [g.sum(g.reshape(g.dy, split), copies) if copies else g.dy]


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
    shape, outputs = list(g.shape(g.x)), g.node.outputs
    axis = g.attribute("axis", 0) % len(shape)
    given = g.known(g.optional(1))
    part = -(-shape[axis] // len(outputs))
    starts = [min(place * part, shape[axis]) for place in range(len(outputs) + 1)]
    lengths = np.diff(starts) if given is None else given
    if len(outputs) == 1:
        return [g.dy]
    parts = []
    for gradient, length in zip(g.gradients, lengths.tolist(), strict=True):
        if gradient is None:
            sizes = (*shape[:axis], length, *shape[axis + 1 :])
            gradient = g.emitter.zeros(sizes, g.dtype(g.x), f"{g.node.name}/grad/zeros")
        parts.append(gradient)
    return [g.op("Concat", *parts, axis=axis)]


@rule("Slice")
def slice_(g: Gradient) -> Contributions:
    """Put zeros where nothing was taken: between the elements (steps), before and behind."""
    shape, sizes = g.shape(g.x), g.shape(g.y)
    rank = len(shape)
    starts, ends = g.constant(1, "starts"), g.constant(2, "ends")
    axes = g.constant(3, "axes") if g.optional(3) is not None else np.arange(len(starts))
    steps = g.constant(4, "steps") if g.optional(4) is not None else np.ones(len(starts), np.int64)
    taken = [range(size) for size in shape]
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes.tolist(), steps.tolist(), strict=True):
        size = shape[axis % rank]
        taken[axis % rank] = range(size)[slice(start, None if step < 0 and end < -size else end, step)]
    backwards = [axis for axis in range(rank) if taken[axis].step < 0]
    gradient = reverse(g, g.dy, backwards)
    upwards = [places[::-1] if places.step < 0 else places for places in taken]
    apart = [places.step if len(places) > 1 else 1 for places in upwards]
    gradient = spaced(g, gradient, sizes, apart)
    before = [places.start if len(places) else 0 for places in upwards]
    lengths = [(size - 1) * step + 1 if size else 0 for size, step in zip(sizes, apart, strict=True)]
    after = [size - start - length for size, start, length in zip(shape, before, lengths, strict=True)]
    return [g.pad(gradient, before, after)]


def reverse(g: Gradient, value: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Emit a value with the order along these axes reversed."""
    if not axes:
        return value
    last, beyond = [-1] * len(axes), [-(2**31)] * len(axes)
    return g.op("Slice", value, g.ints(last), g.ints(beyond), g.ints(axes), g.ints(last))


def spaced(g: Gradient, value: ir.Value, sizes: Sequence[int], steps: Sequence[int]) -> ir.Value:
    """Emit a value, of these sizes, with steps - 1 zeros between its elements along each axis."""
    axes = [axis for axis, step in enumerate(steps) if step > 1]
    if not axes:
        return value
    split: list[int] = []
    pads: list[int] = []
    joined = list(sizes)
    for axis, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        split += [size, 1] if step > 1 else [size]
        pads += [0, step - 1] if step > 1 else [0]
        joined[axis] = size * step
    wide = g.op("Pad", g.reshape(value, split), g.ints([*[0] * len(pads), *pads]))
    ends = [joined[axis] - steps[axis] + 1 for axis in axes]
    return g.op("Slice", g.reshape(wide, joined), g.ints([0] * len(axes)), g.ints(ends), g.ints(axes))


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
        return [padded_axes(g, before, after, mode)]
    gradient = g.pad(g.dy, [-n for n in before], [-n for n in after])
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
    n, c, h, w = g.shape(g.x)
    b = g.attribute("blocksize", 1)
    columns_first = g.attribute("mode", "DCR") == "CRD"
    parts = [n, c, b, b, h // b, w // b] if columns_first else [n, b, b, c, h // b, w // b]
    order = [0, 1, 4, 2, 5, 3] if columns_first else [0, 3, 4, 1, 5, 2]
    return [g.reshape(g.transpose(g.reshape(g.dy, parts), order), [n, c, h, w])]


@rule("Trilu")
def triangle(g: Gradient) -> Contributions:
    """Take the same triangle."""
    diagonal = g.known(g.optional(1))
    if diagonal is None and g.optional(1) is not None:
        return [g.op("Trilu", g.dy, g.optional(1), upper=g.attribute("upper", 1))]
    cut = np.triu if g.attribute("upper", 1) else np.tril
    kept = cut(np.ones(g.shape(g.x)[-2:], bool), 0 if diagonal is None else int(diagonal.item()))
    return [g.where(g.array(kept, np.bool_, "triangle"), g.dy, g.number(0.0, g.dy))]


@rule("ReverseSequence")
def reverse_sequence(g: Gradient) -> Contributions:
    """Reverse it again."""
    given = {"batch_axis": g.attribute("batch_axis", 1), "time_axis": g.attribute("time_axis", 0)}
    return [g.op("ReverseSequence", g.dy, g.operand(1), **given)]
