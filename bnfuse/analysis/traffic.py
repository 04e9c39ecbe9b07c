"""Feature maps read and written by a graph: in bytes at their stored dtypes, and in sweeps.

A sweep is one feature map read or written once by one node. Every operand of every node counts, those of Concat and
Accumulate included. What our runtime does with views alone (the slots of a Concat, a Reshape) is counted too, and
reported apart as `aliased`.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from bnfuse.analysis.ancestors import forward_nodes
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.graph.values import static_shape
from bnfuse.opset.spec import DOMAIN
from bnfuse.opset.traffic import RESHAPES, Touched, maps_touched

VIEWS = ("Concat", "Split", *RESHAPES)


@dataclasses.dataclass(frozen=True)
class Flow:
    """Bytes and sweeps, and how many of them a runtime aliases away."""

    bytes: int = 0
    sweeps: int = 0
    aliased_bytes: int = 0
    aliased_sweeps: int = 0

    def __add__(self, other: Flow) -> Flow:
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return Flow(*(a + b for a, b in zip(mine, others, strict=True)))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What the two directions of a graph move."""

    forward: Flow
    backward: Flow

    @property
    def total(self) -> Flow:
        """Both directions together."""
        return self.forward + self.backward


def graph_traffic(graph: TrainingGraph) -> Traffic:
    """Sum the feature-map traffic of all nodes of the forward and of the backward graph."""
    forward = forward_nodes(graph.model.graph, graph.signature)
    flows = {True: Flow(), False: Flow()}
    for node in graph.model.graph:
        read, written = node_maps(node, graph)
        flows[node in forward] += flow_of(node, read + written)
    return Traffic(flows[True], flows[False])


def node_maps(node: ir.Node, graph: TrainingGraph) -> tuple[Touched, Touched]:
    """Give the feature maps that a node reads and writes. A result that nobody reads is not stored."""
    rows = graph.batch + sum(graph.shape_of(name)[0] for name in graph.signature.virtual)
    read, written = maps_touched(node, static_shape, batch=rows)
    return read, [(value, size) for value, size in written if value.uses() or value.is_graph_output()]


def flow_of(node: ir.Node, touched: Touched) -> Flow:
    """Sum what one node reads and writes; of a view all of it is aliased."""
    size = sum(bytes_touched for _, bytes_touched in touched)
    if node.op_type in VIEWS and node.domain != DOMAIN:
        return Flow(size, len(touched), size, len(touched))
    return Flow(size, len(touched))
