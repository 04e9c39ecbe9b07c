"""Parameters and floating-point operations of a forward graph, from its shapes.

A multiplication with its addition counts as two operations ([Iandola16], section 4.4). Counted are convolutions and
matrix products without their bias, and poolings, one operation for each element of each window (its table 4.2);
what works element by element (BN, ReLU, Add) is not counted.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx
import onnx_graphsurgeon as gs


@dataclasses.dataclass(frozen=True)
class Counts:
    """`parameters` trained values (running statistics are none); `flops` of the whole batch, forward."""

    parameters: int
    flops: int
    batch: int

    @property
    def flops_per_image(self) -> int:
        """Give the operations of one image of the batch."""
        return self.flops // self.batch


def count(source: gs.Graph | onnx.ModelProto) -> Counts:
    """Give counts of a forward graph whose tensors have static shapes (in a ModelProto: value_info)."""
    graph = source if isinstance(source, gs.Graph) else gs.import_onnx(source)
    return Counts(count_parameters(graph), sum(node_flops(node) for node in graph.nodes), graph.inputs[0].shape[0])


def count_parameters(graph: gs.Graph) -> int:
    """Trained values, those that several nodes share once."""
    found = {parameter.name: parameter for node in graph.nodes for parameter in parameters_of(node)}
    return sum(math.prod(parameter.shape) for parameter in found.values())


def parameters_of(node: gs.Node) -> list[gs.Constant]:
    """Trained values: float constants of rank 1 and more, without running statistics."""
    running = node.inputs[3:5] if node.op == "BatchNormalization" else []
    return [
        p
        for p in node.inputs
        if isinstance(p, gs.Constant) and p.dtype == np.float32 and len(p.shape) and all(p is not r for r in running)
    ]


def node_flops(node: gs.Node) -> int:
    """Count the operations of a node, a multiplication with its addition as two."""
    out = math.prod(node.outputs[0].shape)
    if node.op == "Conv":
        return 2 * out * math.prod(node.inputs[1].shape[1:])
    if node.op == "Gemm":
        return 2 * out * node.inputs[0].shape[0 if node.attrs.get("transA") else 1]
    if node.op == "Einsum":
        return 2 * einsum_points(node)
    if node.op == "MatMul":
        return 2 * out * node.inputs[0].shape[-1]
    if node.op in ("MaxPool", "AveragePool"):
        return out * math.prod(node.attrs["kernel_shape"])
    if node.op == "GlobalAveragePool":
        return math.prod(node.inputs[0].shape)
    return 0


def einsum_points(node: gs.Node) -> int:
    """Multiplications: every combination of the letters of both operands."""
    terms = node.attrs["equation"].split("->")[0].split(",")
    sizes = {
        axis: size for term, x in zip(terms, node.inputs, strict=True) for axis, size in zip(term, x.shape, strict=True)
    }
    return math.prod(sizes.values())
