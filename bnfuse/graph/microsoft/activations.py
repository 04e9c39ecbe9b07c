"""Activations of onnxruntime's own, and gradients of activations.

Those of the table (bnfuse/opset/activations.py) become operators of ours, the others standard ones. Of a gradient that
reads the activation's result, as SigmoidGrad does, the operator of ours reads its operand instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.graph.microsoft.source import Source, attribute_of
from bnfuse.opset.activations import ACTIVATIONS, GRADIENTS, Activation
from bnfuse.opset.body import OPERATORS
from bnfuse.opset.expressions import Expression, interpret
from bnfuse.opset.spec import OpSpec

COMPARISONS = ("Greater", "GreaterOrEqual", "LessOrEqual", "Less", "And")


def activation(source: Source) -> None:
    """Write an activation of the table that is onnxruntime's: ours, or its formula where the type is another."""
    x, entry = source.operand(0), ACTIVATIONS[source.node.op_type]
    source.give(0, pointwise(source, entry, x, source.node))


def pointwise(source: Source, entry: Activation, x: ir.Value, node: ir.Node) -> ir.Value:
    """Write an activation of the table, with the attributes of a node."""
    given = _attributes(entry, node)
    if source.is_float32(x):
        spec = OpSpec((entry.name,), "Pointwise")
        return source.own(spec, {"x": x}, {"y": _dims(source, x)}, given)["y"]
    return formula(source, entry.value, given, z=x)


def activation_grad(source: Source) -> None:
    """Write the gradient of an activation of the table, which reads x as ours does."""
    dy, x, entry = source.operand(0), source.operand(1), GRADIENTS[source.node.op_type]
    source.give(0, pointwise_grad(source, entry, dy, x, source.node))


def pointwise_grad(source: Source, entry: Activation, dy: ir.Value, x: ir.Value, node: ir.Node) -> ir.Value:
    """Write the gradient of an activation of the table at x, with the attributes of a node."""
    given = _attributes(entry, node)
    if source.is_float32(dy, x):
        spec = OpSpec((), "PointwiseGrad", (f"{entry.name}Grad",))
        return source.own(spec, {"dy": dy, "x": x}, {"dx": _dims(source, x)}, given)["dx"]
    return formula(source, entry.gradient, given, z=x, d=dy)


def _dims(source: Source, value: ir.Value) -> Any:
    return None if value.shape is None else source.dims(value)


def _attributes(entry: Activation, node: ir.Node) -> dict[str, float]:
    return {name: float(attribute_of(node, name, default)) for name, default in entry.defaults}


def formula(source: Source, expression: Expression, attributes: dict[str, float], **variables: ir.Value) -> ir.Value:
    """Write a formula in standard nodes, of the element type of its variables."""
    like = next(iter(variables.values()))

    def leaf(part: Expression) -> ir.Value:
        if part.operation == "variable":
            return variables[part.name]
        value = attributes[part.name] if part.operation == "attribute" else part.constant
        return source.number(value, like, part.name or "number")

    def write(op_type: str, *operands: ir.Value) -> ir.Value:
        dtype = ir.DataType.BOOL if op_type in COMPARISONS else source.dtype(like)
        shape = source.broadcast(*operands)
        return source.node_of(op_type, operands, [(shape, dtype)])[0]

    algebra: dict[str, Callable[..., ir.Value]] = {
        name: functools.partial(write, op_type) for name, op_type in OPERATORS.items()
    }
    algebra["fma"] = lambda x, y, z: write("Add", write("Mul", x, y), z)
    found = interpret(expression, algebra, leaf)
    assert isinstance(found, ir.Value)
    return found


# Gradients that read the activation's result


def from_result(name: str, otherwise: Callable[[Source, ir.Value, ir.Value], ir.Value]) -> Callable[[Source], None]:
    """Make the conversion of a gradient of y: ours at y's operand where the table has the activation."""

    def conversion(source: Source) -> None:
        dy, y = source.operand(0), source.operand(1)
        forward, entry = y.producer(), ACTIVATIONS.get(name)
        if forward is not None and forward.op_type == name and entry is not None and not forward.domain:
            x = forward.inputs[0]
            assert x is not None
            source.give(0, pointwise_grad(source, entry, dy, x, forward))
        else:
            source.give(0, otherwise(source, dy, y))

    return conversion


def sigmoid_grad(source: Source, dy: ir.Value, y: ir.Value) -> ir.Value:
    """Write dy*y*(1 - y)."""
    rest = source.calculate("Sub", source.number(1.0, y, "one"), y)
    return source.calculate("Mul", source.calculate("Mul", dy, y), rest)


def tanh_grad(source: Source, dy: ir.Value, y: ir.Value) -> ir.Value:
    """Write dy*(1 - y*y)."""
    rest = source.calculate("Sub", source.number(1.0, y, "one"), source.calculate("Mul", y, y))
    return source.calculate("Mul", dy, rest)


