"""A forward graph (gs.Graph, shapes only) layer by layer, and its backward pass by rules.

FLOPs: the weight's gradient is as much work as the forward, and so is the input's, where anything before the layer is
trained: twice the forward, once for the first layer ([Iandola16], section 4.3.3). Sweeps: those of the nodes that the
gradient rules emit for the layer (BACKWARD), and of the sum over the gradients of a tensor with several readers. Both
agree with the training graph's own count (test_inspect.py); what it stores besides the layers'
outputs (indices of a max pooling, masks of dropout, the loss) is in its sweeps, and not in the sizes here.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import onnx_graphsurgeon as gs

from bnfuse.analysis.work import POOLS
from bnfuse.inspecting.result import Inspection, Layer
from bnfuse.models.count import node_flops, parameters_of

FLOAT, INDEX, MASK = 4, 8, 1  # bytes an element
TYPES = {"float32": "float", "int64": "int64", "int32": "int32"}  # as ONNX names them
DENSE = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclasses.dataclass
class Flow:
    """Feature maps touched, once each: their number and bytes."""

    sweeps: int = 0
    bytes: int = 0

    def touch(self, shape: list[int], *element_bytes: int) -> None:
        """Count the map of `shape` once for each of the types, where it is one: rank 4 and more."""
        if len(shape) >= 4:
            self.sweeps += len(element_bytes)
            self.bytes += math.prod(shape) * sum(element_bytes)


def inspect_network(graph: gs.Graph) -> Inspection:
    """Count a network of the zoo. The graph's first input is its data, with the batch as first dimension."""
    data = graph.inputs[0]
    needs = gradients_needed(graph)
    readers = Counter(x.name for node in graph.nodes for x in node.inputs if x.name in needs)
    counted: set[str] = set()
    rows = []
    for node in graph.nodes:
        mine = {p.name: p for p in parameters_of(node) if p.name not in counted}  # shared ones count once
        counted |= {*mine}
        x, y = maps_read(node), node.outputs[0]
        forward, backward = forward_flow(node), backward_flow(node, needs)
        norm = node.op == "BatchNormalization"
        norm_flow = (forward.sweeps + backward.sweeps, forward.bytes + backward.bytes) if norm else (0, 0)
        if readers[y.name] > 1:  # the sum over its gradients is no BatchNorm's
            backward.touch(y.shape, *[FLOAT] * (readers[y.name] + 1))
        work = node_flops(node)
        row = Layer(
            name=node.name,
            op=node.op,
            output_shape=tuple(y.shape),
            output_bytes=math.prod(y.shape) * FLOAT,
            parameters=sum(math.prod(p.shape) for p in mine.values()),
            parameter_bytes=sum(math.prod(p.shape) * FLOAT for p in mine.values()),
            flops_forward=work,
            flops_backward=work * gradients_of_work(node, needs),
            input_bytes=sum(math.prod(v.shape) * FLOAT for v in x),
            sweeps_forward=forward.sweeps,
            sweeps_backward=backward.sweeps,
            moved_bytes_forward=forward.bytes,
            moved_bytes_backward=backward.bytes,
            batch_norm_sweeps=norm_flow[0],
            batch_norm_bytes=norm_flow[1],
            kernel_shape=kernel_shape(node),
            strides=tuple(node.attrs.get("strides", ())),
        )
        rows.append(row)
    inputs = {x.name: f"{TYPES.get(np.dtype(x.dtype).name, x.dtype)}{x.shape}" for x in graph.inputs}
    return Inspection(graph.name, tuple(rows), inputs, data.shape[0], "by rule from the forward graph")


def maps_read(node: gs.Node) -> list[gs.Variable]:
    """List the operands of a node that are computed or given, and have a shape."""
    return [x for x in node.inputs if isinstance(x, gs.Variable) and x.shape is not None]


def gradients_needed(graph: gs.Graph) -> set[str]:
    """List the tensors that depend on a parameter."""
    needs: set[str] = set()
    for node in graph.nodes:
        if parameters_of(node) or any(x.name in needs for x in node.inputs):
            needs |= {y.name for y in node.outputs}
    return needs


def gradients_of_work(node: gs.Node, needs: set[str]) -> int:
    """Tell how many gradients are as much work as the layer itself: of its operands, or a pooling's input."""
    operands = node.inputs[:2] if node.op in DENSE else node.inputs[:1] if node.op in POOLS else []
    return sum(x.name in needs or any(x is p for p in parameters_of(node)) for x in operands)


def kernel_shape(node: gs.Node) -> tuple[int, ...]:
    """Give the window of a node; () where it has none."""
    if node.op == "GlobalAveragePool":
        return tuple(node.inputs[0].shape[2:])
    return tuple(node.attrs.get("kernel_shape", ()))


def forward_flow(node: gs.Node) -> Flow:
    """Count the maps that a node reads and writes."""
    flow = Flow()
    for x in maps_read(node):
        flow.touch(x.shape, FLOAT)
    flow.touch(node.outputs[0].shape, FLOAT, *STORED.get(node.op, ()))
    return flow


# what a layer of a training graph stores besides its output, by element of it
STORED = {"MaxPool": (INDEX,), "Dropout": (MASK,)}
# what its gradient touches, by element of the output's gradient and of the input's
BACKWARD: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "Relu": ((FLOAT, FLOAT), (FLOAT,)),  # dy and the sign's map; dx
    "BatchNormalization": ((FLOAT,), (FLOAT, FLOAT)),  # dy; x, dx
    "Dropout": ((FLOAT, FLOAT, MASK, FLOAT), (FLOAT,)),  # scaled (read, written), then where the mask kept it
    "MaxPool": ((FLOAT, INDEX), (FLOAT,)),
    "AveragePool": ((FLOAT,), (FLOAT,)),
    "GlobalAveragePool": ((FLOAT,), (FLOAT,)),
    "Flatten": ((FLOAT,), (FLOAT,)),
    "Concat": ((FLOAT,), (FLOAT,)),  # dy read, each dx written
    "Add": ((), ()),  # dy is that of each operand
    "Conv": ((FLOAT,), (FLOAT,)),  # dy; dx, where it is needed; and x, always
}
ELEMENTWISE = ((FLOAT, FLOAT), (FLOAT,))  # of any other operator: dy, what its slope needs; dx


def backward_flow(node: gs.Node, needs: set[str]) -> Flow:
    """Count the maps that the gradient of a node reads and writes, where `needs` has a gradient of its result."""
    flow = Flow()
    if node.outputs[0].name not in needs or (node.op == "Concat" and len(node.inputs) == 1):
        return flow
    by_output, by_input = BACKWARD.get(node.op, ELEMENTWISE)
    flow.touch(node.outputs[0].shape, *by_output)
    for x in maps_read(node):
        if node.op == "Conv":
            flow.touch(x.shape, FLOAT)
        if x.name in needs:
            flow.touch(x.shape, *by_input)
    return flow
