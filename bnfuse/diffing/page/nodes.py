"""The nodes of one graph as the page shows them: plain data, each node by its index in the graph's order."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir

from bnfuse.analysis import match
from bnfuse.analysis.ancestors import forward_nodes
from bnfuse.analysis.traffic import flow_of, node_maps
from bnfuse.graph.training_graph import TrainingGraph


@dataclasses.dataclass(frozen=True)
class Input:
    """A value that a node reads. `producer` is the index of the node that writes it, None for what the graph is given.

    `bytes`: what is read of it, where it is a feature map; 0 otherwise.
    """

    name: str
    producer: int | None
    bytes: int


@dataclasses.dataclass(frozen=True)
class Output:
    """A result of a node."""

    name: str
    type: str  # "float32[16,64,56,56]", or "" where it is not known


@dataclasses.dataclass(frozen=True)
class Node:
    """`key` is unique within the graph: the label, and a number after it where several nodes share one.

    `sources` are the labels of the nodes that a pass made it of. `sweeps`, `bytes`: feature maps read and written.
    """

    key: str
    label: str
    op: str
    domain: str
    forward: bool
    made_by: str | None
    sources: tuple[str, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    sweeps: int
    bytes: int


def nodes_of(graph: TrainingGraph) -> tuple[Node, ...]:
    """Describe the nodes of a graph, in their order."""
    order = {node: i for i, node in enumerate(graph.model.graph)}
    forward = forward_nodes(graph.model.graph, graph.signature)
    keys = unique_keys(match.label(node) for node in order)
    return tuple(node_of(node, key, node in forward, order, graph) for node, key in zip(order, keys, strict=True))


def node_of(node: ir.Node, key: str, forward: bool, order: dict[ir.Node, int], graph: TrainingGraph) -> Node:
    """Describe a node: its place, its neighbours, what it reads and writes."""
    read, written = node_maps(node, graph)
    flow = flow_of(node, read + written)
    touched = dict(read)
    return Node(
        key=key,
        label=match.label(node),
        op=node.op_type,
        domain=node.domain,
        forward=forward,
        made_by=match.maker(node),
        sources=match.sources(node),
        inputs=tuple(input_of(value, touched.get(value, 0), order) for value in node.inputs if value is not None),
        outputs=tuple(Output(value.name, type_of(value)) for value in node.outputs if value.name),
        sweeps=flow.sweeps,
        bytes=flow.bytes,
    )


def input_of(value: ir.Value, size: int, order: dict[ir.Node, int]) -> Input:
    """Describe an operand, by the node that gives it and the bytes that are read."""
    producer = value.producer()
    return Input(value.name or "", order.get(producer) if producer is not None else None, size)


def type_of(value: ir.Value) -> str:
    """Write the type of a value: float32[16,64,56,56]; nothing where it is not known."""
    if value.dtype is None or value.shape is None:
        return ""
    return f"{value.dtype.name.lower()}[{','.join(str(dim) for dim in value.shape)}]"


def unique_keys(labels: Iterable[str]) -> list[str]:
    """Count up keys that come again: a, b, a -> a, b, a (2); a name that is already taken is never given twice."""
    labels = list(labels)
    taken, seen = set(labels), Counter[str]()
    keys = []
    for label in labels:
        seen[label] += 1
        key = label
        while seen[label] > 1 and key in taken:
            key = f"{label} ({seen[label]})"
            if key in taken:
                seen[label] += 1
        taken.add(key)
        keys.append(key)
    return keys
