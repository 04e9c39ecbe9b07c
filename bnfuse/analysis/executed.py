"""What of a training graph computes when a step runs, and whether its sizes are known."""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.core.errors import at_node
from bnfuse.graph.drawing import draws
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.opset.spec import DOMAIN
from bnfuse.opset.traffic import SHAPE_READERS


def executed(graph: ir.Graph) -> tuple[list[ir.Node], set[ir.Value]]:
    """Give the nodes that compute when a step runs, and the values that are known before: constants, and what is made
    of shapes and constants alone."""
    inputs = {value.name for value in graph.inputs}
    constants = {value for name, value in graph.initializers.items() if name not in inputs}
    nodes = []
    for node in graph:
        known = node.op_type in SHAPE_READERS or all(v is None or not v.name or v in constants for v in node.inputs)
        if known and node.domain != DOMAIN and not draws(node):
            constants.update(node.outputs)
        else:
            nodes.append(node)
    return nodes, constants


def require_fixed_shapes(graph: TrainingGraph) -> None:
    """Raise where the size of what a step reads or writes is not known: its bytes and work could not be told."""
    graph.shape_of(graph.signature.data[0])
    nodes, constants = executed(graph.model.graph)
    for node in nodes:
        for value in (*node.inputs, *node.outputs):
            if value is None or not value.name or value in constants or value.name == graph.signature.loss:
                continue
            if value.shape is None or not all(isinstance(size, int) for size in value.shape):
                what = f"has '{value.name}' of no fixed shape ({value.shape or 'unknown'})"
                raise at_node(node.name or "", node.op_type, f"{what}. Build the graph with --batch.", file=graph.name)
