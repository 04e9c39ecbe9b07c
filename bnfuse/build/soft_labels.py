"""SoftmaxCrossEntropyLoss of probabilities, which torch's exporter writes though ONNX has it for classes alone.

    SoftmaxCrossEntropyLoss(scores, probabilities)   to   -sum over the classes of weights * probabilities * log p

The mean is over samples and places, as torch has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bnfuse.graph.protos import attributes, fresh, typed_values, without_large_values

from .forward import FLOATS, element_types
from .graph import Forward

OP = "SoftmaxCrossEntropyLoss"


def write_soft_labels(forward: Forward) -> None:
    """Write each such loss by other operators; the opset must be 13 or later."""
    if not any(node.op_type == OP for node in forward.graph.node):
        return
    inferred = onnx.shape_inference.infer_shapes(without_large_values(forward.model)).graph
    types = element_types(inferred)
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in typed_values(inferred)}
    taken = forward.names() | {node.name for node in forward.graph.node}
    nodes: list[onnx.NodeProto] = []
    written = 0
    for node in forward.graph.node:
        if node.op_type == OP and types.get(node.input[1]) in FLOATS:
            nodes += _Written(forward, node, taken).loss(max(ranks.get(node.input[1], 2), 2))
            written += 1
        else:
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    if written:
        del forward.graph.node[:]
        forward.graph.node.extend(nodes)
        forward.note(f"wrote {written} {OP} of probabilities by other operators: ONNX has it for classes alone")


class _Written:
    """The nodes of one loss under construction."""

    def __init__(self, forward: Forward, node: onnx.NodeProto, taken: set[str]) -> None:
        self.forward, self.node, self.taken = forward, node, taken
        self.nodes: list[onnx.NodeProto] = []

    def loss(self, rank: int) -> list[onnx.NodeProto]:
        """Give the nodes; labels are of this rank."""
        scores, labels, *weights = self.node.input
        log_prob = self.node.output[1] if len(self.node.output) > 1 and self.node.output[1] else None
        product = self.emit("Mul", labels, self.emit("LogSoftmax", scores, result=log_prob, axis=1))
        if weights and weights[0]:
            behind = list(range(1, rank - 1))
            aligned = self.emit("Unsqueeze", weights[0], self.constant(behind)) if behind else weights[0]
            product = self.emit("Mul", product, aligned)
        own = self.emit("ReduceSum", product, self.constant([1]), keepdims=0)
        reduction = attributes(self.node).get("reduction", "mean")
        if reduction != "none":
            own = self.emit("ReduceMean" if reduction == "mean" else "ReduceSum", own, keepdims=0)
        self.emit("Neg", own, result=self.node.output[0])
        return self.nodes

    def named(self, name: str) -> str:
        """Give a name below the node's own."""
        found = fresh(f"{self.node.name}/{name}", self.taken)
        self.taken.add(found)
        return found

    def constant(self, values: list[int]) -> str:
        """Add a constant of integers."""
        name = self.named("constant")
        self.forward.graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def emit(self, op: str, *operands: str, result: str | None = None, **given: Any) -> str:
        """Add a node; gives its result."""
        name = self.named(op.lower())
        self.nodes.append(helper.make_node(op, operands, [result or name], name=name, **given))
        return result or name
