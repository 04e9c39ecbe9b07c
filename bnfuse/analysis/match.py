"""Which node of one graph is which node of another.

Nodes are the same when they have the same operator and, in this order: the same name; the same first output;
the same structure, that is, equal attributes and inputs that are the same all the way up to the graph inputs.
What is left in `after` was added and names its sources in its metadata; what is left in `before` was removed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import onnx_ir as ir

SOURCES = "bnfuse.sources"
PASS = "bnfuse.pass"


@dataclasses.dataclass(frozen=True)
class Match:
    """Pairs (before, after) in the order of `after`, and the nodes that have no partner."""

    pairs: tuple[tuple[ir.Node, ir.Node], ...]
    removed: tuple[ir.Node, ...]
    added: tuple[ir.Node, ...]


def match_nodes(before: ir.Graph, after: ir.Graph) -> Match:
    """Pair the nodes of two graphs: by name, by first result, by what stands above them."""
    partner: dict[ir.Node, ir.Node] = {}  # after -> before
    for key in (by_name, by_first_output):
        pair_up(before, after, key, partner)
    keys_before, keys_after = structure_keys(before), structure_keys(after)
    pair_up(before, after, lambda node: (keys_before if node in keys_before else keys_after)[node], partner)
    taken = set(partner.values())
    return Match(
        pairs=tuple((partner[node], node) for node in after if node in partner),
        removed=tuple(node for node in before if node not in taken),
        added=tuple(node for node in after if node not in partner),
    )


def pair_up(
    before: Iterable[ir.Node],
    after: Iterable[ir.Node],
    key: Callable[[ir.Node], Hashable],
    partner: dict[ir.Node, ir.Node],
) -> None:
    """Pair the nodes that have no partner yet and equal keys, in order; a key of None pairs with nothing."""
    taken = set(partner.values())
    waiting: dict[Hashable, list[ir.Node]] = defaultdict(list)
    for node in before:
        if node not in taken and key(node) is not None:
            waiting[key(node)].append(node)
    for node in after:
        if node not in partner and waiting.get(key(node)):
            partner[node] = waiting[key(node)].pop(0)


def by_name(node: ir.Node) -> Hashable:
    """Give the key under which a node has its like by name; None for one without a name."""
    return (node.domain, node.op_type, node.name) if node.name else None


def by_first_output(node: ir.Node) -> Hashable:
    """Give the key under which a node has its like by its first result; None for one without results."""
    names = [value.name for value in node.outputs if value.name]
    return (node.domain, node.op_type, names[0]) if names else None


def structure_keys(graph: ir.Graph) -> dict[ir.Node, str]:
    """Digest, for each node, its operator, attributes and, through its inputs, everything above it."""
    keys: dict[ir.Node, str] = {}
    for node in graph:
        parts = [node.domain, node.op_type, repr(attributes(node))]
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is None or producer not in keys:
                parts.append(value.name or "" if value is not None else "")
            else:
                parts.append(f"{keys[producer]}:{value.index()}")  # type: ignore[union-attr]
        keys[node] = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return keys


def attributes(node: ir.Node) -> dict[str, Any]:
    """Give the attributes as plain values, by name; a tensor as its dtype, shape and digest."""
    return {name: plain(attr) for name, attr in sorted(node.attributes.items())}


def plain(attr: ir.Attr) -> Any:
    """Give the value of an attribute as what compares by its content."""
    if attr.is_ref():
        return f"@{attr.ref_attr_name}"
    value = attr.value
    if attr.type == ir.AttributeType.TENSOR:
        digest = hashlib.sha256(value.tobytes()).hexdigest()[:16]
        return f"{value.dtype}{list(value.shape)} {digest}"
    return list(value) if isinstance(value, tuple | list) else value


def sources(node: ir.Node) -> tuple[str, ...]:
    """List the names of the source nodes that a pass made this node of."""
    text = node.metadata_props.get(SOURCES)
    return tuple(json.loads(text)) if text else ()


def maker(node: ir.Node) -> str | None:
    """Give the pass that made the node."""
    return node.metadata_props.get(PASS)


def label(node: ir.Node) -> str:
    """Give the node's name, or what else tells it from the others."""
    return node.name or f"{node.op_type}->{next((v.name for v in node.outputs if v.name), '?')}"
