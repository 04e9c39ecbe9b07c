"""The shapes of an operator's results from those of its operands: pure functions on tuples of dimensions.

A dimension is a number, a name, or None where it is unknown; an unknown shape is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnfuse.core.windows import transposed_size
from bnfuse.opset.plain import GROUP_OPS, WHOLE_OPS, PlainOp
from bnfuse.opset.reference import window_counts
from bnfuse.opset.spec import OpSpec, is_of_images

Dim = int | str | None
Shape = tuple[Dim, ...] | None
Attributes = Mapping[str, Any]

OF_PIXELS = ("mean", "inv_std")  # results of a LayerNorm
GROUPS = tuple(op.name for op in GROUP_OPS)


def result_shapes(op: OpSpec | PlainOp, shapes: Mapping[str, Shape], attributes: Attributes) -> dict[str, Shape]:
    """Give the shape of every result, by name."""
    if isinstance(op, PlainOp):
        return _plain(op, shapes, attributes)
    found = (_backward if op.is_gradient else _forward)(op, shapes, attributes)
    return {name: found[name] for name in op.results}


def channels(shape: Shape) -> Shape:
    """Give the shape of a coefficient of a map: (C,)."""
    return (shape[1],) if shape and len(shape) > 1 else (None,)


def of_images(shape: Shape) -> Shape:
    """Give the shape of what is summed over each image of a map: (N, C)."""
    return shape[:2] if shape and len(shape) > 1 else (None, None)


def pixels(shape: Shape) -> Shape:
    """Give the shape of what there is one of for each pixel of a map: [N, ...] without the channels."""
    return (shape[0], *shape[2:]) if shape and len(shape) > 1 else None


def window_shape(x: Shape, out_channels: Dim, attributes: Attributes) -> Shape:
    """Tell what a convolution or a pool makes of x."""
    if x is None:
        return None
    height, width = x[2:]
    if isinstance(height, int) and isinstance(width, int):
        return (x[0], out_channels, *window_counts((height, width), attributes))
    return (x[0], out_channels, None, None)


def transposed_shape(x: Shape, weight: Shape, attributes: Attributes) -> Shape:
    """Tell what a transposed convolution makes of x; its weight is [C, O/group, kH, kW]."""
    if x is None:
        return None
    per_group = weight[1] if weight else None
    channels = per_group * attributes["group"] if isinstance(per_group, int) else None
    height, width = x[2:]
    if isinstance(height, int) and isinstance(width, int):
        return (x[0], channels, *transposed_size(attributes, (height, width), attributes["output_padding"]))
    return (x[0], channels, None, None)


def _plain(op: PlainOp, shapes: Mapping[str, Shape], attributes: Attributes) -> dict[str, Shape]:
    """Results are maps like the one that is changed, or coefficients: of x's channels, or like those that come in."""
    if op.name in ("GroupNorm", *GROUPS):
        return _of_groups(op, shapes)
    if op in WHOLE_OPS:
        like = {"y": "x", "dx": "x", "dscores": "log_prob"}
        given = {name: shapes[like[name]] if name in like else channels(shapes["x"]) for name in op.results}
        return {**given, **dict.fromkeys(OF_PIXELS, pixels(shapes["x"]))} if op.name == "LayerNorm" else given
    if op.name == "AllReduceTerms":
        return dict.fromkeys(op.results, (attributes["stop"] - attributes["start"],))
    if op.results in (("dx",), ("y",)):
        map_ = shapes[next(name for name in ("acc", "dz", "x") if name in op.operands)]
        return dict.fromkeys(op.results, map_)
    if "x" in op.operands:
        found = channels(shapes["x"])
        if "samples" in attributes:
            found = (_groups(shapes["x"], attributes["samples"]), *found)  # type: ignore[misc]
        return dict.fromkeys(op.results, found)
    found = shapes[next(name for name in ("dbeta", "mean", "beta_term") if name in op.operands)]
    running = [name for name in op.results if name.startswith("new_running")]
    return {**dict.fromkeys(op.results, found), **dict.fromkeys(running, shapes.get("running_mean"))}


def _of_groups(op: PlainOp, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Give maps like x, parameters like the scale, and coefficients [N, C]."""
    x = shapes.get("x", shapes.get("mean"))
    found: dict[str, Shape] = {"y": x, "dscale": shapes.get("scale"), "dbias": shapes.get("scale")}
    return {name: found.get(name, x[:2] if x else None) for name in op.results}


def _groups(x: Shape, samples: int) -> Dim:
    return x[0] // samples if x and isinstance(x[0], int) else None


def _forward(op: OpSpec, shapes: Mapping[str, Shape], attributes: Attributes) -> dict[str, Shape]:
    x = shapes["x"]
    if op.core == "Pointwise" or x is None:
        y = x
    elif op.core == "GlobalAveragePool":
        y = (*x[:2], 1, 1)
    elif op.core == "Resample":
        y = (*x[:2], *((matrix[0] if matrix else None) for matrix in (shapes["rows"], shapes["columns"])))
    elif op.core == "ConvTranspose":
        y = transposed_shape(x, shapes["weight"], attributes)
    elif op.core == "Conv":
        weight = shapes["weight"]
        y = window_shape(x, weight[0] if weight else None, attributes)
    else:
        y = window_shape(x, x[1], attributes)
    found = {"y": y, "indices": y, "stored": x, "mean": channels(y), "variance": channels(y)}
    return {**found, **{name: of_images(y) for name in op.results if is_of_images(name)}}


def _backward(op: OpSpec, shapes: Mapping[str, Shape], attributes: Attributes) -> dict[str, Shape]:
    dy = shapes["dy"]
    if dy and "Slice" in op.prologue:
        dy = (dy[0], attributes["grad_stop"] - attributes["grad_start"], *dy[2:])
    dx = shapes["x"] if op.reads_x else dy
    found = {"dx": dx, "dweight": shapes.get("weight"), "dbias": channels(dy)}
    found |= {name: of_images(dx) for name in op.results if is_of_images(name)}
    return {name: found.get(name, channels(dx)) for name in op.results}
