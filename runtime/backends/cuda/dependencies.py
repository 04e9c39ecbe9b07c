"""Which launch has to wait for which, by the bytes that they read and write.

A launch waits for whoever wrote what it reads, and for whoever read or wrote what it writes. Of a range only those
accesses are remembered that later ones can still meet: a write that covers others stands for them, because it waited
for them. What is implied by other edges is left out.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from bnfuse.runtime.program import program as p

Slots = Mapping[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Slot:
    """Channels `start` to `stop` of pixels that have `stride`: a part of a range that is not in one piece."""

    start: int
    stop: int
    stride: int

    def is_apart_from(self, other: Slot) -> bool:
        """Tell whether both are channels of one buffer and share none."""
        return self.stride == other.stride and (self.stop <= other.start or other.stop <= self.start)

    def covers(self, other: Slot) -> bool:
        """Tell whether the other's channels are all among these."""
        return self.stride == other.stride and self.start <= other.start and other.stop <= self.stop


@dataclasses.dataclass(frozen=True)
class Access:
    """Bytes of a region that are read, written or both. Two that name the same `storage` may compare their slots."""

    region: str
    start: int
    stop: int
    reads: bool
    writes: bool
    storage: int = -1
    slot: Slot | None = None


@dataclasses.dataclass(frozen=True)
class _Seen:
    """An access of an earlier launch."""

    launch: int
    storage: int
    slot: Slot | None


@dataclasses.dataclass
class _Segment:
    """Bytes from its start to the next segment's: who wrote them, and who has read them since."""

    writers: list[_Seen] = dataclasses.field(default_factory=list)
    readers: list[_Seen] = dataclasses.field(default_factory=list)


def accesses_of(
    arguments: Mapping[str, p.Argument], taken: Sequence[str], storages: Sequence[p.Storage], slots: Slots
) -> list[Access]:
    """List what a stage of a launch touches: of the launch's `arguments` by name those `taken`.

    What one stage of a kernel writes another one may read: a result counts as read, too. `slots` are the kernel's
    channels of maps.
    """
    found = []
    for name in taken:
        argument = arguments[name]
        if isinstance(argument, p.Buffer):
            s = storages[argument.storage]
            slot = slot_of(slots.get(name), arguments.get(f"{name}_offset"))
            writes = argument.access != "in"
            found.append(Access(s.region, s.offset, s.offset + s.bytes, True, writes, argument.storage, slot))
    return found


def slot_of(channels: tuple[int, int] | None, offset: p.Argument | None) -> Slot | None:
    """Give the channels of a map's buffer that a launch touches, None for all of it.

    `channels`: the map's, the buffer's.
    """
    if channels is None or not isinstance(offset, int):
        return None
    count, stride = channels
    return Slot(offset, offset + count, stride) if count < stride and offset + count <= stride else None


def dependencies(launches: Iterable[Sequence[Access]]) -> list[tuple[int, ...]]:
    """Of each launch the earlier ones, by index, that it waits for."""
    regions: dict[str, _Region] = {}
    edges: list[tuple[int, ...]] = []
    ancestors: list[int] = []  # as sets of bits
    for index, accesses in enumerate(launches):
        needed: set[int] = set()
        for access in accesses:
            needed |= regions.setdefault(access.region, _Region()).before(access)
        for access in accesses:
            regions[access.region].enter(index, access)
        kept, implied = [], 0
        for earlier in sorted(needed - {index}, reverse=True):
            if not implied >> earlier & 1:
                kept.append(earlier)
            implied |= ancestors[earlier] | 1 << earlier
        edges.append(tuple(reversed(kept)))
        ancestors.append(implied)
    return edges


class _Region:
    """The accesses of a region, in segments that begin where accesses began or ended."""

    def __init__(self) -> None:
        self._starts: list[int] = [0]
        self._segments: list[_Segment] = [_Segment()]

    def before(self, access: Access) -> set[int]:
        """Find the launches that have to be done."""
        found: set[int] = set()
        for segment in self._between(access):
            met = segment.writers + (segment.readers if access.writes else [])
            found |= {seen.launch for seen in met if not is_apart(seen, access)}
        return found

    def enter(self, launch: int, access: Access) -> None:
        seen = _Seen(launch, access.storage, access.slot)
        for segment in self._between(access):
            if access.writes:
                segment.writers = [other for other in segment.writers if not covers(access, other)] + [seen]
                # readers of this very launch come along in its write
                segment.readers = [other for other in segment.readers if not covers(access, other)]
            else:
                segment.readers.append(seen)

    def _between(self, access: Access) -> list[_Segment]:
        if access.start == access.stop:
            return []
        first, last = self._cut(access.start), self._cut(access.stop)
        return self._segments[first:last]

    def _cut(self, at: int) -> int:
        """Find the index of the segment that starts at this byte; one is made where there is none."""
        index = bisect.bisect_left(self._starts, at)
        if index == len(self._starts) or self._starts[index] != at:
            former = self._segments[index - 1]
            self._starts.insert(index, at)
            self._segments.insert(index, _Segment(list(former.writers), list(former.readers)))
        return index


def is_apart(seen: _Seen, access: Access) -> bool:
    """Whether two accesses of the same bytes touch different channels of one map buffer."""
    if seen.storage != access.storage or seen.slot is None or access.slot is None:
        return False
    return seen.slot.is_apart_from(access.slot)


def covers(access: Access, seen: _Seen) -> bool:
    """Whether whoever meets `seen` within the access's bytes meets the access too."""
    if access.slot is None:
        return True
    return seen.storage == access.storage and seen.slot is not None and access.slot.covers(seen.slot)
