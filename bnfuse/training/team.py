"""What the ranks of a world do together. In one process, where the world is None, each of it is what it would be.

    team = Team(world)
    graph = team.together(lambda: checked(...))        # what one rank complains of is raised on all of them
    at = team.from_first(lambda: restored(...))        # the first does it, all get what it gave
    team.agree({"batch": "64"}, "setting")             # raises where a rank has another one

What one rank meets alone ends the world (commands/worlds.py). Here are the places where all ranks come by, so that one
line tells of it and every rank ends in order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from bnfuse.core.errors import BnfuseError, DivergedError, LostRankError, everywhere
from bnfuse.parallel.peers import Peers

if TYPE_CHECKING:
    from bnfuse.parallel.world import World

T = TypeVar("T")
MARK = b"team:"  # of what ranks tell each other here


class Team:
    """The ranks of a world, as one of them sees them."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world
        self.rank = 0 if world is None else world.rank
        self.size = 1 if world is None else world.size

    @property
    def sharing(self) -> int:
        """Count the ranks that have the processors of this one, itself included: all ranks ask for it."""
        return 1 if self.world is None else Peers.of(self.world).sharing

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that writes files and speaks: the first."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """Give what each rank has to say, in their order: small things that pickle."""
        if self.world is None:
            return [value]
        said = self.world.gather(MARK + pickle.dumps(value))
        for rank, text in enumerate(said):
            if not text.startswith(MARK):
                raise LostRankError(f"rank {rank} is at another place of the run than rank {self.rank}: it has failed")
        return [pickle.loads(text.removeprefix(MARK)) for text in said]  # of our own processes alone

    def together(self, work: Callable[[], T], last: str | None = None) -> T:
        """Do the work on every rank. What one complains of (a BnfuseError) is raised on all: that of the first rank
        that has something to say, of complaints with the text `last` in them only where there is no other."""
        if self.world is None:
            return work()
        found, own = None, None
        try:
            found = work()
        except LostRankError:  # nobody is there to be told
            raise
        except BnfuseError as error:
            own = error
        try:
            said = self.gathered(None if own is None else (isinstance(own, DivergedError), str(own)))
        except LostRankError as error:
            raise own or error from None  # the others are in the midst of the work
        if any(one is not None for one in said):
            raise complaint_of(said, last) from own
        return found  # type: ignore[return-value]

    def from_first(self, work: Callable[[], T]) -> T:
        """Let the first rank do the work, and give all of them what it gave; what it complains of is raised on all."""
        if self.world is None:
            return work()
        found = self.together(work if self.leads else lambda: None)  # type: ignore[arg-type, return-value]
        return pickle.loads(self.world.broadcast(pickle.dumps(found)))  # type: ignore[no-any-return]

    def agree(self, own: Mapping[str, Any], kind: str) -> None:
        """Raise on all ranks where one has something else than the first, naming it."""
        first, *others = self.gathered(dict(own))
        for rank, other in enumerate(others, 1):
            name = next((name for name in sorted({*first, *other}) if first.get(name) != other.get(name)), None)
            if name is not None:
                has = f"{kind} {name} {shown(other.get(name))}, rank 0 {shown(first.get(name))}"
                raise everywhere(BnfuseError(f"rank {rank} has the {has}: start all ranks with the same command"))

    def share(self, count: int, block: int) -> slice:
        """Cut what this rank takes out of `count` things in order, whole blocks of them: all ranks together take each
        once."""
        blocks = -(-count // block)
        start, stop = (rank * blocks // self.size * block for rank in (self.rank, self.rank + 1))
        return slice(min(start, count), min(stop, count))


ALONE = Team()


def complaint_of(said: Sequence[tuple[bool, str] | None], last: str | None = None) -> BnfuseError:
    """Make one error of what ranks complain of: whether they diverged, and a line."""
    found = [(rank, *one) for rank, one in enumerate(said) if one is not None]
    rank, diverged, text = min(found, key=lambda one: (last is not None and last in one[2], one[0]))
    common = len({one[2] for one in found}) == 1 and len(found) == len(said)
    line = text if common or rank == 0 or text.startswith("rank ") else f"rank {rank}: {text}"
    return everywhere((DivergedError if diverged else BnfuseError)(line))


def shown(value: Any) -> str:
    """Write a setting, cut where it is long."""
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
