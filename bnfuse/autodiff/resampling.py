"""Resize, and padding with elements of the map: linear along each axis, so the gradient is the transposed matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import rule
from bnfuse.core.errors import BnfuseError
from bnfuse.opset.resampling import pad_matrices, resize_matrices

Contributions = Sequence[ir.Value | None]


@rule("Resize", "Upsample")
def resize(g: Gradient) -> Contributions:
    """Multiply by the transposed matrices of the axes that are resampled."""
    attributes = {name: attribute.value for name, attribute in g.node.attributes.items()}
    given = {"scales": g.known(g.optional(1))} if g.node.op_type == "Upsample" else _sizes(g)
    try:
        matrices = resize_matrices(g.node.op_type, attributes, g.shape(g.x), **given)
    except BnfuseError as error:
        raise g.error(f"{error}.") from None
    return [back(g, matrices)]


def _sizes(g: Gradient) -> dict[str, Any]:
    found = {}
    for place, name in ((1, "roi"), (2, "scales"), (3, "sizes")):
        operand = g.optional(place)
        if operand is not None and g.shape(operand) != (0,):
            found[name] = g.constant(place, name)
    return found


def padded_axes(g: Gradient, before: Sequence[int], after: Sequence[int], mode: str) -> ir.Value:
    """Emit the gradient of a Pad by elements of the map."""
    return back(g, pad_matrices(mode, [*before, *after], None, g.shape(g.x)))


def back(g: Gradient, matrices: Mapping[int, np.ndarray]) -> ir.Value:
    """Multiply the gradient, of the result's shape, by the transposed matrix [in, out] of each axis.

    Rows of the last two axes are multiplied where they lie; another axis is brought to the end and back.
    """
    gradient, rank = g.dy, g.rank(g.x)
    for axis, matrix in matrices.items():
        if axis == rank - 1:
            gradient = g.op("MatMul", gradient, _constant(g, matrix))
        elif axis == rank - 2:
            gradient = g.op("MatMul", _constant(g, matrix.T), gradient)
        else:
            order = [*(place for place in range(rank) if place != axis), axis]
            moved = g.op("MatMul", g.transpose(gradient, order), _constant(g, matrix))
            gradient = g.transpose(moved, [int(place) for place in np.argsort(order)])
    return gradient


def _constant(g: Gradient, matrix: np.ndarray) -> ir.Value:
    return g.array(np.ascontiguousarray(matrix), g.dtype(g.x).numpy(), "matrix")
