"""Conv and ConvTranspose, which are each other's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import Contributions, rule
from bnfuse.core.windows import resolved_pads, transposed_pads
from bnfuse.opset.spec import OpSpec


@rule("Conv")
def conv(g: Gradient) -> Contributions:
    """Emit one ConvGrad for what is wanted: both gradients in one node where both are, and the bias's with them."""
    x, weight = g.x, g.operand(1)
    bias = g.optional(2) is not None and g.wants(2)
    dx, dweight = g.wants(0), g.wants(1)
    attributes = window_of(g, g.shape(x)[2:], g.shape(weight)[2:])
    if not dx and not dweight:
        return None, None, channel_sum(g, g.dy)
    core = "ConvGrad" if dx and dweight else "ConvGradInput" if dx else "ConvGradWeight"
    spec = OpSpec((), core, ("BiasGrad",) if bias else ())
    made = g.own(spec, {"dy": g.dy, "x": x, "weight": weight}, attributes)
    return made.get("dx"), made.get("dweight"), made.get("dbias")


@rule("ConvTranspose")
def conv_transpose(g: Gradient) -> Contributions:
    """Emit a node for each gradient that is wanted: the bias's goes with that of the weight."""
    x, weight = g.x, g.operand(1)
    kernel = g.shape(weight)[2:]
    window = transposed_window(g, g.shape(x)[2:], kernel)
    operands = {"dy": g.dy, "x": x, "weight": weight}
    bias = g.optional(2) is not None and g.wants(2)
    dx = g.own(OpSpec((), "ConvTransposeGradInput"), operands, window)["dx"] if g.wants(0) else None
    if not g.wants(1):
        return dx, None, channel_sum(g, g.dy) if bias else None
    made = g.own(OpSpec((), "ConvTransposeGradWeight", ("BiasGrad",) if bias else ()), operands, window)
    return dx, made["dweight"], made.get("dbias")


def channel_sum(g: Gradient, dy: ir.Value) -> ir.Value:
    """Emit the sum over all axes but the channels'."""
    return g.sum(dy, [axis for axis in range(g.rank(g.y)) if axis != 1])


def window_of(g: Gradient, extent: Sequence[int], kernel: Sequence[int]) -> dict[str, Any]:
    """Give the attributes of a convolution over a map of this extent, with all defaults and auto_pad written out."""
    rank = len(kernel)
    strides = g.attribute("strides", (1,) * rank)
    dilations = g.attribute("dilations", (1,) * rank)
    given = {"strides": strides, "dilations": dilations, "kernel_shape": tuple(kernel)}
    given |= {"pads": g.attribute("pads", None), "auto_pad": g.attribute("auto_pad", "NOTSET")}
    pads = resolved_pads(given, extent)
    return {**given, "pads": pads, "group": g.attribute("group", 1)}


def transposed_window(g: Gradient, extent: Sequence[int], kernel: Sequence[int]) -> dict[str, Any]:
    """Give the attributes of the Conv whose input gradient a ConvTranspose of a map of this extent is."""
    rank = len(kernel)
    window = {
        "strides": g.attribute("strides", (1,) * rank),
        "dilations": g.attribute("dilations", (1,) * rank),
        "kernel_shape": tuple(kernel),
        "pads": g.attribute("pads", (0,) * (2 * rank)),
        "group": g.attribute("group", 1),
    }
    shape = g.attribute("output_shape", None)
    more, auto = g.attribute("output_padding", (0,) * rank), g.attribute("auto_pad", "NOTSET")
    return {**window, "pads": transposed_pads(window, extent, shape, more, auto)}
