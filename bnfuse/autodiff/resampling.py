"""Resize, and padding with elements of the map: linear along each axis, so the gradient is the transposed matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import Contributions, rule
from bnfuse.core.errors import BnfuseError
from bnfuse.opset.resampling import pad_matrices, resize_matrices


@rule("Resize")
def resize(g: Gradient) -> Contributions:
    """Multiply by the transposed matrices of the axes that are resampled."""
    attributes = {name: attribute.value for name, attribute in g.node.attributes.items()}
    try:
        matrices = resize_matrices("Resize", attributes, g.shape(g.x), **_sizes(g))
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
    try:
        return back(g, pad_matrices(mode, [*before, *after], None, g.shape(g.x)))
    except BnfuseError as error:
        raise g.error(f"{error}.") from None


def back(g: Gradient, matrices: Mapping[int, np.ndarray]) -> ir.Value:
    """Multiply the gradient, of the result's shape, by the transposed matrix [in, out] of each axis.

    Rows and columns of the last two axes are multiplied where they lie; another axis is that of rows once what is
    before it and what is behind it are taken together.
    """
    gradient, sizes = g.dy, list(g.shape(g.y))
    for axis, matrix in matrices.items():
        sizes[axis] = matrix.shape[1]
        if axis == len(sizes) - 1:
            gradient = g.op("MatMul", gradient, _constant(g, matrix))
        elif axis == len(sizes) - 2:
            gradient = g.op("MatMul", _constant(g, matrix.T), gradient)
        else:
            inner = math.prod(sizes[axis + 1 :])
            rows = g.reshape(gradient, [math.prod(sizes[:axis]), matrix.shape[0], inner])
            gradient = g.reshape(g.op("MatMul", _constant(g, matrix.T), rows), sizes)
    return gradient


def _constant(g: Gradient, matrix: np.ndarray) -> ir.Value:
    return g.array(np.ascontiguousarray(matrix), g.dtype(g.x).numpy(), "matrix")
