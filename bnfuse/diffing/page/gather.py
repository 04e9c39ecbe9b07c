"""Everything that the page shows, from two training graphs and, where a rewrite was just done, its report."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

from bnfuse.analysis import match
from bnfuse.diffing.compare import diff_graphs
from bnfuse.diffing.page.align import Alignment, align
from bnfuse.diffing.page.estimates import Estimates, estimates_of
from bnfuse.diffing.page.nodes import Node, nodes_of
from bnfuse.diffing.page.norms import Norm, gradient_nodes, norms_of, preferred_homes
from bnfuse.diffing.report import Diff
from bnfuse.graph.training_graph import TrainingGraph


@dataclasses.dataclass(frozen=True)
class Page:
    """`report` is that of `bnfuse rewrite`, as JSON."""

    name_before: str
    name_after: str
    diff: Diff
    before: tuple[Node, ...]
    after: tuple[Node, ...]
    alignment: Alignment
    norms: tuple[Norm, ...]
    estimates: Estimates
    report: dict[str, Any] | None

    @property
    def is_reversed(self) -> bool:
        """Whether it looks as if passes had made the graph before of the graph after."""
        names = {node.label for node in self.after}
        made = (node for node in self.before if node.made_by and node.sources)
        return not any(node.made_by for node in self.after) and any(names.issuperset(n.sources) for n in made)


def gather(
    first: TrainingGraph, second: TrainingGraph, *, hardware: tuple[str, ...], report: dict[str, Any] | None = None
) -> Page:
    """Gather all that the page shows of two graphs."""
    diff = diff_graphs(first, second)
    before, after = nodes_of(first), nodes_of(second)
    gradients = gradient_nodes(first.model.graph)
    alignment = align(before, after, partners(first, second), preferred_homes(diff.batch_norms, gradients, after))
    norms = norms_of(diff.batch_norms, gradients, before, after, alignment, reasons_of(report))
    estimates = estimates_of(first, second, hardware)
    return Page(first.name, second.name, diff, before, after, alignment, norms, estimates, report)


def partners(first: TrainingGraph, second: TrainingGraph) -> dict[int, int]:
    """Map after to before, as indices, for the nodes that are the same."""
    before = {node: i for i, node in enumerate(first.model.graph)}
    after = {node: i for i, node in enumerate(second.model.graph)}
    pairs = match.match_nodes(first.model.graph, second.model.graph).pairs
    return {after[a]: before[b] for b, a in pairs}


def reasons_of(report: dict[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """Map each BatchNorm to "half: reason" for each half that was left alone."""
    found = defaultdict(list)
    for entry in report["unfused"] if report else ():
        found[entry["node"]].append(f"{entry['half']}: {entry['reason']}")
    return {name: tuple(dict.fromkeys(reasons)) for name, reasons in found.items()}
