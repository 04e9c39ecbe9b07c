"""The exchanges of a program on a CPU: begun at their place, brought forward between launches, and done before the
first launch that reads or writes one of their buffers.

    conv3 gradient   begin sum(conv3)   conv2 gradient   conv1 gradient   ...   [wait]   update
                     |------------- under way, in MPI or in gloo's threads -----------|

Which launch waits for which exchange is found when the program is loaded, by the bytes that they touch: the planner may
have given a buffer of the arena to another tensor right behind its last launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from bnfuse.core.errors import BnfuseError
from bnfuse.parallel.world import Exchanged, Request, World
from bnfuse.runtime.backends.memory import Memory
from bnfuse.runtime.program import program as p

Place = tuple[p.Phase, int]  # a launch: its phase, and its number there
KINDS: dict[int, Literal["sum", "gather"]] = {p.SUM: "sum", p.GATHER: "gather"}


@dataclasses.dataclass(frozen=True)
class Range:
    """Bytes of a region, and whether they are written."""

    region: str
    start: int
    stop: int
    writes: bool

    def meets(self, other: Range) -> bool:
        """Tell whether one writes what the other touches."""
        shares = self.region == other.region and self.start < other.stop and other.start < self.stop
        return shares and (self.writes or other.writes)


def ranges_of(program: p.Program, launch: p.Launch) -> list[Range]:
    """List what a launch touches."""
    held = [(program.storages[buffer.storage], buffer.access) for buffer in launch.buffers]
    return [Range(s.region, s.offset, s.offset + s.bytes, access != "in") for s, access in held if s.elements]


def waits_of(program: p.Program) -> dict[Place, tuple[Place, ...]]:
    """Find for each launch the exchanges that it is the first to meet, in the order in which a step runs."""
    found: dict[Place, tuple[Place, ...]] = {}
    under_way: dict[Place, list[Range]] = {}
    for phase in p.ALL_PHASES:
        for index, launch in enumerate(program.phase(phase)):
            place, own = (phase, index), ranges_of(program, launch)
            if under_way:
                met = [other for other, theirs in under_way.items() if any(a.meets(b) for a in own for b in theirs)]
                if met:
                    found[place] = tuple(met)
                    under_way = {other: theirs for other, theirs in under_way.items() if other not in met}
            if launch.exchanges:
                under_way[place] = own
    return found


class Exchanges:
    """Those of one program, and which of them are under way."""

    def __init__(self, program: p.Program, memory: Memory, world: World | None) -> None:
        self._world = world
        self._what: dict[Place, Exchanged] = {}
        for phase in p.ALL_PHASES:
            for index, launch in enumerate(program.phase(phase)):
                if launch.exchanges:
                    arrays = tuple(memory.flat(buffer.storage) for buffer in launch.buffers)
                    self._what[phase, index] = Exchanged(KINDS[launch.kernel], arrays)
        self._waits: Mapping[Place, tuple[Place, ...]] = waits_of(program) if self._what else {}
        self._open: dict[Place, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._what)

    def before(self, place: Place) -> None:
        """Wait for the exchanges that a launch meets, and bring forward all others."""
        if self._open:
            for other in self._waits.get(place, ()):
                if other in self._open:
                    self._open.pop(other).wait()
            if self._open and self._open[oldest := next(iter(self._open))].test():
                del self._open[oldest]

    def begin(self, place: Place) -> None:
        """Begin the exchange that is a launch's place."""
        if self._world is None:
            raise BnfuseError(
                "the step exchanges with other ranks, and there is no world: give the one of open_world()"
            )
        self._open[place] = self._world.start(self._what[place])

    def finish(self) -> None:
        """Wait for all that is under way."""
        while self._open:
            self._open.pop(next(iter(self._open))).wait()

    def forget(self) -> None:
        """Leave what is under way to itself: a rank is lost."""
        self._open.clear()
