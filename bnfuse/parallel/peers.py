"""The ranks of a world as processes: which of them share a machine, and what has become of those that do.

    peers = Peers.of(world)
    peers.sharing                # how many ranks share this one's processors
    peers.lost()                 # ["rank 2 (process 4711) is stopped"], of the ranks on this machine

A message that does not come says nothing of its sender. Of the processes of one machine the system tells more.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bnfuse.parallel.world import World

STATES = {"T": "is stopped", "t": "is stopped by a debugger", "Z": "has ended", "X": "has ended"}
STOPPED = "Tt"


@dataclasses.dataclass(frozen=True)
class Peer:
    """One rank. `machine` tells machines, and the containers on them, apart; `started` tells processes of one number
    apart; `cpus` are the processors that it may use."""

    machine: str
    pid: int
    started: str
    cpus: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Peers:
    """All ranks, in their order, as rank `rank` sees them."""

    all: tuple[Peer, ...]
    rank: int

    @classmethod
    def of(cls, world: World) -> Peers:
        """Let all ranks tell each other who they are: every rank calls it."""
        found: list[Peer] = [pickle.loads(said) for said in world.gather(pickle.dumps(own()))]  # our own processes'
        return cls(tuple(found), world.rank)

    @property
    def here(self) -> list[int]:
        """List the ranks on this machine."""
        return [rank for rank, peer in enumerate(self.all) if peer.machine == self.all[self.rank].machine]

    @property
    def sharing(self) -> int:
        """Count the ranks, this one too, that have a processor in common with it; launchers may give each its own."""
        mine = self.all[self.rank].cpus
        return sum(1 for rank in self.here if rank == self.rank or self.all[rank].cpus & mine)

    def lost(self) -> list[str]:
        """Say of each rank on this machine that runs no more what has become of it."""
        found = []
        for rank in self.here:
            peer = self.all[rank]
            if rank != self.rank and (what := fate_of(peer.pid, peer.started)) is not None:
                found.append(f"rank {rank} (process {peer.pid}) {what}")
        return found


def own() -> Peer:
    """Describe this process."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Peer(machine(), os.getpid(), status_of(os.getpid())[1], frozenset(cpus))


def machine() -> str:
    """Name the machine, and the room of process numbers in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def stopped_beside() -> list[str]:
    """Name the processes that are stopped of those that this one's launcher has started on this machine. A shell that
    ranks were started from by hand has other jobs, too: they run another program."""
    found = []
    for pid in sorted(int(entry.name) for entry in Path("/proc").glob("[0-9]*")):
        state, began = status_of(pid)
        if state in STOPPED and parent_of(pid) == os.getppid() and program_of(pid) == program_of(os.getpid()):
            found.append(f"process {pid} {fate_of(pid, began)}")
    return found


def parent_of(pid: int) -> int:
    """Give the number of a process's parent; 0 where it is not there."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def program_of(pid: int) -> Path | None:
    """Give the file of the program that a process runs; None where it cannot be seen."""
    try:
        return Path(f"/proc/{pid}/exe").readlink()
    except OSError:
        return None


def fate_of(pid: int, started: str) -> str | None:
    """Say what has become of a process that began at `started`; None where it runs."""
    state, began = status_of(pid)
    if not state or (started and began != started):
        return "has ended"
    return STATES.get(state)


def status_of(pid: int) -> tuple[str, str]:
    """Give the state of a process, a letter, and when it began, as the system counts; empty where it is not there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""
