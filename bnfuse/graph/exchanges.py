"""Exchanges between ranks in a graph (SyncBN): whether there are any, how much they send, and the graph without them.

    m, v = ConvStatistics(..)                                      m, v = ConvStatistics(..)
    M, V = AllReduceMoments(m, v)                     ->
    a, b = BatchNormFinalize(.., M, V)                             a, b = BatchNormFinalize(.., m, v)

A run of one rank has nothing to exchange, and a pass looks at what there is beside exchanges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from bnfuse.core.errors import at_node
from bnfuse.graph.values import static_shape
from bnfuse.opset.spec import DOMAIN

MOMENTS, TERMS = "AllReduceMoments", "AllReduceTerms"
FLOAT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """What a rank sends in a step: how many exchanges, and bytes, of statistics and of sums for their gradient."""

    moments: int = 0
    terms: int = 0
    moment_bytes: int = 0
    term_bytes: int = 0


NOTHING = Exchanged()


def exchanges(graph: ir.Graph) -> Iterator[ir.Node]:
    """List the exchanges between ranks, in the order of the graph."""
    return (node for node in graph if node.domain == DOMAIN and node.op_type in (MOMENTS, TERMS))


def exchanged(graph: ir.Graph) -> Exchanged:
    """Count what the exchanges of a graph send."""
    count, size = dict.fromkeys((MOMENTS, TERMS), 0), dict.fromkeys((MOMENTS, TERMS), 0)
    for node in exchanges(graph):
        count[node.op_type] += 1
        size[node.op_type] += sum((static_shape(value) or (0,))[0] for value in node.outputs) * FLOAT_BYTES
    return Exchanged(count[MOMENTS], count[TERMS], size[MOMENTS], size[TERMS])


def ranks_of(graph: ir.Graph) -> int | None:
    """Tell of how many ranks the statistics are: 0 for all, None where nothing is exchanged.

    Raises BnfuseError where exchanges are of different numbers of ranks, or of less than none.
    """
    found: int | None = None
    for node in exchanges(graph):
        ranks = node.attributes.get_int("ranks", 0)
        if ranks < 0:
            raise at_node(node.name or "?", node.op_type, f"is of {ranks} ranks: rewrite the source graph anew")
        if found is not None and ranks != found:
            what = f"is an exchange of {ranks or 'all'} ranks, and others are of {found or 'all'}"
            raise at_node(node.name or "?", node.op_type, f"{what}: rewrite the source graph anew")
        found = ranks
    return found


def without_exchanges(graph: ir.Graph) -> int:
    """Take the exchanges out of a graph, in place; gives how many there were."""
    found = list(exchanges(graph))
    for node in found:
        if node.op_type == TERMS:
            read_whole_terms(node)
        for result, operand in zip(node.outputs, node.inputs, strict=True):
            if result.is_graph_output() or operand is None:
                what = f"gives '{result.name}', an output of the graph: an exchange is no result of a network"
                raise at_node(node.name or "?", node.op_type, f"{what}. Rewrite the source graph anew")
            result.replace_all_uses_with(operand)
        graph.remove(node, safe=True)
    return len(found)


def read_whole_terms(node: ir.Node) -> None:
    """Let what reads an exchange of some channels read these of the whole terms."""
    start, stop = (node.attributes[name].as_int() for name in ("start", "stop"))
    whole = static_shape(node.inputs[0])
    for reader in {use.node for result in node.outputs for use in result.uses()}:
        if reader.domain == DOMAIN and reader.op_type == "BatchNormGradFinalize":
            for name in ("start", "stop"):
                moved = reader.attributes[name].as_int() + start
                reader.attributes[name] = ir.AttrInt64(name, moved)
        elif start or whole != (stop,):
            what = f"reads channels {start} to {stop} of exchanged terms, as BatchNormGradFinalize alone does"
            raise at_node(reader.name or "?", reader.op_type, f"{what}: rewrite the source graph anew")
