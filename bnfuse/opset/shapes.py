"""The shapes of an operator's results from those of its operands: pure functions on tuples of dimensions.

A dimension is a number, a name, or None where it is unknown; an unknown shape is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnfuse.opset.reference import window_counts
from bnfuse.opset.spec import OpSpec, PlainOp

Dim = int | str | None
Shape = tuple[Dim, ...] | None
Attributes = Mapping[str, Any]


def result_shapes(op: OpSpec | PlainOp, shapes: Mapping[str, Shape], attributes: Attributes) -> dict[str, Shape]:
    """The shape of every result, by name."""
    if isinstance(op, PlainOp):
        return dict.fromkeys(op.results, _plain(op, shapes))
    found = (_backward if op.is_gradient else _forward)(op, shapes, attributes)
    return {name: found[name] for name in op.results}


def channels(shape: Shape) -> Shape:
    """The shape of a coefficient of a map: (C,)."""
    return (shape[1],) if shape else (None,)


def window_shape(x: Shape, out_channels: Dim, attributes: Attributes) -> Shape:
    """What a convolution or a pool makes of x."""
    if x is None:
        return None
    height, width = x[2:]
    if isinstance(height, int) and isinstance(width, int):
        return (x[0], out_channels, *window_counts((height, width), attributes))
    return (x[0], out_channels, None, None)


def _plain(op: PlainOp, shapes: Mapping[str, Shape]) -> Shape:
    """All the results of a plain operator are coefficients of the same channels."""
    if "x" in op.operands:
        return channels(shapes["x"])
    return shapes["dbeta" if "dbeta" in op.operands else "mean"]


def _forward(op: OpSpec, shapes: Mapping[str, Shape], attributes: Attributes) -> dict[str, Shape]:
    x = shapes["x"]
    if op.core == "Map" or x is None:
        y = x
    elif op.core == "GlobalAveragePool":
        y = (*x[:2], 1, 1)
    elif op.core == "Conv":
        weight = shapes["weight"]
        y = window_shape(x, weight[0] if weight else None, attributes)
    else:
        y = window_shape(x, x[1], attributes)
    return {"y": y, "indices": y, "stored": x, "mean": channels(y), "variance": channels(y)}


def _backward(op: OpSpec, shapes: Mapping[str, Shape], attributes: Attributes) -> dict[str, Shape]:
    dy = shapes["dy"]
    if dy and "Slice" in op.prologue:
        dy = (dy[0], attributes["grad_stop"] - attributes["grad_start"], *dy[2:])
    dx = shapes["x"] if op.reads_x else dy
    found = {"dx": dx, "dweight": shapes.get("weight"), "dbias": channels(dy)}
    return {name: found.get(name, channels(dx)) for name in op.results}
