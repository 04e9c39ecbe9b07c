"""Lowering of standard convolutions and poolings: windows that move over a map."""

from __future__ import annotations

from collections.abc import Mapping
from operator import sub
from typing import Any

import onnx_ir as ir

from bnfuse.core.windows import transposed_pads, transposed_size, why_not
from bnfuse.opset.spec import OpSpec
from bnfuse.runtime.lowering.operands import optional, present, result
from bnfuse.runtime.lowering.sparse import lower_mean
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.lowering.steps import composed
from bnfuse.runtime.lowering.transposed import lower_transposed
from bnfuse.runtime.lowering.values import attributes_of

IN_ONNXRUNTIME = "The file runs in onnxruntime."
INSTEAD_OF_1D = (
    "Write it as one of 2, over maps of height 1 (Unsqueeze in front of it), or run the file in onnxruntime."
)


# -- convolution ---------------------------------------------------------------------------------------------------


def conv_attributes(low: Lowering, node: ir.Node, weight: tuple[int, ...], size: tuple[int, ...]) -> dict[str, Any]:
    """All attributes with their defaults; pads made explicit where auto_pad asks for them."""
    if len(weight) != 4:
        what = f"has a weight of rank {len(weight)}: only convolutions of 2 dimensions are compiled"
        raise low.error(node, f"{what}. {INSTEAD_OF_1D}" if len(weight) == 3 else f"{what}. {IN_ONNXRUNTIME}")
    given = attributes_of(node)
    found = {
        "dilations": given.get("dilations", (1, 1)),
        "group": given.get("group", 1),
        "kernel_shape": given.get("kernel_shape", weight[2:]),
        "strides": given.get("strides", (1, 1)),
    }
    return {**found, "pads": explicit_pads(low, node, given, found, size)}


def explicit_pads(
    low: Lowering, node: ir.Node, given: Mapping[str, Any], window: Mapping[str, Any], size: tuple[int, ...]
) -> tuple[int, ...]:
    """Resolve auto_pad to (top, left, bottom, right), for a map of `size` (height, width)."""
    kind = given.get("auto_pad", "NOTSET")
    if kind == "NOTSET":
        return tuple(given.get("pads", (0, 0, 0, 0)))
    if kind == "VALID":
        return (0, 0, 0, 0)
    before, after = [], []
    for i in range(2):
        stride = window["strides"][i]
        span = window.get("dilations", (1, 1))[i] * (window["kernel_shape"][i] - 1) + 1
        total = max(0, (-(-size[i] // stride) - 1) * stride + span - size[i])
        small, large = total // 2, total - total // 2
        before.append(small if kind == "SAME_UPPER" else large)
        after.append(large if kind == "SAME_UPPER" else small)
    return (*before, *after)


def lower_conv(low: Lowering, node: ir.Node) -> None:
    """Lower a convolution, with or without a bias."""
    x, weight, bias = low.operand(node, 0), low.operand(node, 1), optional(node, 2)
    attributes = conv_attributes(low, node, low.shape(weight), low.shape(x)[2:])
    spec = OpSpec((), "Conv", ("Bias",) if bias is not None else ())
    composed(low, node, spec, present(x=x, weight=weight, bias=bias), present(y=result(node, 0)), attributes)


def lower_conv_transpose(low: Lowering, node: ir.Node) -> None:
    """Lower a transposed convolution, with or without a bias."""
    x, weight, bias = low.operand(node, 0), low.operand(node, 1), optional(node, 2)
    kernel, (_, channels, *size) = low.shape(weight), low.shape(x)
    if len(kernel) != 4:
        conv_attributes(low, node, kernel, ())  # which refuses it
    given = attributes_of(node)
    window = {
        "dilations": given.get("dilations", (1, 1)),
        "group": given.get("group", 1),
        "kernel_shape": kernel[2:],
        "pads": given.get("pads", (0, 0, 0, 0)),
        "strides": given.get("strides", (1, 1)),
    }
    wanted = given.get("output_shape"), given.get("output_padding", (0, 0)), given.get("auto_pad", "NOTSET")
    window["pads"] = transposed_pads(window, size, *wanted)
    out = transposed_size(window, size, wanted[1]) if wanted[0] is None else tuple(wanted[0])[-2:]
    if channels != kernel[0] or channels % window["group"] or min(out) < 1:
        raise low.error(node, f"of {list(low.shape(x))} by {list(kernel)} gives maps of {list(out)}: correct the file")
    window["output_padding"] = tuple(map(sub, out, transposed_size(window, size)))
    spec = OpSpec((), "ConvTranspose", ("Bias",) if bias is not None else ())
    lower_transposed(low, node, spec, present(x=x, weight=weight, bias=bias), present(y=result(node, 0)), window)


# -- pooling -------------------------------------------------------------------------------------------------------


def pool_attributes(low: Lowering, node: ir.Node, size: tuple[int, ...]) -> dict[str, Any]:
    """Read a pooling's window, pads resolved. Raises BnfuseError for what no kernel takes."""
    given = attributes_of(node)
    if len(given["kernel_shape"]) != 2:
        what = f"has the window {list(given['kernel_shape'])}: only poolings of 2 dimensions are compiled"
        raise low.error(node, f"{what}. {INSTEAD_OF_1D if len(given['kernel_shape']) == 1 else IN_ONNXRUNTIME}")
    if given.get("storage_order", 0):
        raise low.error(node, "has storage_order=1: only row-major indices are supported")
    window = {
        "kernel_shape": given["kernel_shape"],
        "strides": given.get("strides", (1, 1)),
        "dilations": given.get("dilations", (1, 1)),
        "ceil_mode": given.get("ceil_mode", 0),
    }
    if node.op_type == "AveragePool":
        window["count_include_pad"] = given.get("count_include_pad", 0)
    window["pads"] = explicit_pads(low, node, given, window, size)
    if reason := why_not(window, size):
        raise low.error(node, reason)
    return window


def lower_max_pool(low: Lowering, node: ir.Node) -> None:
    """Lower a max pooling, with its indices where somebody wants them."""
    x = low.operand(node, 0)
    attributes = pool_attributes(low, node, low.shape(x)[2:])
    results = present(y=result(node, 0), indices=result(node, 1))
    composed(low, node, OpSpec((), "MaxPool"), present(x=x), results, attributes)


def lower_average_pool(low: Lowering, node: ir.Node) -> None:
    """Lower an average pooling."""
    x = low.operand(node, 0)
    attributes = pool_attributes(low, node, low.shape(x)[2:])
    if attributes["dilations"] != (1, 1):
        lower_mean(low, node, x, attributes)
        return
    composed(low, node, OpSpec((), "AveragePool"), present(x=x), present(y=result(node, 0)), attributes)


def lower_global_average_pool(low: Lowering, node: ir.Node) -> None:
    """Lower a pooling to one pixel."""
    composed(
        low, node, OpSpec((), "GlobalAveragePool"), present(x=low.operand(node, 0)), present(y=result(node, 0)), {}
    )
