"""Exchanges between ranks in few messages, begun early: what waits for an exchange waits for the slowest rank.

    conv1  GATHER(1)  finalize1  conv2  GATHER(2)  finalize2  sum    ->    conv1  conv2  GATHER(1, 2)  finalize1+2  sum

Exchanges, and what is per channel and sent by one, come right behind what they need. Then they wait, with all else that
is per channel, until something else reads of them, and exchanges of which none depends on another go together, as one
message: those of a shortcut beside those of the main path, the sums of the two BatchNorms behind a residual sum. Each
message is then moved up to behind what it sends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from bnfuse.runtime.kernels.registry import COEFFICIENTS
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.program import program as p

Together = Callable[[Sequence[p.Launch]], list[p.Launch]]  # of launches per channel, in order: fewer of them


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A launch, and what it reads and writes: parts of a storage are that storage."""

    launch: p.Launch
    reads: frozenset[int]
    writes: frozenset[int]
    per_channel: bool = False

    @property
    def waits(self) -> bool:
        """Whether it waits for others to be launched with."""
        return self.per_channel or self.launch.exchanges

    def depends_on(self, earlier: Placed) -> bool:
        """Tell whether it must stay behind another one: one writes what the other reads or writes."""
        if earlier.writes.isdisjoint(self.reads) and earlier.writes.isdisjoint(self.writes):
            return not earlier.reads.isdisjoint(self.writes)
        return True


def group_exchanges(low: Lowering, launches: Sequence[p.Launch], together: Together) -> list[p.Launch]:
    """Order the launches of a phase that has exchanges; `together` groups those per channel."""
    bases = {part: base for part, (base, _) in low.parts.items()}

    def placed(several: Iterable[p.Launch]) -> list[Placed]:
        return [placed_of(low, launch, bases) for launch in several]

    done: list[p.Launch] = []
    waiting: list[Placed] = []
    for one in moved_up(placed(launches)):
        if one.waits:
            waiting.append(one)
            continue
        if any(one.depends_on(earlier) for earlier in waiting):
            done += in_waves(waiting, together)
            waiting = []
        done.append(one.launch)
    done += in_waves(waiting, together)
    return [one.launch for one in moved_up(placed(done))]


def placed_of(low: Lowering, launch: p.Launch, bases: Mapping[int, int]) -> Placed:
    """Find what a launch touches."""
    request = low.request_of(launch)
    reads, writes = (
        frozenset(bases.get(b.storage, b.storage) for b in launch.buffers if b.access != other)
        for other in ("out", "in")
    )
    return Placed(launch, reads, writes, request is not None and request.kind == COEFFICIENTS)


def in_waves(waiting: Sequence[Placed], together: Together) -> list[p.Launch]:
    """Order what waits: what no exchange is needed for, the exchanges that are then ready, what these are needed for,
    and so on."""
    done: list[p.Launch] = []
    left = list(waiting)
    while left:
        ready: list[Placed] = []
        behind: list[Placed] = []
        for one in left:
            is_held = one.launch.exchanges or any(one.depends_on(earlier) for earlier in behind)
            (behind if is_held else ready).append(one)
        sent: list[Placed] = []
        left = []
        for place, one in enumerate(behind):
            is_held = any(one.depends_on(earlier) for earlier in behind[:place])
            (left if is_held or not one.launch.exchanges else sent).append(one)
        done += together([one.launch for one in ready])
        for kind in dict.fromkeys(one.launch.kernel for one in sent):
            done.append(as_one([one.launch for one in sent if one.launch.kernel == kind]))
    return done


def as_one(launches: Sequence[p.Launch]) -> p.Launch:
    """Make one exchange of several of a kind."""
    first = launches[0]
    if len(launches) == 1:
        return first
    arguments = tuple(argument for launch in launches for argument in launch.arguments)
    return p.Launch(first.phase, first.kernel, f"{first.node} and {len(launches) - 1} more", arguments)


def moved_up(launches: Sequence[Placed]) -> list[Placed]:
    """Move exchanges, and what is per channel and sent by one, up to behind what they need: others compute while they
    are under way. It is the same order on all ranks, who have the same launches."""
    wanted = sent_by_exchanges(launches)
    done: list[Placed] = []
    for index, one in enumerate(launches):
        place = len(done)
        while index in wanted and place and not one.depends_on(done[place - 1]):
            place -= 1
        done.insert(place, one)
    return done


def sent_by_exchanges(launches: Sequence[Placed]) -> set[int]:
    """Find the exchanges, and the launches per channel that make what they send, by their places."""
    found: set[int] = set()
    for index, one in enumerate(launches):
        if not one.launch.exchanges:
            continue
        found.add(index)
        read = set(one.reads)
        for place in range(index - 1, -1, -1):
            maker = launches[place]
            if maker.writes.isdisjoint(read):
                continue
            read -= maker.writes
            if maker.per_channel:
                found.add(place)
                read |= maker.reads
            if not read:
                break
    return found
