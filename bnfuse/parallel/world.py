"""What all worlds have in common: ranks, and the exchange of arrays and small messages between them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Literal, NoReturn, Protocol

import numpy as np

from bnfuse.core.errors import BnfuseError, everywhere
from bnfuse.core.ranges import check_real
from bnfuse.parallel.launched import Launched, launched

LIMIT = 120.0  # seconds
KINDS = ("mpi", "gloo", "nccl")
UNDER_PMIX = "PMIX_RANK"  # srun --mpi=pmix: MPI finds its ranks
_open: dict[tuple[str, bool], World] = {}


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """What goes on its way together.

    sum       each of `arrays` (float32, contiguous) is summed over the ranks, in place
    gather    `arrays` are pairs, own and all: `all` gets every rank's `own` in the order of ranks
    """

    kind: Literal["sum", "gather"]
    arrays: tuple[np.ndarray, ...]

    @property
    def pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Give own and all, of a gather."""
        return list(zip(self.arrays[::2], self.arrays[1::2], strict=True))


class Request(Protocol):
    """An exchange that is under way."""

    def test(self) -> bool:
        """Tell whether it is done, and bring it forward. Raises LostRankError as `wait` does."""
        ...

    def wait(self) -> None:
        """Wait until it is done. Raises LostRankError when a rank is gone, or did not answer within the limit."""
        ...


class World(Protocol):
    """The processes that run one training, of which this is one. All call the same methods in the same order."""

    rank: int
    size: int
    local_rank: int  # on this machine
    local_size: int
    name: str  # MPI, gloo, NCCL
    limit: float  # seconds that a rank waits for others before it ends the run

    def start(self, exchange: Exchanged) -> Request:
        """Begin an exchange. Its arrays are neither read nor written until it is done."""
        ...

    def sum(self, array: np.ndarray) -> None:
        """Sum an array over the ranks, in place, and wait for it."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Give every rank's bytes, in the order of ranks, on every rank. For what is small."""
        ...

    def broadcast(self, data: bytes) -> bytes:
        """Give rank 0's bytes on every rank."""
        ...

    def end(self, message: str, status: int) -> NoReturn:
        """End the run on every rank with this exit status; `message` is written as one line, unless it is empty."""
        ...


def open_world(
    kind: str | None = None, *, target: str = "cpu", limit: float = LIMIT, deterministic: bool = False
) -> World | None:
    """Join the ranks that a launcher started this process with; None where it is the only one.

    `kind` is mpi, gloo or nccl; by default nccl for a `target` on a GPU, else mpi under mpirun and gloo under torchrun.
    `limit` has the seconds that a rank waits for others. With `deterministic` sums are taken in the order of ranks: the
    same bits whatever the library, and wherever the ranks are. Opened again, it is the same world. Raises BnfuseError
    where the ranks do not find each other, for a kind that cannot serve here, and for `deterministic` between GPUs,
    where NCCL has an order of its own: the same in each run of as many ranks on the same machines.
    """
    found = launched()
    if kind not in (None, *KINDS):
        raise BnfuseError(f"world '{kind}' is unknown: it is one of {', '.join(KINDS)}")
    check_real("limit", limit)
    if found is None:
        if kind is not None:
            raise BnfuseError(f"world '{kind}' is of several processes: start them with mpirun -n N, torchrun or srun")
        return None
    chosen = kind or kind_for(found, target)
    if (chosen, deterministic) not in _open:
        _open[chosen, deterministic] = opened(chosen, found, target, limit, deterministic)
    world = _open[chosen, deterministic]
    world.limit = limit
    return world


def kind_for(found: Launched, target: str, environ: Mapping[str, str] = os.environ) -> str:
    """Choose what carries the exchanges."""
    if target.partition(":")[0] == "cuda":
        return "nccl"
    return "mpi" if found.launcher == "mpirun" or UNDER_PMIX in environ else "gloo"


def opened(kind: str, found: Launched, target: str, limit: float, deterministic: bool) -> World:
    """Open a world of one kind. That of GPUs finds its ranks through one of CPUs."""
    if (kind == "nccl") != (target.partition(":")[0] == "cuda"):
        what = f"world '{kind}' cannot serve a step on '{target}': nccl is for cuda, mpi and gloo for cpu"
        raise everywhere(BnfuseError(what))
    if kind == "nccl" and deterministic:
        what = "on GPUs NCCL has an order of its own, the same in each run of as many ranks on the same machines"
        raise everywhere(BnfuseError(f"deterministic is for ranks on CPUs: {what}: leave it out"))
    if kind == "nccl":
        from bnfuse.parallel.nccl import open_nccl

        return open_nccl(opened(kind_for(found, "cpu"), found, "cpu", limit, False))
    if kind == "mpi":
        from bnfuse.parallel.mpi import MpiWorld

        return MpiWorld(found, limit, deterministic=deterministic)
    from bnfuse.parallel.gloo import GlooWorld

    return GlooWorld(found, limit, deterministic=deterministic)
