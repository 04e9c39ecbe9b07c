"""Reading and writing at indices: the gradient of one is the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import rule

Contributions = Sequence[ir.Value | None]


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


@rule("GatherElements")
def gather_elements(g: Gradient) -> Contributions:
    """Add the elements up where they came from."""
    axis = g.attribute("axis", 0)
    front = count_from_front(g, g.operand(1), g.shape(g.x)[axis])
    return [g.op("ScatterElements", zeros_like(g, g.x), front, g.dy, axis=axis, reduction="add")]


@rule("GatherND")
def gather_nd(g: Gradient) -> Contributions:
    """Add the slices up where they came from."""
    if g.attribute("batch_dims", 0):
        raise g.error("has batch_dims, of which there is no gradient: write the indices of the batch out.")
    return [g.op("ScatterND", zeros_like(g, g.x), g.operand(1), g.dy, reduction="add")]


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
    return [g.op("ScatterElements", zeros_like(g, g.x), g.node.outputs[1], g.dy, axis=axis, reduction="add")]
