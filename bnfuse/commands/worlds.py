"""Commands under mpirun, torchrun or srun: the world is opened, and whatever ends the run is told once.

    world = here.open("train", world, timeout, deterministic, target)           # None: one process
    if here.leads: show(...)

What all ranks find wrong at the same place is printed by the first, and each ends in order. What one rank meets alone
ends the world, with a line that names the rank.
"""

from __future__ import annotations

import enum
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from bnfuse.core.errors import BnfuseError, LostRankError
from bnfuse.core.interrupts import interrupts
from bnfuse.parallel.waiting import LAST_TURN, TURN

if TYPE_CHECKING:
    from bnfuse.parallel.peers import Peers
    from bnfuse.parallel.world import World

T = TypeVar("T")
DYING = 1.0  # seconds


class WorldName(str, enum.Enum):
    """What carries what ranks exchange."""

    auto = "auto"
    mpi = "mpi"
    gloo = "gloo"
    nccl = "nccl"
    none = "none"


WorldOption = Annotated[
    WorldName,
    typer.Option(
        "--world",
        help="What carries the exchanges of several ranks: by default MPI under mpirun, gloo under torchrun and SLURM, "
        "NCCL on GPUs. none: this process trains alone, whatever variables of a launcher are set.",
    ),
]
WorldTimeout = Annotated[
    float | None,
    typer.Option(
        "--world-timeout",
        min=1,
        metavar="SECONDS",
        help="How long a rank waits for the others before it ends the run (default: 120).",
        show_default=False,
    ),
]


Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Sums over ranks in the order of ranks: the same bits whatever carries them and wherever ranks run.",
    ),
]


class WireName(str, enum.Enum):
    """What gradients are while they are between ranks."""

    fp32 = "fp32"
    bf16 = "bf16"


Wire = Annotated[
    WireName, typer.Option("--wire", help="What gradients are on their way between GPUs: bf16 has half of the bits.")
]


class Here:
    """This process as a rank."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.peers: Peers | None = None
        self._opening = False

    @property
    def leads(self) -> bool:
        """Whether this process is the one that speaks."""
        return self.world is None or self.world.rank == 0

    def open(
        self, command: str, name: WorldName, timeout: float | None, deterministic: bool, target: str
    ) -> World | None:
        """Join the ranks that a launcher started. Raises BnfuseError where they do not find each other, or run another
        command."""
        from bnfuse.parallel.world import LIMIT, open_world

        self.world = self.peers = None
        if name is WorldName.none:
            return None
        kind = None if name is WorldName.auto else name.value
        self._opening = True
        limit = LIMIT if timeout is None else timeout
        world = open_world(kind, target=target, limit=limit, deterministic=deterministic)
        self._opening = False
        if world is not None:
            self.meet(world, command=command, deterministic=deterministic)
        return world

    def meet(self, world: World, **asked: object) -> None:
        """Learn who the others are, and see that all were asked for what decides how they exchange anything."""
        from bnfuse.parallel.peers import Peers
        from bnfuse.training.team import Team

        self.world, self.peers = world, Peers.of(world)
        Team(world).agree(asked, "setting")

    def together(self, work: Callable[[], T]) -> T:
        """Do the work on every rank; what they complain of is raised on all."""
        from bnfuse.training.team import Team

        return Team(self.world).together(work)

    def ending(self, message: str, status: int, error: BaseException | None = None) -> str:
        """End the run on all ranks where this one alone knows that it ends; give the line to print where all know, or
        there is no other."""
        if self.world is None:
            return self._unopened(message, error)
        if isinstance(error, BnfuseError) and error.everywhere:
            return message if self.leads else ""
        rank, line = self.world.rank, f"rank {self.world.rank}: {message}"
        if interrupts.number:  # launchers hand Ctrl-C on to all ranks; with SIGTERM they end those that are left
            line = message if self.leads and interrupts.number == signal.SIGINT else ""
        elif isinstance(error, LostRankError):
            lost = self._lost()
            head = message.partition(": ")[0].partition(" (")[0]
            line = f"{head}: {'; '.join(lost)}. Go on from the last checkpoint" if lost else message
            time.sleep(min(TURN * rank, LAST_TURN))  # all of those that are left find it at the same time
        return self.world.end(line and f"bnfuse: {line}", status)

    def _lost(self) -> list[str]:
        """Say what has become of the ranks on this machine that run no more. One that is killed closes what it has
        open, by which the others know, a moment before it has ended."""
        end = time.monotonic() + DYING
        while self.peers is not None and time.monotonic() < end:
            if found := self.peers.lost():
                return found
            time.sleep(DYING / 20)
        return []

    def _unopened(self, message: str, error: BaseException | None) -> str:
        """Give the line of a process that has joined no others: what was typed wrongly all ranks know."""
        from bnfuse.parallel.launched import launched

        try:
            found = launched()
        except BnfuseError:
            return message
        if found is None or found.rank == 0:
            return message
        if isinstance(error, BnfuseError) and error.everywhere:
            return ""
        if self._opening:
            return f"rank {found.rank}: {message}"
        is_told = hasattr(error, "format_message") or interrupts.number
        return "" if is_told and not sys.stderr.isatty() else message  # a terminal is no launcher's


here = Here()
