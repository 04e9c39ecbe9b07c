"""What operators have of the batch in constants, made anew where a graph goes to another batch (batches.py).

Each function is given a node whose operands have their new shapes, and corrects its constants, or refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from bnfuse.graph.values import static_shape
from bnfuse.opset.spec import DOMAIN

if TYPE_CHECKING:
    from bnfuse.graph.batches import Rebatched

Shape = tuple[int, ...]
EVERYTHING = np.iinfo(np.int64).max


def reshape(at: Rebatched, node: ir.Node) -> None:
    """Let the dimension of the target that holds the batch grow or shrink with it."""
    x, y, target = node.inputs[0], node.outputs[0], at.constant(node, 1)
    axes, after = at.changed(x), static_shape(y)
    if not axes or target is None or after is None:
        return
    before, outer = at.shape_before(x) or (), at.outer.get(x, {}) if x is not None else {}
    wanted, places = list(after), {}
    for axis in axes:
        front = math.prod(before[:axis]) * outer.get(axis, 1)
        place = next((j for j in range(len(after)) if front < math.prod(after[: j + 1])), len(after) - 1)
        inside, rest = divmod(front, math.prod(after[:place]))
        if rest or after[place] % (inside * at.old):
            raise at.error(node, f"divides the batch among dimensions of {list(after)}")
        wanted[place], places[place] = at.scaled(wanted[place]), inside
    at.outer[y] = places
    now = static_shape(x) or ()
    copied = not node.attributes.get_int("allowzero", 0)
    kept = [now[axis] if size == 0 and copied else size for axis, size in enumerate(target.tolist())]
    rest = math.prod(size for size in kept if size != -1)
    if [math.prod(now) // max(rest, 1) if size == -1 else size for size in kept] != wanted:
        at.replace(node, 1, wanted)


def expand(at: Rebatched, node: ir.Node) -> None:
    """Broadcast to the batch."""
    x, y, target = node.inputs[0], node.outputs[0], at.constant(node, 1)
    after = static_shape(y)
    if target is None or after is None:
        return
    wanted = list(after)
    lead = len(after) - len(static_shape(x) or ())
    for axis, (_, now) in at.changed(x).items():
        wanted[lead + axis] = now
    free = after and (lead > 0 or (static_shape(x) or (0,))[0] == 1)
    if free and is_batch(at, y, after):
        wanted[0] = at.scaled(after[0])
    if wanted != list(after):
        said = aligned(target, len(after))
        at.replace(node, 1, [1 if size == 1 else new for size, new in zip(said, wanted, strict=True)])
        at.change(y, tuple(wanted))


def fill(at: Rebatched, node: ir.Node) -> None:
    """Fill a tensor of the batch."""
    y, target = node.outputs[0], at.constant(node, 0)
    after = static_shape(y)
    if target is not None and after and is_batch(at, y, after):
        wanted = (at.scaled(after[0]), *after[1:])
        at.replace(node, 0, wanted)
        at.change(y, wanted)


def draw(at: Rebatched, node: ir.Node) -> None:
    """Draw for the batch."""
    y, after = node.outputs[0], static_shape(node.outputs[0])
    if after and is_batch(at, y, after):
        wanted = (at.scaled(after[0]), *after[1:])
        node.attributes["shape"] = ir.AttrInt64s("shape", list(wanted))
        at.change(y, wanted)


def draw_like(at: Rebatched, node: ir.Node) -> None:
    """Draw for the batch where the operand is a constant of its shape."""
    x, y = node.inputs[0], node.outputs[0]
    shape = static_shape(x)
    if x is None or not shape or x in at.touched or x.producer() is not None or not is_batch(at, y, shape):
        return
    wanted = (at.scaled(shape[0]), *shape[1:])
    at.put(node, 0, np.zeros(wanted, (x.dtype or ir.DataType.FLOAT).numpy()))
    at.change(y, wanted)


def tile(at: Rebatched, node: ir.Node) -> None:
    """Repeat for each sample of the batch."""
    y, repeats = node.outputs[0], at.constant(node, 1)
    after = static_shape(y)
    if repeats is None or not after or at.changed(node.inputs[0]).get(0) or int(repeats[0]) % at.old:
        return
    if is_batch(at, y, after):
        at.replace(node, 1, [at.scaled(int(repeats[0])), *map(int, repeats[1:])])
        at.change(y, (at.scaled(after[0]), *after[1:]))


def is_batch(at: Rebatched, value: ir.Value, shape: Shape) -> bool:
    """Tell whether the first dimension of what is the same for all samples is the batch: as its readers say, or
    else where it is as large."""
    if shape[0] % at.old:
        return False
    for use in value.uses():
        for other in use.node.inputs:
            sizes = at.shape_before(other)
            if other is None or other is value or sizes is None or len(sizes) < len(shape):
                continue
            axis = 0 if use.node.domain == DOMAIN else len(sizes) - len(shape)
            if sizes[axis] != shape[0] or use.node.op_type in ("Reshape", "Concat", "Gemm", "MatMul"):
                continue
            if other in at.before:
                return axis in at.changed(other)
            if other.producer() is None:
                return False
    return shape[0] == at.old


def split(at: Rebatched, node: ir.Node) -> None:
    """Cut the batch in the same shares."""
    axes = at.changed(node.inputs[0])
    axis = node.attributes.get_int("axis", 0) % max(len(static_shape(node.inputs[0]) or ()), 1)
    if axis not in axes:
        return
    lengths = [(static_shape(value) or ())[axis] for value in node.outputs]
    shared = [divmod(length * at.batch, at.old) for length in lengths]
    if any(rest for _, rest in shared):
        raise at.error(node, f"cuts the batch into {lengths}")
    if at.constant(node, 1) is not None:
        at.replace(node, 1, [length for length, _ in shared])


def cut(at: Rebatched, node: ir.Node) -> None:
    """Take all of the batch; a part of it is refused."""
    x = node.inputs[0]
    starts, ends = at.constant(node, 1), at.constant(node, 2)
    if starts is None or ends is None or not at.changed(x):
        return
    named, steps = at.constant(node, 3), at.constant(node, 4)
    rank = len(static_shape(x) or ())
    places = [int(axis) % rank for axis in (range(len(starts)) if named is None else named)]
    first, wanted = [int(start) for start in starts], [int(end) for end in ends]
    for place, axis in enumerate(places):
        sizes = at.changed(x).get(axis)
        if sizes is None:
            continue
        start, end = int(starts[place]), min(wanted[place], sizes[0])
        whole = (start, end) == (0, sizes[0])
        of_several = at.whole_batches(node, axis) and start >= 0 and start % at.old == end % at.old == 0
        if not (whole or of_several) or (steps is not None and steps[place] != 1):
            raise at.error(node, f"takes elements {start} to {end} of the batch")
        first[place], wanted[place] = at.scaled(start), EVERYTHING if end == sizes[0] else at.scaled(end)
    if first != [int(start) for start in starts]:
        at.replace(node, 1, first)
    if wanted != [int(end) for end in ends]:
        at.replace(node, 2, wanted)


def pad(at: Rebatched, node: ir.Node) -> None:
    """Put as many more samples before and behind the batch."""
    pads, named = at.constant(node, 1), at.constant(node, 3)
    rank = len(static_shape(node.inputs[0]) or ())
    places = [int(axis) % rank for axis in (range(rank) if named is None else named)]
    if pads is None or not at.changed(node.inputs[0]):
        return
    wanted = [int(size) for size in pads]
    for place, axis in enumerate(places):
        for side in (place, place + len(places)):
            fits = at.whole_batches(node, axis) and wanted[side] % at.old == 0
            if axis in at.changed(node.inputs[0]) and wanted[side] and not fits:
                raise at.error(node, f"puts {wanted[side]} elements beside the batch")
            wanted[side] = at.scaled(wanted[side]) if axis in at.changed(node.inputs[0]) else wanted[side]
    if wanted != [int(size) for size in pads]:
        at.replace(node, 1, wanted)


def index(at: Rebatched, node: ir.Node) -> None:
    """Refuse constant places in the batch."""
    axis = node.attributes.get_int("axis", 0) % max(len(static_shape(node.inputs[0]) or ()), 1)
    if axis in at.changed(node.inputs[0]) and at.constant(node, 1) is not None:
        raise at.error(node, "has constant places in the batch")


def mean(at: Rebatched, node: ir.Node) -> None:
    """Refuse a mean over a batch that is not the first axis: its gradient has the count as a constant."""
    axes = {*at.changed(node.inputs[0])}
    reduced = at.constant(node, 1)
    rank = len(static_shape(node.inputs[0]) or ())
    over = {int(axis) % rank for axis in reduced.reshape(-1)} if reduced is not None else {*range(rank)}
    if over & axes and 0 not in over:
        raise at.error(node, "takes the mean over the batch, which is not the first dimension there")


def aligned(target: np.ndarray, rank: int) -> list[int]:
    """Give the target of an Expand with as many dimensions as the result has."""
    found = [int(size) for size in target]
    return [1] * (rank - len(found)) + found


HANDLERS: dict[str, Callable[[Rebatched, ir.Node], None]] = {
    "Reshape": reshape,
    "Expand": expand,
    "ConstantOfShape": fill,
    "RandomUniform": draw,
    "RandomNormal": draw,
    **dict.fromkeys(("RandomUniformLike", "RandomNormalLike"), draw_like),
    "Tile": tile,
    "Split": split,
    "Slice": cut,
    "Pad": pad,
    "ReduceMean": mean,
    **dict.fromkeys(("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"), index),
}
