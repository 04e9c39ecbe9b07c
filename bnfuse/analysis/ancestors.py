"""What values are computed from, and which nodes are the forward graph."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from bnfuse.graph.signature import GraphSignature


def ancestors(values: Iterable[ir.Value], stop: Iterable[ir.Value] = ()) -> set[ir.Node]:
    """List the nodes that the values need, not looking beyond `stop`."""
    stop = set(stop)
    found: set[ir.Node] = set()
    pending = [value for value in values if value not in stop]
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            pending += [value for value in node.inputs if value is not None and value not in stop]
    return found


def forward_nodes(graph: ir.Graph, signature: GraphSignature) -> set[ir.Node]:
    """Find the ancestors of the loss, the logits and the running statistics; all other nodes are the backward pass."""
    wanted = {*signature.results, signature.logits, *signature.running.values()}
    return ancestors(value for value in graph.outputs if value.name in wanted)
