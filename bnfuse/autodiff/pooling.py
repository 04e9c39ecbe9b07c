"""Poolings: of maps of rank 4 by the operators that have kernels, others by standard operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.resampling import back
from bnfuse.autodiff.rules import Contributions, rule
from bnfuse.core.windows import resolved_pads
from bnfuse.opset.resampling import mean_matrices
from bnfuse.opset.spec import AVERAGE_POOL_ATTRIBUTES, MAX_POOL_ATTRIBUTES, OpSpec


@rule("MaxPool")
def max_pool(g: Gradient) -> Contributions:
    """Add up at the maxima, of which the forward node gives the flat indices."""
    if g.attribute("storage_order", 0):
        raise g.error("has storage_order=1: its gradient takes indices by rows. Set it to 0.")
    indices = g.result(1, g.shape(g.y), ir.DataType.INT64, "indices")
    if g.rank(g.x) != 4:
        zeros = g.emitter.zeros((math.prod(g.shape(g.x)),), g.dtype(g.x), f"{g.node.name}/grad/zeros")
        places, values = (g.reshape(value, (-1,)) for value in (indices, g.dy))
        added = g.op("ScatterElements", zeros, places, values, axis=0, reduction="add")
        return [g.reshape(added, g.shape(g.x))]
    window = _window(g, MAX_POOL_ATTRIBUTES)
    return [g.own(OpSpec((), "MaxPoolGrad"), {"dy": g.dy, "indices": indices, "x": g.x}, window)["dx"]]


@rule("AveragePool")
def average_pool(g: Gradient) -> Contributions:
    """Spread each gradient over its window."""
    if any(size != 1 for size in g.attribute("dilations", ())) or g.rank(g.x) != 4:
        window = _window(g, (*AVERAGE_POOL_ATTRIBUTES, "dilations"))
        matrices = mean_matrices(window, g.shape(g.x))
        return [back(g, {axis: _exact(matrix) for axis, matrix in matrices.items()})]
    window = _window(g, AVERAGE_POOL_ATTRIBUTES)
    return [g.own(OpSpec((), "AveragePoolGrad"), {"dy": g.dy, "x": g.x}, window)["dx"]]


@rule("GlobalAveragePool")
def global_average_pool(g: Gradient) -> Contributions:
    """Spread each gradient over its map."""
    if g.rank(g.x) != 4:
        share = g.div(g.dy, g.number(math.prod(g.shape(g.x)[2:]), g.dy))
        return [g.expand(share, g.shape(g.x))]
    return [g.own(OpSpec((), "GlobalAveragePoolGrad"), {"dy": g.dy, "x": g.x})["dx"]]


def _exact(matrix: np.ndarray) -> np.ndarray:
    """Give a matrix of shares of whole numbers, float64, of its float32 elements."""
    return np.where(matrix > 0, 1 / np.rint(1 / np.where(matrix > 0, matrix, 1).astype(np.float64)), 0.0)


def _window(g: Gradient, names: Sequence[str]) -> dict[str, Any]:
    """Give the attributes of a pooling with all defaults and auto_pad written out."""
    kernel = g.attribute("kernel_shape", ())
    rank = len(kernel)
    given = {
        "kernel_shape": kernel,
        "strides": g.attribute("strides", (1,) * rank),
        "dilations": g.attribute("dilations", (1,) * rank),
        "ceil_mode": g.attribute("ceil_mode", 0),
        "count_include_pad": g.attribute("count_include_pad", 0),
    }
    stated = {"pads": g.attribute("pads", None), "auto_pad": g.attribute("auto_pad", "NOTSET")}
    given["pads"] = resolved_pads({**given, **stated}, g.shape(g.x)[2:])
    return {name: given[name] for name in names}
