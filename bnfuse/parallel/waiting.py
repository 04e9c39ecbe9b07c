"""Waiting for other ranks, but not for ever, and without keeping a processor from a rank that needs it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from bnfuse.core.errors import LostRankError
from bnfuse.parallel.peers import stopped_beside

_usual: list[float] = []  # limits outside of the contexts of `patience` that there are, the outermost first

BUSY = 200e-6  # seconds of asking again at once, but for those who want the processor; then of ever longer pauses
LONGEST = 1e-3  # of a pause
LOOK = 1.0  # between two looks at the processes of the other ranks
TURN = 0.3  # seconds by which a rank lets the one before it speak first, where all find out the same
LAST_TURN = 3.0


class Ranked(Protocol):
    """Who waits."""

    @property
    def rank(self) -> int:
        """Which rank it is."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...


class Limited(Ranked, Protocol):
    """What of a world waiting is about."""

    limit: float


def wait_until(done: Callable[[], bool], world: Limited, what: str) -> None:
    """Ask until it is done. Raises LostRankError after the world's limit; in a context of `patience` after the usual
    one where a rank of this machine is stopped then."""
    begin, pause, looked = time.monotonic(), 0.0, 0.0
    while not done():
        waited = time.monotonic() - begin
        if waited > world.limit:
            raise lost(world, f"has waited {world.limit:g} s for the others ({what})")
        if _usual and waited > max(_usual[0], looked + LOOK):
            looked = waited
            if stopped := stopped_beside():
                raise lost(world, f"has waited {waited:.0f} s for the others ({what}), and {'; '.join(stopped)}")
        if waited > BUSY:
            pause = min(LONGEST, waited / 10)
        time.sleep(pause)


def lost(world: Ranked, what: str) -> LostRankError:
    """Make the error of a rank that cannot go on without the others."""
    return LostRankError(
        f"rank {world.rank} of {world.size} {what}: a rank has ended, hangs, or is slower than that. Go on from the "
        "last checkpoint; if it is only slow, raise the limit"
    )


@contextlib.contextmanager
def patience(world: Limited, seconds: float) -> Iterator[None]:
    """Wait so long, at least, for other ranks in this context: one of them has work that takes long."""
    usual, world.limit = world.limit, max(world.limit, seconds)
    _usual.append(usual)
    try:
        yield
    finally:
        _usual.pop()
        world.limit = usual
