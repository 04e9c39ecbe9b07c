"""What became of each BatchNorm, with what it cost before and costs now."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from bnfuse.diffing.halves import BATCH_NORMS, BatchNormFate
from bnfuse.diffing.page.align import Alignment
from bnfuse.diffing.page.nodes import Node

# what the page calls them
HALVES = {
    "statistics": "statistics",
    "normalize": "normalize",
    "gradient_reduce": "gradient reduce",
    "gradient_input": "gradient input",
}
PLACES = {
    "prologue": "on the way in of",
    "epilogue": "on the way out of",
    "own": "on its own in",
    "sample": "on a sample, in",
}
STATUSES = {
    "fused": "no half sweeps a feature map of its own",
    "sampled": "a half touches a sample of the map in an operator of its own",
    "split": "a half is still an operator of its own",
    "whole": "still one operator",
    "gone": "taken out of the graph, or not to be found in it",
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Feature maps read and written."""

    sweeps: int = 0
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.sweeps + other.sweeps, self.bytes + other.bytes)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.sweeps - other.sweeps, self.bytes - other.bytes)


@dataclasses.dataclass(frozen=True)
class Norm:
    """`nodes`: the BatchNorm and its gradient before. `homes`: the nodes after that these are counted with.

    `own_before`, `own_after`: the cost of operators that do nothing but its halves. `around_after`: that of these and
    of the homes; `around_before`: that of everything that went into them. `reasons`: why a half is not fused.
    """

    fate: BatchNormFate
    status: str
    nodes: tuple[int, ...]
    homes: tuple[int, ...]
    own_before: Cost
    own_after: Cost
    around_before: Cost
    around_after: Cost
    reasons: tuple[str, ...]


def gradient_nodes(graph: ir.Graph) -> dict[int, tuple[int, ...]]:
    """Map each BatchNorm to the gradient nodes that read the same map and the same scale; all as indices."""
    found = defaultdict(list)
    for i, node in enumerate(graph):
        if node.op_type == "BatchNormGrad" and len(node.inputs) > 2:
            found[node.inputs[1], node.inputs[2]].append(i)
    norms = [(i, node) for i, node in enumerate(graph) if node.op_type in BATCH_NORMS]
    return {i: tuple(found[node.inputs[0], node.inputs[1]]) for i, node in norms}


def preferred_homes(
    fates: Sequence[BatchNormFate], gradients: Mapping[int, tuple[int, ...]], after: Sequence[Node]
) -> dict[int, int]:
    """Give each BatchNorm the home that it prefers: it goes with what normalises now, its gradient with what reduces;
    each is in one place."""
    index = first_index(after)
    wanted = {}
    for norm, fate in zip(gradients, fates, strict=True):
        for i, places in ((norm, fate.normalize), *((g, fate.gradient_reduce) for g in gradients[norm])):
            if places and places[0].node in index:
                wanted[i] = index[places[0].node]
    return wanted


def norms_of(
    fates: Sequence[BatchNormFate],
    gradients: Mapping[int, tuple[int, ...]],
    before: Sequence[Node],
    after: Sequence[Node],
    alignment: Alignment,
    reasons: Mapping[str, tuple[str, ...]],
) -> tuple[Norm, ...]:
    """Describe the BatchNorms, with the nodes around them on both sides and what these cost."""
    index = first_index(after)
    sources = members(alignment)
    found = []
    for norm, fate in zip(gradients, fates, strict=True):
        nodes = (norm, *gradients[norm])
        homes = tuple(dict.fromkeys(alignment.home[i] for i in nodes if i in alignment.home))
        places = (place for half in HALVES for place in getattr(fate, half))
        own = dict.fromkeys(index[p.node] for p in places if p.where in ("own", "sample") and p.node in index)
        around = dict.fromkeys([*homes, *own])
        together = dict.fromkeys([*nodes, *(b for a in around for b in sources[a])])
        found.append(
            Norm(
                fate,
                status_of(fate),
                nodes,
                homes,
                own_before=cost(before[i] for i in nodes),
                own_after=cost(after[i] for i in (homes if fate.whole else own)),
                around_before=cost(before[i] for i in together),
                around_after=cost(after[i] for i in around),
                reasons=reasons.get(fate.name, ()),
            )
        )
    return tuple(found)


def status_of(fate: BatchNormFate) -> str:
    """Tell in a word what became of a BatchNorm."""
    if fate.whole:
        return "whole"
    where = {place.where for half in HALVES for place in getattr(fate, half)}
    if not where:
        return "gone"
    return "split" if "own" in where else "sampled" if "sample" in where else "fused"


def members(alignment: Alignment) -> dict[int, list[int]]:
    """Map after to the nodes before whose home it is."""
    found = defaultdict(list)
    for b, a in alignment.home.items():
        found[a].append(b)
    return found


def cost(nodes: Iterable[Node]) -> Cost:
    """Sum sweeps and bytes of nodes."""
    return sum((Cost(node.sweeps, node.bytes) for node in nodes), Cost())


def first_index(nodes: Sequence[Node]) -> dict[str, int]:
    """Map each label to the first node that has it."""
    return {node.label: i for i, node in reversed([*enumerate(nodes)])}
