"""Biases that a BatchNorm subtracts again: their gradients are zero but for rounding.

Such a gradient is a sum whose terms cancel, so what is left of it is no yardstick for an error. It is measured by the
gradient of the weight or scale beside it, a sum of the same terms times what the operator reads.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.opset.spec import DOMAIN

BIASED = {("", "Conv"), ("", "ConvTranspose"), ("", "Gemm"), (DOMAIN, "BatchNorm")}  # operand 1 scales, 2 is the bias
SHIFTED = ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Add", "Sum", "Sub", "Concat")


def yardsticks(graph: TrainingGraph) -> dict[str, str]:
    """Give, by the gradient of each bias that comes to nothing but BatchNorms, the gradient of its weight or scale."""
    gradients, forward = graph.signature.gradients, forward_nodes(graph)
    found = {}
    for node in forward:
        if (node.domain, node.op_type) not in BIASED or len(node.inputs) < 3:
            continue
        weight, bias = (value.name if value is not None else None for value in node.inputs[1:3])
        if weight in gradients and bias in gradients and is_cancelled(node.outputs[0], forward):
            found[gradients[bias]] = gradients[weight]
    return found


def forward_nodes(graph: TrainingGraph) -> set[ir.Node]:
    """Find the nodes that the loss, or what the graph gives in its place, is computed by."""
    wanted = [value for value in graph.model.graph.outputs if value.name in {*graph.signature.results}]
    found: set[ir.Node] = set()
    while wanted:
        node = wanted.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            wanted += [value for value in node.inputs if value is not None]
    return found


def is_cancelled(value: ir.Value, forward: set[ir.Node]) -> bool:
    """Tell whether a constant added to a channel of the map changes nothing: each way from it to the loss leads, as a
    constant added to channels, to a BatchNorm in training or an InstanceNorm."""
    pending, seen = [value], {value}
    while pending:
        shifted = pending.pop()
        readers = [node for node in shifted.consumers() if node in forward]
        if not readers:
            return False
        for node in readers:
            if node.domain == DOMAIN and (node.op_type.startswith("BatchNorm") or is_instance_norm(node)):
                continue
            if not keeps_shifts(node, shifted):
                return False
            if node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                pending.append(node.outputs[0])
    return True


def is_instance_norm(node: ir.Node) -> bool:
    """Tell whether a node is a GroupNorm whose groups have a channel each: it takes out a channel's mean."""
    scale = node.inputs[1] if node.op_type == "GroupNorm" else None
    return scale is not None and scale.shape is not None and node.attributes["groups"].as_int() == scale.shape[0]


def keeps_shifts(node: ir.Node, value: ir.Value) -> bool:
    """Tell whether a constant added to channels of the operand is one added to channels of the result."""
    if node.domain:
        return False
    if node.op_type != "Conv":
        return node.op_type in SHIFTED
    pads, how = node.attributes.get("pads"), node.attributes.get("auto_pad")
    return (
        node.inputs[0] is value
        and not any(pads.as_ints() if pads is not None else ())
        and (how is None or how.as_string() in ("NOTSET", "VALID"))
    )