def leaky_relu_grad(source: Source, dy: ir.Value, y: ir.Value) -> ir.Value:
    """Write dy where y > 0, and alpha*dy elsewhere: y has the sign of x."""
    alpha = source.number(float(source.attribute("alpha", 0.01)), y, "alpha")
    above = source.compare("Greater", y, source.number(0.0, y, "zero"))
    return source.where(above, dy, source.calculate("Mul", alpha, dy))


# Gelu, which onnxruntime has in several forms


def gelu(source: Source) -> None:
    """Gelu(x): x*Phi(x), the exact one."""
    source.give(0, exact_gelu(source, source.operand(0)))


def bias_gelu(source: Source) -> None:
    """BiasGelu(x, bias): Gelu(x + bias)."""
    source.give(0, exact_gelu(source, source.calculate("Add", source.operand(0), source.operand(1))))


def exact_gelu(source: Source, x: ir.Value) -> ir.Value:
    """Write x*Phi(x): the standard operator where there is one."""
    if source.opset >= ACTIVATIONS["Gelu"].since:
        return source.op("Gelu", x)
    return pointwise(source, ACTIVATIONS["Gelu"], x, source.node)


def gelu_grad(source: Source) -> None:
    """GeluGrad(dy, x), and BiasGeluGrad_dX(dy, x, bias) at x + bias."""
    dy, x = _with_bias(source)
    source.give(0, pointwise_grad(source, ACTIVATIONS["Gelu"], dy, x, source.node))


def _with_bias(source: Source) -> tuple[ir.Value, ir.Value]:
    dy, x, bias = source.operand(0), source.operand(1), source.optional(2)
    return dy, x if bias is None else source.calculate("Add", x, bias)


def fast_gelu(source: Source) -> None:
    """FastGelu(x, bias): the approximation by tanh, of x plus the bias if there is one."""
    x, bias = source.operand(0), source.optional(1)
    x = x if bias is None else source.calculate("Add", x, bias)
    if source.opset >= ACTIVATIONS["GeluTanh"].since:
        source.give(0, source.op("Gelu", x, approximate="tanh"))
    else:
        source.give(0, pointwise(source, ACTIVATIONS["GeluTanh"], x, source.node))


def fast_gelu_grad(source: Source) -> None:
    """FastGeluGrad(dy, x), and BiasFastGeluGrad_dX(dy, x, bias) at x + bias."""
    dy, x = _with_bias(source)
    source.give(0, pointwise_grad(source, ACTIVATIONS["GeluTanh"], dy, x, source.node))


# The gradient of a Clip, which the builder writes in standard nodes


def clip_gradient(source: Source) -> bool:
    """Mul(dy, Cast(And(x >= min, x <= max))), or with one bound: ours. Gives whether it was that."""
    dy, mask = source.optional(0), source.optional(1)
    cast = _only_read(mask, source.node)
    if dy is None or cast is None or cast.op_type != "Cast":
        return False
    inner = _only_read(cast.inputs[0], cast)
    if inner is None:
        return False
    tests = [_only_read(value, inner) for value in inner.inputs] if inner.op_type == "And" else [inner]
    bounds: dict[str, np.ndarray | None] = {"GreaterOrEqual": None, "LessOrEqual": None}
    x: ir.Value | None = None
    for test in tests:
        if test is None or test.op_type not in bounds or (x is not None and test.inputs[0] is not x):
            return False
        x, bounds[test.op_type] = test.inputs[0], source.known(test.inputs[1])
        if bounds[test.op_type] is None:
            return False
    if x is None or not source.is_float32(dy, x) or x.shape is None or dy.shape is None or dy.shape != x.shape:
        return False
    given = dict(ACTIVATIONS["Clip"].defaults)
    for name, value in zip(given, bounds.values(), strict=True):
        given[name] = given[name] if value is None else float(value.item())
    spec = OpSpec((), "PointwiseGrad", ("ClipGrad",))
    source.give(0, source.own(spec, {"dy": dy, "x": x}, {"dx": source.dims(x)}, given)["dx"])
    source.finish()
    for node in (cast, inner, *(test for test in tests if test is not None and test is not inner)):
        source.graph.remove(node, safe=True)
    return True


def _only_read(value: ir.Value | None, reader: ir.Node) -> ir.Node | None:
    """Find the node that gives a value which one node alone reads, once."""
    if value is None or value.is_graph_output():
        return None
    uses = list(value.uses())
    return value.producer() if len(uses) == 1 and uses[0].node is reader else None


CONVERSIONS = {
    "QuickGelu": activation,
    "Gelu": gelu,
    **dict.fromkeys(("ReluGrad", "QuickGeluGrad"), activation_grad),
    "SigmoidGrad": from_result("Sigmoid", sigmoid_grad),
    "TanhGrad": from_result("Tanh", tanh_grad),
    "LeakyReluGrad": from_result("LeakyRelu", leaky_relu_grad),
    **dict.fromkeys(("GeluGrad", "BiasGeluGrad_dX"), gelu_grad),
    **dict.fromkeys(("FastGeluGrad", "BiasFastGeluGrad_dX"), fast_gelu_grad),
    "FastGelu": fast_gelu,
    "BiasGelu": bias_gelu,
}
