"""Frozen BatchNormalizations in the convolutions before them: no map is swept for them, forward or backward.

    y = Conv(x, w, c)                                  a = scale / sqrt(variance + epsilon)
    z = BatchNormalization(y, scale, bias,      ->     z = Conv(x, a*w, bias + a*(c - mean))
                           mean, variance)

What is left is arithmetic of the size of weights; the gradients at w, scale and bias follow from it. A convolution
stays where something else reads y, and where w is fixed and the scale is trained: the scale's gradient would
need that of the weight, which costs more than a sweep.
"""

from __future__ import annotations

import onnx

from .writer import Surroundings, Writer


def fold_frozen(around: Surroundings, fixed: frozenset[str]) -> list[onnx.NodeProto] | None:
    """Give the nodes anew, None where there is nothing to fold. `fixed` are variables that no step changes."""
    makers, consumers = around.forward.producers(), around.forward.consumers()
    outputs = around.forward.output_names()
    nodes: list[onnx.NodeProto] = []
    gone: set[str] = set()
    for node in around.forward.graph.node:
        conv = makers.get(node.input[0]) if _is_frozen(node) else None
        if conv is None or conv.op_type != "Conv" or conv.domain or conv.output[0] in outputs:
            nodes.append(node)
            continue
        weight, scale = conv.input[1], node.input[1]
        is_trained = scale in around.variables and scale not in fixed
        if len(consumers[conv.output[0]]) > 1 or (weight in fixed and is_trained):
            nodes.append(node)
            continue
        gone.add(conv.output[0])
        nodes += _folded(around, conv, node)
    return [node for node in nodes if not gone.intersection(node.output)] if gone else None


def _is_frozen(node: onnx.NodeProto) -> bool:
    trains = any(attribute.name == "training_mode" and attribute.i for attribute in node.attribute)
    return node.op_type == "BatchNormalization" and not node.domain and not trains


def _folded(around: Surroundings, conv: onnx.NodeProto, norm: onnx.NodeProto) -> list[onnx.NodeProto]:
    write = Writer(around, norm)
    _, scale, bias, mean, variance = norm.input
    weight = conv.input[1]
    shape = write.shape(weight)
    epsilon = write.number("epsilon", float(write.given.get("epsilon", 1e-5)))
    a = write.add("Div", [scale, write.add("Sqrt", [write.add("Add", [variance, epsilon])])])
    scaled = write.add("Mul", [weight, write.reshape(a, [shape[0], *[1] * (len(shape) - 1)])])
    centre = write.add("Sub", [mean, conv.input[2]]) if len(conv.input) > 2 and conv.input[2] else mean
    shift = write.add("Sub", [bias, write.add("Mul", [centre, a])])
    folded = onnx.NodeProto()
    folded.CopyFrom(conv)
    del folded.input[1:], folded.output[:]
    folded.input.extend([scaled, shift])
    folded.output.append(norm.output[0])
    return [*write.nodes, folded]
