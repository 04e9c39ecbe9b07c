"""Stand-ins for ranks: threads that meet at each message, and NCCL's bindings over the stand-in for the driver.

    ranks = Meeting(2)
    found = ranks.run(lambda rank: ...)          # a thread a rank; gives what each gave, raises what one raised

`ThreadWorld(ranks, rank)` is a world of the host. `FakeNccl(ranks, rank, fake)` enqueues like NCCL on the streams of
`fake`: what is captured becomes a node of the graph. What ranks exchange must be alike on all of them.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from fake_cuda import FakeCuda, floats

SECONDS = 20.0  # that a rank waits for the others before the test fails


class Meeting:
    """Where the ranks of a test meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._given: list[Any] = [None] * size

    def gather(self, rank: int, what: Any) -> list[Any]:
        """Everybody's, in the order of ranks."""
        self._given[rank] = what
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """A thread a rank. One that fails ends the waiting of the others."""
        found: list[Any] = [None] * self.size
        failed: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                found[rank] = work(rank)
            except BaseException as error:
                failed.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * SECONDS)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        real = [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
        if failed:
            raise (real or failed)[0]
        return found


class ThreadWorld:
    """A world of the host."""

    name = "threads"

    def __init__(self, ranks: Meeting, rank: int, limit: float = 5.0) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size
        self.local_rank, self.local_size, self.limit = rank, ranks.size, limit

    def gather(self, data: bytes) -> list[bytes]:
        return self.ranks.gather(self.rank, data)

    def broadcast(self, data: bytes) -> bytes:
        return self.gather(data)[0]

    def sum(self, array: np.ndarray) -> None:
        total = sum(self.ranks.gather(self.rank, array.copy()))
        array[...] = total

    def start(self, exchange: Any) -> Any:
        raise AssertionError("a step on GPUs exchanges nothing through the host")

    def end(self, message: str, status: int) -> Any:
        raise SystemExit(status)


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

    def __init__(self, ranks: Meeting, rank: int, cuda: FakeCuda, version: int = 22809) -> None:
        self.ranks, self.rank, self.cuda, self.version = ranks, rank, cuda, version
        self.log: list[list[tuple[str, int]]] = []
        self.async_error: int = Result.Success
        self.aborted = False
        self.fail = ""
        self._group: list[tuple[str, int, Callable[[], None]]] | None = None
        self._stream = 0

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        return bytes(range(128))

    def comm_init_rank_scalable(self, size: int, rank: int, count: int, unique: bytearray, config: int) -> str:
        assert isinstance(unique, bytearray) and bytes(unique) == bytes(range(128)) and (count, config) == (1, 0)
        assert self.ranks.gather(self.rank, (size, rank)) == [(size, other) for other in range(size)]
        return "communicator"

    def group_start(self) -> None:
        self._group = []

    def group_end(self) -> None:
        group, self._group = self._group, None
        self._enqueue(group or [])

    def all_reduce(self, source: int, target: int, count: int, kind: int, op: int, comm: str, stream: int) -> None:
        assert source == target and op == RedOp.Sum

        def run() -> None:
            own = view(source, count, kind)
            own[...] = sum_of(self.ranks.gather(self.rank, own.copy()))

        self._call("sum", count, comm, stream, run)

    def all_gather(self, source: int, target: int, count: int, kind: int, comm: str, stream: int) -> None:
        def run() -> None:
            everyones = self.ranks.gather(self.rank, view(source, count, kind).copy())
            view(target, count * self.ranks.size, kind)[...] = np.concatenate(everyones)

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
            assert len(set(map(str, self.ranks.gather(self.rank, message)))) == 1, "ranks exchange different things"
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
