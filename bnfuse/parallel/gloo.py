"""A world whose exchanges are gloo's, through torch.distributed: ranks on CPUs under torchrun, or srun without MPI.

torch is imported when a world is opened. Gloo has threads of its own, so exchanges go on while kernels run. Its sums
follow from the number of ranks and of elements; with `deterministic` they are taken in the order of ranks.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from bnfuse.core.errors import BnfuseError, LostRankError, everywhere, first_line
from bnfuse.parallel.launched import Launched
from bnfuse.parallel.packing import is_small, packed, sum_in_order, unpack
from bnfuse.parallel.waiting import lost, wait_until
from bnfuse.parallel.world import Exchanged, Request

WORST = 1  # exit status of a rank that ends because others are gone


class GlooWorld:
    """See `World`."""

    name = "gloo"

    def __init__(self, found: Launched, limit: float, *, deterministic: bool = False) -> None:
        try:
            import torch.distributed
        except ImportError:
            raise BnfuseError(
                f"ranks under {found.launcher} exchange by gloo, which is torch's: pip install torch, or start them "
                "with mpirun and bnfuse[mpi]"
            ) from None
        self._torch, self.deterministic = torch, deterministic
        self.limit = limit
        self.rank, self.size = found.rank, found.size
        self.local_rank, self.local_size = found.local_rank, found.local_size
        self._group = joined(torch.distributed, found, limit)
        self.is_lost = False
        self._hook = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._leave)

    def start(self, exchange: Exchanged) -> Request:
        """Begin an exchange. Its arrays are neither read nor written until it is done."""
        if exchange.kind == "gather":
            works = [self._gather_into(own, all_) for own, all_ in exchange.pairs]
            return GlooRequest(self, works, None, "gathering statistics")
        arrays = exchange.arrays
        what = f"summing {sum(a.nbytes for a in arrays)} bytes"
        if self.deterministic:
            message = packed(arrays)
            rows = np.empty((self.size, message.size), message.dtype)
            works = [self._gather_into(message, rows)]
            return GlooRequest(self, works, lambda: unpack(sum_in_order(rows), arrays), what)
        if is_small(arrays):
            message = packed(arrays)
            return GlooRequest(self, [self._sum_of(message)], lambda: unpack(message, arrays), what)
        return GlooRequest(self, [self._sum_of(array) for array in arrays], None, what)

    def _sum_of(self, array: np.ndarray) -> Any:
        tensor = self._torch.from_numpy(array)
        return self._begun(lambda: self._torch.distributed.all_reduce(tensor, group=self._group, async_op=True))

    def _gather_into(self, own: np.ndarray, everyone: np.ndarray) -> Any:
        parts = list(self._torch.from_numpy(everyone.reshape(self.size, -1)).unbind(0))
        sent = self._torch.from_numpy(own.reshape(-1))
        return self._begun(
            lambda: self._torch.distributed.all_gather(parts, sent, group=self._group, async_op=True),
        )

    def _begun(self, begin: Callable[[], Any]) -> Any:
        try:
            return begin()
        except RuntimeError as error:
            self.is_lost = True
            raise lost(self, f"has lost another one ({first_line(error)})") from None

    def sum(self, array: np.ndarray) -> None:
        """Sum an array over the ranks, in place, and wait for it."""
        self.start(Exchanged("sum", (array,))).wait()

    def gather(self, data: bytes) -> list[bytes]:
        """Give every rank's bytes, in the order of ranks, on every rank."""
        counts = np.zeros(self.size, np.int64)
        self.start(Exchanged("gather", (np.array([len(data)], np.int64), counts))).wait()
        own = np.zeros(int(counts.max(initial=1)), np.uint8)
        own[: len(data)] = np.frombuffer(data, np.uint8)
        rows = np.zeros((self.size, own.size), np.uint8)
        if own.size:
            self.start(Exchanged("gather", (own, rows))).wait()
        return [row[:count].tobytes() for row, count in zip(rows, counts.tolist(), strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        """Give rank 0's bytes on every rank."""
        count = np.array([len(data)], np.int64)
        self._from_first(count)
        found = np.frombuffer(bytearray(data) if self.rank == 0 else bytearray(int(count[0])), np.uint8)
        if found.size:
            self._from_first(found)
        return found.tobytes()

    def _from_first(self, array: np.ndarray) -> None:
        tensor, distributed = self._torch.from_numpy(array), self._torch.distributed
        work = self._begun(lambda: distributed.broadcast(tensor, group_src=0, group=self._group, async_op=True))
        GlooRequest(self, [work], None, "the first rank's state").wait()

    def end(self, message: str, status: int) -> NoReturn:
        """End this rank; torchrun and srun end the others when one has failed."""
        if message:
            os.write(2, f"{message}\n".encode())
        os._exit(status)

    def _uncaught(self, *error: Any) -> None:
        """End this process for an exception that nobody caught: torch would wait for the other ranks."""
        self._hook(*error)
        self.end("", WORST)

    def _leave(self) -> None:
        if self.is_lost:
            self.end("", WORST)


class GlooRequest:
    """An exchange that is under way."""

    def __init__(self, world: GlooWorld, works: list[Any], finish: Callable[[], None] | None, what: str) -> None:
        self._world, self._works, self._finish, self._what = world, works, finish, what

    def test(self) -> bool:
        """Tell whether it is done."""
        while self._works and self._works[0].is_completed():
            try:
                self._works[0].wait()
            except RuntimeError as error:
                self._world.is_lost = True
                raise lost(self._world, f"has lost another one ({first_line(error)})") from None
            del self._works[0]
        if not self._works and self._finish is not None:
            self._finish()
            self._finish = None
        return not self._works

    def wait(self) -> None:
        """Wait until it is done. Raises LostRankError after the limit."""
        try:
            wait_until(self.test, self._world, self._what)
        except LostRankError:
            self._world.is_lost = True
            raise


def joined(distributed: Any, found: Launched, limit: float) -> Any:
    """Find the other ranks. Gives a group of our own."""
    if not distributed.is_initialized():
        where = "env://"
        if found.launcher == "slurm":
            where = f"tcp://{found.address}:{found.port}"
        elif not found.address or not found.port:
            raise everywhere(
                BnfuseError("MASTER_ADDR and MASTER_PORT are not set: torchrun sets them, and says where ranks meet")
            )
        seconds = datetime.timedelta(seconds=limit)
        from torch.distributed.rendezvous import rendezvous

        try:
            store, _, _ = next(rendezvous(where, found.rank, found.size, timeout=seconds))
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # they may share a store
            store = distributed.PrefixStore(f"attempt {attempt}", store)
            distributed.init_process_group("gloo", None, seconds, rank=found.rank, world_size=found.size, store=store)
        except (RuntimeError, ValueError) as error:
            raise lost(found, f"has not met the others at {found.address}:{found.port} ({first_line(error)})") from None
    return distributed.new_group(backend="gloo")
