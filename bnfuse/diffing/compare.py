"""Two graphs side by side: everything that a `Diff` holds is gathered here."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.analysis import match
from bnfuse.analysis.bound import least_traffic
from bnfuse.analysis.traffic import graph_traffic
from bnfuse.diffing.halves import batch_norm_fates
from bnfuse.diffing.report import Added, Changed, Diff, NameChanges, Removed, Renamed, Rewired
from bnfuse.graph.exchanges import exchanged
from bnfuse.graph.training_graph import TrainingGraph


def diff_graphs(first: TrainingGraph, second: TrainingGraph) -> Diff:
    """Give the differences of two training graphs. Neither is changed."""
    before, after = first.model, second.model
    nodes = match.match_nodes(before.graph, after.graph)
    return Diff(
        added=tuple(added(node) for node in nodes.added),
        removed=removed(nodes, after.graph),
        renamed=tuple(
            Renamed(match.label(b), match.label(a)) for b, a in nodes.pairs if match.label(b) != match.label(a)
        ),
        changed=changed(nodes),
        rewired=rewired(nodes),
        inputs=name_changes(before.graph.inputs, after.graph.inputs),
        outputs=name_changes(before.graph.outputs, after.graph.outputs),
        initializers=initializer_changes(before.graph, after.graph),
        ops_before=op_counts(before.graph),
        ops_after=op_counts(after.graph),
        batch_norms=batch_norm_fates(before.graph, after.graph),
        traffic_before=graph_traffic(first),
        traffic_after=graph_traffic(second),
        least=least_traffic(first),
        exchanged_before=exchanged(before.graph),
        exchanged_after=exchanged(after.graph),
    )


def added(node: ir.Node) -> Added:
    """Describe a node that is in the graph after alone."""
    return Added(match.label(node), node.op_type, node.domain, match.maker(node), match.sources(node))


def removed(nodes: match.Match, after: ir.Graph) -> tuple[Removed, ...]:
    """List the nodes without a partner, each with the nodes of `after` that were made of it."""
    into: dict[str, list[str]] = {}
    for node in after:
        for source in match.sources(node):
            into.setdefault(source, []).append(match.label(node))
    return tuple(
        Removed(match.label(node), node.op_type, node.domain, tuple(into.get(match.label(node), ())))
        for node in nodes.removed
    )


def changed(nodes: match.Match) -> tuple[Changed, ...]:
    """List the nodes whose attributes differ."""
    found = []
    for before, after in nodes.pairs:
        old, new = match.attributes(before), match.attributes(after)
        names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if names:
            found.append(Changed(match.label(after), {name: (old.get(name), new.get(name)) for name in names}))
    return tuple(found)


def rewired(nodes: match.Match) -> tuple[Rewired, ...]:
    """List the matched nodes that read another value than before, by input position."""
    same = {id(a): b for before, after in nodes.pairs for b, a in zip(before.outputs, after.outputs, strict=False)}
    found = []
    for before, after in nodes.pairs:
        edges: dict[int, tuple[str | None, str | None]] = {}
        for i in range(max(len(before.inputs), len(after.inputs))):
            old = before.inputs[i] if i < len(before.inputs) else None
            new = after.inputs[i] if i < len(after.inputs) else None
            if not is_same_value(old, new, same):
                edges[i] = (old.name if old is not None else None, new.name if new is not None else None)
        if edges:
            found.append(Rewired(match.label(after), edges))
    return tuple(found)


def is_same_value(old: ir.Value | None, new: ir.Value | None, same: dict[int, ir.Value]) -> bool:
    """Tell whether two values stand for each other: outputs of matched nodes, or equal names."""
    if old is None or new is None:
        return old is new
    return same.get(id(new)) is old or old.name == new.name


def name_changes(before: Any, after: Any) -> NameChanges:
    """List the names that came, went, or stayed with another type."""
    old = {value.name: (value.dtype, str(value.shape)) for value in before}
    new = {value.name: (value.dtype, str(value.shape)) for value in after}
    return NameChanges(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(name for name in new if name in old and old[name] != new[name]),
    )


def initializer_changes(before: ir.Graph, after: ir.Graph) -> NameChanges:
    """Compare the initializers by name and value."""
    old, new = before.initializers, after.initializers
    return NameChanges(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(name for name in new if name in old and not is_same_tensor(old[name], new[name])),
    )


def is_same_tensor(old: ir.Value, new: ir.Value) -> bool:
    """Tell whether two values hold the same tensor, or none of them holds one."""
    a, b = old.const_value, new.const_value
    if a is b or a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a.numpy(), b.numpy())


def op_counts(graph: ir.Graph) -> dict[str, int]:
    """Tell how many nodes of each operator, by its name without the domain."""
    return dict(sorted(Counter(node.op_type for node in graph).items()))
