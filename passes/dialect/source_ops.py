"""Nodes read as operators of steps: the one place that knows how a graph of the training dialect spells things.

    Conv, ConvTranspose [bias]       the same [Bias]
    MaxPool, AveragePool, ...        the same
    Relu and other activations, Add  Pointwise with the step in its prologue
    Mul of a map by [N, C, 1, 1]     GatePointwise
    ConvGrad, PointwiseGradReluGrad  what they are: operators of ai.bnfuse

Only float32 maps of rank 4 with static shapes are read; for anything else `read` gives None, and the node stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir

from bnfuse.core.windows import transposed_pads, transposed_size
from bnfuse.opset.activations import ACTIVATIONS, GRADIENTS
from bnfuse.opset.sources import SOURCES, activation_of
from bnfuse.opset.sources import forward_of as forward_of_activation
from bnfuse.opset.spec import (
    DOMAIN,
    MAPS_LIKE_DY,
    MAPS_LIKE_X,
    OpSpec,
)
from bnfuse.passes.rewriter import Op, own_op

BATCH_NORM, BATCH_NORM_GRAD = "BatchNorm", "BatchNormGrad"
# operands that are maps
MAPS = (*MAPS_LIKE_X, *MAPS_LIKE_DY, "dz", "acc", "gate", "skip_gate", "grad_gate", "other_gate")


def read(node: ir.Node | None) -> Op | None:
    """Read the node as an operator; None where it has no such form."""
    if node is None:
        return None
    if own := own_op(node):
        return own if all(is_map(value) for name, value in own.operands.items() if name in MAPS) else None
    reader = _READERS.get((node.domain, node.op_type))
    return reader(node) if reader else None


def is_batch_norm(node: ir.Node) -> bool:
    """Tell whether a node is a BatchNorm that no pass has taken apart."""
    return node.op_type == BATCH_NORM and node.domain == DOMAIN


def is_batch_norm_grad(node: ir.Node) -> bool:
    """Tell whether a node is a BatchNorm's gradient that no pass has taken apart."""
    return node.op_type == BATCH_NORM_GRAD and node.domain == DOMAIN


def gradient_of(value: ir.Value | None) -> Op | None:
    """Read the gradient operator whose `dx` the value is, or None."""
    op = read(value.producer()) if value is not None else None
    if op is None or not isinstance(op.spec, OpSpec) or not op.spec.is_gradient or op.results.get("dx") is not value:
        return None
    return op


def forward_of(value: ir.Value | None) -> Op | None:
    """Read the forward operator whose `y` the value is, or None."""
    op = read(value.producer()) if value is not None else None
    if op is None or not isinstance(op.spec, OpSpec) or op.spec.is_gradient or op.results.get("y") is not value:
        return None
    return op


def is_map(value: ir.Value | None) -> TypeGuard[ir.Value]:
    """Tell whether the value is a feature map that kernels and functions take: float32, rank 4, static."""
    return (
        value is not None
        and value.dtype == ir.DataType.FLOAT
        and value.shape is not None
        and len(value.shape) == 4
        and all(isinstance(size, int) for size in value.shape)
    )


def sizes(value: ir.Value) -> tuple[int, ...]:
    """Give the sizes of a value whose shape is static, such as (N, C, H, W)."""
    assert value.shape is not None
    return tuple(int(size) for size in value.shape)  # type: ignore[arg-type]


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """Give the value of a constant: an initializer that is no graph input, or a Constant node. None for any other."""
    if value is None or value.is_graph_input():
        return None
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is not None and node.op_type == "Constant" and "value" in node.attributes:
        return node.attributes["value"].as_tensor().numpy()
    return None


def _weighted(node: ir.Node, x: ir.Value, weight: ir.Value) -> tuple[dict[str, ir.Value], tuple[str, ...]]:
    """Give the operands of a convolution of either kind, and the epilogue that its bias is."""
    operands = {"x": x, "weight": weight}
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return operands, ()
    return {**operands, "bias": node.inputs[2]}, ("Bias",)


def _conv(node: ir.Node) -> Op | None:
    x, weight, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if not (is_map(x) and is_map(y) and weight is not None and weight.shape is not None):
        return None
    operands, epilogue = _weighted(node, x, weight)
    return _op(OpSpec((), "Conv", epilogue), operands, {"y": y}, _window(node, sizes(x), sizes(weight)[2:]), node)


def _conv_transpose(node: ir.Node) -> Op | None:
    """Read a ConvTranspose; output_shape and auto_pad become pads and output_padding, of which pads cut evenly."""
    x, weight, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if not (is_map(x) and is_map(y) and weight is not None and weight.shape is not None):
        return None
    size, made = sizes(x)[2:], sizes(y)[2:]
    given: dict[str, Any] = {"kernel_shape": sizes(weight)[2:]}
    given |= {"strides": tuple(_attribute(node, "strides", (1, 1)))}
    given |= {"dilations": tuple(_attribute(node, "dilations", (1, 1))), "group": int(_attribute(node, "group", 1))}
    given |= {"pads": tuple(_attribute(node, "pads", (0, 0, 0, 0)))}
    wanted = (_attribute(node, "output_shape", None), _attribute(node, "output_padding", (0, 0)))
    given["pads"] = transposed_pads(given, size, *wanted, _attribute(node, "auto_pad", "NOTSET"))
    more = tuple(have - least for have, least in zip(made, transposed_size(given, size), strict=True))
    if min(more) < 0:
        return None
    operands, epilogue = _weighted(node, x, weight)
    attributes = {**given, "output_padding": more}
    return _op(OpSpec((), "ConvTranspose", epilogue), operands, {"y": y}, attributes, node)


