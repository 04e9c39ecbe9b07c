"""A stand-in for NCCL's bindings over the stand-in for the driver; ranks are threads (thread_ranks.py).

`FakeNccl(world, fake)` enqueues like NCCL on the streams of `fake`: what is captured becomes a node of the graph, which
waits for the other ranks when it runs. What ranks exchange must be alike on all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from fake_cuda import FakeCuda, floats
from thread_ranks import ThreadWorld


class DataType(enum.IntEnum):
    Int32, Int64, Float16, Float32, Float64, Bfloat16 = 2, 4, 6, 7, 8, 9


class RedOp(enum.IntEnum):
    Sum = 0


class Result(enum.IntEnum):
    Success, RemoteError, InProgress = 0, 6, 7


class FakeNccl:
    """The functions of nccl.bindings.nccl that the world calls. `log` has what was enqueued, message by message."""

    DataType, RedOp, Result = DataType, RedOp, Result

    class NCCLError(Exception):
        pass

    def __init__(self, world: ThreadWorld, cuda: FakeCuda, version: int = 22809) -> None:
        self.world, self.cuda, self.version = world, cuda, version
        self._number = 0
        self.log: list[list[tuple[str, int]]] = []
        self.async_error: int = Result.Success
        self.aborted = False
        self.fail = ""
        self._group: list[tuple[str, int, Callable[[], None]]] | None = None
        self._stream = 0

    def everyones(self, what: Any) -> list[Any]:
        """What each rank gave at this place, in their order."""
        self._number += 1
        key = "nccl", self._number
        self.world.meeting.give(key, self.world.rank, what)
        return self.world.until(key)

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        return bytes(range(128))

    def comm_init_rank_scalable(self, size: int, rank: int, count: int, unique: bytearray, config: int) -> str:
        assert isinstance(unique, bytearray) and bytes(unique) == bytes(range(128)) and (count, config) == (1, 0)
        assert (size, rank) == (self.world.size, self.world.rank)
        assert self.everyones(rank) == list(range(size))
        return "communicator"

    def group_start(self) -> None:
        self._group = []

    def group_end(self) -> None:
        group, self._group = self._group, None
        if group:
            self._enqueue(group)

    def all_reduce(self, source: int, target: int, count: int, kind: int, op: int, comm: str, stream: int) -> None:
        assert source == target and op == RedOp.Sum

        def run() -> None:
            own = view(source, count, kind)
            own[...] = sum_of(self.everyones(own.copy()))

        self._call("sum", count, comm, stream, run)

    def all_gather(self, source: int, target: int, count: int, kind: int, comm: str, stream: int) -> None:
        def run() -> None:
            everyones = self.everyones(view(source, count, kind).copy())
            view(target, count * self.world.size, kind)[...] = np.concatenate(everyones)

        self._call("gather", count, comm, stream, run)

    def _call(self, what: str, count: int, comm: str, stream: int, run: Callable[[], None]) -> None:
        assert comm == "communicator"
        assert self.cuda.contexts, "no context is current"
        if self.fail:
            raise self.NCCLError(self.fail)
        self._stream = stream
        if self._group is None:
            self._enqueue([(what, count, run)])
        else:
            self._group.append((what, count, run))

    def _enqueue(self, calls: Sequence[tuple[str, int, Callable[[], None]]]) -> None:
        message = [(what, count) for what, count, _ in calls]
        self.log.append(message)

        def run() -> None:
            assert len(set(map(str, self.everyones(message)))) == 1, "ranks exchange different things"
            for _, _, one in calls:
                one()

        self.cuda.enqueue(self._stream, run, "+".join(what for what, _ in message))

    def comm_get_async_error(self, comm: str) -> int:
        return self.async_error

    def get_error_string(self, error: int) -> str:
        return "remote process exited or there was a network error"

    def comm_abort(self, comm: str) -> None:
        self.aborted = True


def view(address: int, count: int, kind: int) -> np.ndarray:
    return floats(address, count, DataType(kind).name.lower())


def sum_of(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """In the order of ranks, in the type that is sent, as NCCL adds."""
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total
