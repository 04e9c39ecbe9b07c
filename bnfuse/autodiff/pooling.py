"""Poolings of maps of rank 4, by the operators that have kernels; others are written as these when a graph is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.resampling import back
from bnfuse.autodiff.rules import rule
from bnfuse.core.windows import resolved_pads
from bnfuse.opset.resampling import mean_matrices
from bnfuse.opset.spec import AVERAGE_POOL_ATTRIBUTES, MAX_POOL_ATTRIBUTES, OpSpec

Contributions = Sequence[ir.Value | None]


@rule("MaxPool")
def max_pool(g: Gradient) -> Contributions:
    """Add up at the maxima, of which the forward node gives the flat indices."""
    if g.attribute("storage_order", 0):
        raise g.error("has storage_order=1: its gradient takes indices by rows. Set it to 0.")
    indices = g.result(1, g.shape(g.y), ir.DataType.INT64, "indices")
    window = _window(g, MAX_POOL_ATTRIBUTES)
    return [g.own(OpSpec((), "MaxPoolGrad"), {"dy": g.dy, "indices": indices, "x": g.x}, window)["dx"]]


@rule("AveragePool")
def average_pool(g: Gradient) -> Contributions:
    """Spread each gradient over its window; over one with holes by the means along each axis, transposed."""
    window = _window(g, AVERAGE_POOL_ATTRIBUTES)
    if any(size != 1 for size in g.attribute("dilations", ())):
        dilated = {**window, "dilations": g.attribute("dilations", ())}
        return [back(g, mean_matrices(dilated, g.shape(g.x)))]
    return [g.own(OpSpec((), "AveragePoolGrad"), {"dy": g.dy, "x": g.x}, window)["dx"]]


@rule("GlobalAveragePool")
def global_average_pool(g: Gradient) -> Contributions:
    """Spread each gradient over its map."""
    _require_map(g)
    return [g.own(OpSpec((), "GlobalAveragePoolGrad"), {"dy": g.dy, "x": g.x})["dx"]]


def _require_map(g: Gradient) -> None:
    if g.rank(g.x) != 4:
        raise g.error(f"pools maps of rank {g.rank(g.x)}: there is a gradient of those of rank 4. Reshape around it.")


def _window(g: Gradient, names: Sequence[str]) -> dict[str, Any]:
    """Give the attributes of a pooling with all defaults and auto_pad written out."""
    _require_map(g)
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
