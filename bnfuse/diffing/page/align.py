"""Two graphs beside each other: which node of the graph after each node went into, and the rows that both stand in.

Every node before has at most one *home* after, so that sweeps can be compared home by home and add up to the whole.
Rows: the graph after is put into the order of execution that is nearest to that of the graph before; of the nodes that
are the same on both sides, or keep their name, as many as possible share a row without changing either order.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

from bnfuse.diffing.page.nodes import Node

Row = tuple[int | None, int | None]  # a node before, a node after


@dataclasses.dataclass(frozen=True)
class Alignment:
    """`partner`: after -> before for nodes that are the same; `home`: before -> after; `into`: before -> all after."""

    partner: dict[int, int]
    home: dict[int, int]
    into: dict[int, tuple[int, ...]]
    rows: tuple[Row, ...]


def align(
    before: Sequence[Node], after: Sequence[Node], partner: Mapping[int, int], preferred: Mapping[int, int]
) -> Alignment:
    """Align two graphs. `preferred` names the home of a node before, where more is known about it than its place in the
    graph."""
    into = destinations(before, after, partner)
    home = {i: home_of(i, before, after, into[i], preferred) for i in into if into[i]}
    anchors = {a: b for b, a in home.items() if partner.get(a) == b or before[b].label == after[a].label}
    anchors |= namesakes(before, after, home)
    order = nearest_order(after, wishes(before, after, anchors))
    return Alignment(dict(partner), home, into, rows_of(len(before), order, anchors, home))


def namesakes(before: Sequence[Node], after: Sequence[Node], home: Mapping[int, int]) -> dict[int, int]:
    """Map after to before: nodes of one name that no pass and no equality has brought together, as another operator put
    in the place of one."""
    homes = set(home.values())
    waiting = {before[b].label: b for b in reversed(range(len(before))) if b not in home}
    alone = (a for a in range(len(after)) if a not in homes and not after[a].sources)
    return {a: waiting.pop(after[a].label) for a in alone if after[a].label in waiting}


def destinations(
    before: Sequence[Node], after: Sequence[Node], partner: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """List for each node before the node that it is, and those that were made of it."""
    made_of: dict[str, list[int]] = defaultdict(list)
    for i, node in enumerate(after):
        for source in node.sources:
            made_of[source].append(i)
    same = {b: a for a, b in partner.items()}
    found = {}
    for i, node in enumerate(before):
        names = (node.label,) if node.label in made_of else node.sources  # a node before may be a pass's own
        listed = [a for name in names for a in made_of.get(name, ())]
        found[i] = tuple(dict.fromkeys([same[i]] if i in same else listed))
    return found


def home_of(
    i: int, before: Sequence[Node], after: Sequence[Node], into: Sequence[int], preferred: Mapping[int, int]
) -> int:
    """Give the node that a node before is counted with: that of the same name, the preferred one, or the most alike."""
    node = before[i]
    by_name = [a for a in into if after[a].label == node.label]
    if by_name:
        return by_name[0]
    if preferred.get(i) in into:
        return preferred[i]

    def unlike(a: int) -> tuple[bool, bool, int, int]:
        other = after[a]
        return other.forward != node.forward, other.sweeps == 0, len(other.sources), a

    return min(into, key=unlike)


def wishes(before: Sequence[Node], after: Sequence[Node], anchors: Mapping[int, int]) -> list[int]:
    """Tell where in the order before each node after would like to stand: at its anchor, at its first source, or after
    what it reads."""
    index = {node.label: i for i, node in reversed([*enumerate(before)])}
    found: list[int] = []
    for i, node in enumerate(after):
        known = [index[source] for source in node.sources[:1] if source in index]
        above = [found[read.producer] for read in node.inputs if read.producer is not None and read.producer < i]
        found.append(anchors[i] if i in anchors else known[0] if known else max(above, default=0))
    return found


def nearest_order(nodes: Sequence[Node], wish: Sequence[int]) -> list[int]:
    """Give an order in which every node follows those it reads; of those that can stand next, the one that wishes
    first."""
    readers: dict[int, list[int]] = defaultdict(list)
    waits = []
    for i, node in enumerate(nodes):
        producers = {read.producer for read in node.inputs if read.producer is not None}
        waits.append(len(producers))
        for producer in producers:
            readers[producer].append(i)
    ready = [(wish[i], i) for i in range(len(nodes)) if not waits[i]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for reader in readers[i]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (wish[reader], reader))
    return order


def rows_of(count: int, order: Sequence[int], anchors: Mapping[int, int], home: Mapping[int, int]) -> tuple[Row, ...]:
    """Put both sides in their orders, with as many anchored nodes as possible facing their anchors."""
    anchored = [(place, anchors[a]) for place, a in enumerate(order) if a in anchors]
    rows: list[Row] = []
    last_b, last_a = -1, -1
    for place, b in [*longest_increasing(anchored), (len(order), count)]:
        above = order[last_a] if last_a >= 0 else None
        below = order[place] if place < len(order) else None
        rows += block(range(last_b + 1, b), order[last_a + 1 : place], above, below, home)
        if below is not None:
            rows.append((b, below))
        last_b, last_a = b, place
    return tuple(rows)


def block(
    before: Sequence[int], after: Sequence[int], above: int | None, below: int | None, home: Mapping[int, int]
) -> list[Row]:
    """Tell what lies between two shared rows. The shorter side has its gap where its nodes part: those that went into
    the row above stay at the top, those that went into the row below at the bottom."""
    height = max(len(before), len(after))
    top = next((i for i, b in enumerate(before) if home.get(b) != above), len(before))
    stays = next((i for i, b in enumerate(reversed(before)) if home.get(b) != below), len(before) - top)
    split = len(before) - min(stays, len(before) - top)
    left: list[int | None] = [*before[:split], *[None] * (height - len(before)), *before[split:]]
    right: list[int | None] = [*after, *[None] * (height - len(after))]
    return list(zip(left, right, strict=True))


def longest_increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Give a longest subsequence whose second members strictly increase."""
    ends: list[int] = []  # the smallest last member of a subsequence, by its length
    at: list[int] = []  # the pair that this member belongs to
    previous: list[int | None] = []
    for i, (_, value) in enumerate(pairs):
        length = bisect.bisect_left(ends, value)
        previous.append(at[length - 1] if length else None)
        ends[length : length + 1] = [value]
        at[length : length + 1] = [i]
    found = []
    current = at[-1] if at else None
    while current is not None:
        found.append(pairs[current])
        current = previous[current]
    return found[::-1]