def _pool(node: ir.Node) -> Op | None:
    x, y = node.inputs[0], node.outputs[0]
    if not (is_map(x) and is_map(y)) or _attribute(node, "storage_order", 0):
        return None
    results: dict[str, ir.Value | None] = {"y": y}
    if node.op_type == "MaxPool":
        results["indices"] = node.outputs[1] if len(node.outputs) > 1 and node.outputs[1].name else None
    return _op(OpSpec((), node.op_type), {"x": x}, results, _window(node, sizes(x)), node)


def _global_average_pool(node: ir.Node) -> Op | None:
    x, y = node.inputs[0], node.outputs[0]
    return _op(OpSpec((), "GlobalAveragePool"), {"x": x}, {"y": y}, {}, node) if is_map(x) else None


def _activation(node: ir.Node) -> Op | None:
    if not is_map(node.inputs[0]):
        return None
    if node.op_type == "Clip":  # whose attributes are operands
        bounds = clip_bounds(*[*node.inputs[1:], None, None][:2])
        found = None if bounds is None else (ACTIVATIONS["Clip"], bounds)
    else:
        given = {name: attribute.value for name, attribute in node.attributes.items()}
        found = activation_of(node.domain, node.op_type, given, len(node.inputs))
    if found is None:
        return None
    activation, attributes = found
    return _op(forward_of_activation(activation), {"x": node.inputs[0]}, {"y": node.outputs[0]}, attributes, node)


def is_pointwise(node: ir.Node) -> bool:
    """Tell whether a node is an activation alone, or the gradient of one alone, of tensors of any rank."""
    own = own_op(node)
    if own is not None and isinstance(own.spec, OpSpec):
        steps = own.spec
        forward = steps.core == "Pointwise" and len(steps.prologue) == 1 and steps.prologue[0] in ACTIVATIONS
        backward = steps.core == "PointwiseGrad" and len(steps.epilogue) == 1 and steps.epilogue[0] in GRADIENTS
        return (forward and not steps.epilogue) or (backward and not steps.prologue)
    if node.op_type == "Clip" and not node.domain:
        return clip_bounds(*[*node.inputs[1:], None, None][:2]) is not None
    given = {name: attribute.value for name, attribute in node.attributes.items()}
    return activation_of(node.domain, node.op_type, given, len(node.inputs)) is not None


def _add(node: ir.Node) -> Op | None:
    x, skip = node.inputs[:2]
    if not (is_map(x) and is_map(skip)) or sizes(x) != sizes(skip):
        return None
    return _op(OpSpec(("Add",), "Pointwise"), {"x": x, "skip": skip}, {"y": node.outputs[0]}, {}, node)


def _gate(node: ir.Node) -> Op | None:
    """Read the product of a map and a factor for each of its channels, of each sample or of all."""
    for x, gate in (node.inputs[:2], node.inputs[1::-1]):
        if is_map(x) and is_map(gate) and is_gate_of(sizes(gate), sizes(x)):
            return _op(OpSpec(("Gate",), "Pointwise"), {"x": x, "gate": gate}, {"y": node.outputs[0]}, {}, node)
    return None


def is_gate_of(gate: tuple[int, ...], x: tuple[int, ...]) -> bool:
    """Tell whether a tensor of these sizes is a gate of a map of several pixels: [N, C, 1, 1] or [1, C, 1, 1]."""
    return x[2] * x[3] > 1 and gate in ((*x[:2], 1, 1), (1, x[1], 1, 1))


def clip_bounds(low: ir.Value | None, high: ir.Value | None) -> dict[str, Any] | None:
    """Give the attributes of a Clip step from a node's bounds; None where a bound is computed at run time."""
    bounds = dict(ACTIVATIONS["Clip"].defaults)
    for key, value in (("min", low), ("max", high)):
        if value is not None:
            constant = constant_of(value)
            if constant is None:
                return None
            bounds[key] = float(constant.item())
    return bounds


def _window(node: ir.Node, x: tuple[int, ...], kernel: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Convolution and pooling attributes with every default written out and auto_pad resolved."""
    kernel = kernel or tuple(_attribute(node, "kernel_shape", ()))
    strides = tuple(_attribute(node, "strides", (1, 1)))
    dilations = tuple(_attribute(node, "dilations", (1, 1)))
    pads = tuple(_attribute(node, "pads", (0, 0, 0, 0)))
    auto = _attribute(node, "auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            for size, s, k, d in zip(x[2:], strides, kernel, dilations, strict=True)
        ]
        small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
        pads = (*small, *large) if auto == "SAME_UPPER" else (*large, *small)
    return {
        "kernel_shape": kernel,
        "strides": strides,
        "dilations": dilations,
        "pads": pads,
        "group": int(_attribute(node, "group", 1)),
        "ceil_mode": int(_attribute(node, "ceil_mode", 0)),
        "count_include_pad": int(_attribute(node, "count_include_pad", 0)),
    }


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    return node.attributes[name].value if name in node.attributes else default


def _op(
    spec: OpSpec, operands: dict[str, Any], results: dict[str, Any], attributes: dict[str, Any], node: ir.Node
) -> Op:
    return Op(
        spec,
        operands,
        {name: value for name, value in results.items() if value is not None},
        {name: attributes[name] for name in spec.attributes},
        node,
    )


_READERS: dict[tuple[str, str], Callable[[ir.Node], Op | None]] = {
    ("", "Conv"): _conv,
    ("", "ConvTranspose"): _conv_transpose,
    ("", "MaxPool"): _pool,
    ("", "AveragePool"): _pool,
    ("", "GlobalAveragePool"): _global_average_pool,
    **{source: _activation for source in SOURCES if source[0] != DOMAIN},
    ("", "Add"): _add,
    ("", "Mul"): _gate,
}
