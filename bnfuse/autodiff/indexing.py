"""Reading and writing at indices: the gradient of one is the other."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import Contributions, rule


def zeros_like(g: Gradient, value: ir.Value) -> ir.Value:
    """Emit zeros of the shape of a value."""
    return g.emitter.zeros(g.shape(value), g.dtype(value), f"{g.node.name}/grad/zeros")


def count_from_front(g: Gradient, indices: ir.Value, size: int) -> ir.Value:
    """Emit indices of which none counts from the back."""
    known = g.known(indices)
    if known is not None:
        return g.array(np.where(known < 0, known + size, known), np.int64, "indices")
    wide = indices if indices.dtype == ir.DataType.INT64 else g.op("Cast", indices, to=int(ir.DataType.INT64))
    negative = g.op("Less", wide, g.array(0, np.int64, "zero"))
    return g.where(negative, g.add(wide, g.array(size, np.int64, "size")), wide)


@rule("Gather")
def gather(g: Gradient) -> Contributions:
    """Add the rows up where they came from: as rows of the first axis."""
    shape, indices = g.shape(g.x), g.operand(1)
    axis, rank = g.attribute("axis", 0) % g.rank(g.x), g.rank(indices)
    places = g.known(indices)
    if places is not None and rank <= 1 and len(set((places % shape[axis]).flat)) == places.size > 0:
        return [_put_back(g, (places % shape[axis]).reshape(-1), axis)]
    front = count_from_front(g, indices, shape[axis])
    rows = [*range(axis, axis + rank), *range(axis), *range(axis + rank, g.rank(g.y))]
    dy = g.dy if rows == [*range(g.rank(g.y))] else g.transpose(g.dy, rows)
    moved = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    zeros = g.emitter.zeros(moved, g.dtype(g.x), f"{g.node.name}/grad/zeros")
    column = g.reshape(front, (*g.shape(indices), 1))
    total = g.op("ScatterND", zeros, column, dy, reduction="add")
    if not axis:
        return [total]
    back = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
    return [g.transpose(total, back)]


def _put_back(g: Gradient, places: np.ndarray, axis: int) -> ir.Value:
    """Put slices back where they were taken, each from a place of its own, between zeros.

    A run is padded; others are picked in the order of the places, the missing ones from a slice of zeros behind.
    """
    shape = list(g.shape(g.x))
    size, count = shape[axis], len(places)
    sizes = [*shape[:axis], count, *shape[axis + 1 :]]
    dy = g.dy if g.rank(g.y) == len(shape) else g.reshape(g.dy, sizes)
    run = bool((np.diff(places) == 1).all())
    first, missing = (int(places[0]), size - count) if run else (0, int(count < size))
    before, after = [0] * len(shape), [0] * len(shape)
    before[axis], after[axis] = first, missing - first
    dy = g.pad(dy, before, after)
    if run:
        return dy
    order = np.full(size, count, np.int64)
    order[places] = np.arange(count)
    return g.op("Gather", dy, g.array(order, np.int64, "indices"), axis=axis)


@rule("GatherElements")
def gather_elements(g: Gradient) -> Contributions:
    """Add the elements up where they came from."""
    axis = g.attribute("axis", 0)
    front = count_from_front(g, g.operand(1), g.shape(g.x)[axis])
    return [g.op("ScatterElements", zeros_like(g, g.x), front, g.dy, axis=axis, reduction="add")]


@rule("GatherND")
def gather_nd(g: Gradient) -> Contributions:
    """Add the slices up where they came from; of a batch its own indices stand before the others."""
    indices, batch = g.operand(1), g.attribute("batch_dims", 0)
    if batch:
        sizes = g.shape(indices)[:-1]
        own = np.moveaxis(np.indices(sizes)[:batch], 0, -1)
        wide = indices if g.dtype(indices) == ir.DataType.INT64 else g.op("Cast", indices, to=int(ir.DataType.INT64))
        indices = g.op("Concat", g.array(own, np.int64, "batch"), wide, axis=-1)
    return [g.op("ScatterND", zeros_like(g, g.x), indices, g.dy, reduction="add")]


@rule("ScatterElements")
def scatter_elements(g: Gradient) -> Contributions:
    """Read the updates' gradients where they were written; what they replaced has none."""
    reduction, axis = _reduction(g), g.attribute("axis", 0)
    front = count_from_front(g, g.operand(1), g.shape(g.x)[axis])
    updates = g.op("GatherElements", g.dy, front, axis=axis)
    if reduction == "add":
        return g.dy, None, updates
    none = g.emitter.zeros(g.shape(g.operand(2)), g.dtype(g.x), f"{g.node.name}/grad/zeros")
    return g.op("ScatterElements", g.dy, front, none, axis=axis), None, updates


@rule("ScatterND")
def scatter_nd(g: Gradient) -> Contributions:
    """Read the updates' gradients where they were written; what they replaced has none."""
    indices = g.operand(1)
    updates = g.op("GatherND", g.dy, indices)
    if _reduction(g) == "add":
        return g.dy, None, updates
    none = g.emitter.zeros(g.shape(g.operand(2)), g.dtype(g.x), f"{g.node.name}/grad/zeros")
    return g.op("ScatterND", g.dy, indices, none), None, updates


def _reduction(g: Gradient) -> str:
    reduction = g.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise g.error(f"scatters with reduction='{reduction}': there is a gradient of none and add only.")
    return str(reduction)


@rule("TopK")
def top_k(g: Gradient) -> Contributions:
    """Put the values' gradients where they were found."""
    axis = g.attribute("axis", -1) % g.rank(g.x)
    places = g.result(1, g.shape(g.y), ir.DataType.INT64, "indices")
    return [g.op("ScatterElements", zeros_like(g, g.x), places, g.dy, axis=axis, reduction="add")]
