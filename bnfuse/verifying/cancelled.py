"""Biases that a BatchNorm subtracts again: their gradients are zero but for rounding.

Such a gradient is a sum whose terms cancel, so what is left of it is no yardstick for an error. It is measured by the
gradient of the weight beside it, a sum of the same terms times what the convolution reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.opset.spec import DOMAIN

BIASED = ("Conv", "ConvTranspose", "Gemm")  # operand 1 is the weight, 2 the bias
VIEWS = ("Identity", "Reshape", "Squeeze", "Unsqueeze")


def yardsticks(graph: TrainingGraph) -> dict[str, str]:
    """Give, by the gradient of each bias that nothing but BatchNorms follows, the gradient of its weight."""
    gradients = graph.signature.gradients
    found = {}
    for node in graph.model.graph:
        if node.domain or node.op_type not in BIASED or len(node.inputs) < 3:
            continue
        weight, bias = (value.name if value is not None else None for value in node.inputs[1:3])
        readers = list(readers_of(node.outputs[0]))
        if weight in gradients and bias in gradients and readers and all(map(subtracts_the_mean, readers)):
            found[gradients[bias]] = gradients[weight]
    return found


def readers_of(value: ir.Value) -> Iterator[ir.Node | None]:
    """Give what reads the value, through views; None where it is a result of the graph."""
    if value.is_graph_output():
        yield None
    for node in value.consumers():
        if node.op_type in VIEWS and node.inputs[0] is value:
            yield from readers_of(node.outputs[0])
        else:
            yield node


def subtracts_the_mean(node: ir.Node | None) -> bool:
    """Tell whether it is a BatchNorm in training, whole or a half, forward or backward."""
    return node is not None and node.domain == DOMAIN and node.op_type.startswith("BatchNorm")
