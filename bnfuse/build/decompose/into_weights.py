"""What scales or shifts each channel of a convolution's result goes into its weight and bias.

    y = Conv(x, w)                            y = Conv(x, w, b)
    z = Add(y, b)                     ->      z = y

    y = Conv(x, w, b)
    z = Mul(y, g)                     ->      z = Conv(x, g*w, g*b)

g and b are of the network, one value a channel: a bias that an exporter writes as a sum, a layer scale. The gradients
at w, g and b follow from that of the product. A scale stays where something else reads y, where w is fixed and g is
trained, and where the map has fewer elements than the weight: then a sweep of the map costs less.
"""

from __future__ import annotations

import math

import onnx

from .writer import Surroundings, Writer


def fold_into_weights(around: Surroundings, fixed: frozenset[str]) -> list[onnx.NodeProto] | None:
    """Give the nodes anew, None where there is nothing to fold. `fixed` are variables that no step changes."""
    makers, consumers = around.forward.producers(), around.forward.consumers()
    outputs = around.forward.output_names()
    nodes: list[onnx.NodeProto] = []
    gone: set[str] = set()
    for node in around.forward.graph.node:
        found = _operands(around, node, makers)
        conv = makers.get(found[0]) if found else None
        if found is None or conv is None or found[0] in outputs or len(consumers[found[0]]) > 1:
            nodes.append(node)
            continue
        made = _with_bias(around, conv, node, found[1]) if node.op_type == "Add" else None
        if node.op_type == "Mul" and _is_scaled(around, conv, node, found[1], fixed):
            made = _scaled(around, conv, node, found[1])
        if made is None:
            nodes.append(node)
            continue
        gone.add(found[0])
        nodes += made
        makers[node.output[0]] = made[-1]
    return [node for node in nodes if not gone.intersection(node.output)] if gone else None


def _operands(around: Surroundings, node: onnx.NodeProto, makers: dict[str, onnx.NodeProto]) -> tuple[str, str] | None:
    """Give a convolution's result and what has one value for each of its channels, of a sum or product of both."""
    if node.op_type not in ("Add", "Mul") or node.domain:
        return None
    for y, vector in (tuple(node.input), tuple(reversed(node.input))):
        maker = makers.get(y)
        if maker is None or maker.op_type != "Conv" or maker.domain or vector in around.from_data:
            continue
        map_, shape = around.shapes.get(y), around.shapes.get(vector)
        if map_ is None or shape is None or around.shapes.get(node.output[0]) != map_ or len(map_) != 4:
            continue
        if [1] * (4 - len(shape)) + shape == [1, map_[1], 1, 1]:
            return y, reshaped_from(vector, makers)
    return None


def reshaped_from(name: str, makers: dict[str, onnx.NodeProto]) -> str:
    """Follow a tensor back through Reshapes."""
    while (maker := makers.get(name)) is not None and maker.op_type == "Reshape" and not maker.domain:
        name = maker.input[0]
    return name


def _with_bias(around: Surroundings, conv: onnx.NodeProto, node: onnx.NodeProto, bias: str) -> list[onnx.NodeProto]:
    write = Writer(around, node)
    vector = write.reshape(bias, [math.prod(write.shape(bias))])
    if len(conv.input) > 2 and conv.input[2]:
        vector = write.add("Add", [conv.input[2], vector])
    return [*write.nodes, _anew(conv, conv.input[1], vector, node)]


def _is_scaled(around: Surroundings, conv: onnx.NodeProto, node: onnx.NodeProto, g: str, fixed: frozenset[str]) -> bool:
    weight = around.shapes.get(conv.input[1])
    if weight is None or (conv.input[1] in fixed and g not in fixed):
        return False
    return math.prod(weight) <= math.prod(around.shapes[node.output[0]] or [0])


def _scaled(around: Surroundings, conv: onnx.NodeProto, node: onnx.NodeProto, g: str) -> list[onnx.NodeProto]:
    write = Writer(around, node)
    channels, *rest = write.shape(conv.input[1])
    weight = write.add("Mul", [conv.input[1], write.reshape(g, [channels, *[1] * len(rest)])])
    bias = conv.input[2] if len(conv.input) > 2 else ""
    if bias:
        bias = write.add("Mul", [bias, write.reshape(g, [channels])])
    return [*write.nodes, _anew(conv, weight, bias, node)]


def _anew(conv: onnx.NodeProto, weight: str, bias: str, node: onnx.NodeProto) -> onnx.NodeProto:
    made = onnx.NodeProto()
    made.CopyFrom(conv)
    del made.input[1:], made.output[:]
    made.input.extend([weight, bias] if bias else [weight])
    made.output.append(node.output[0])
    return made
