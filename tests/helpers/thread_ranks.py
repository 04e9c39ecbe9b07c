"""Ranks that are threads of one process: what worlds promise, without a launcher. Sums are in the order of ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from bnfuse.core.errors import LostRankError
from bnfuse.parallel.world import Exchanged

Result = TypeVar("Result")


class Meeting:
    """What all ranks have: what each of them gave to the exchange of a number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: dict[tuple[str, int], dict[int, Any]] = {}
        self.changed = threading.Condition()

    def give(self, key: tuple[str, int], rank: int, what: Any) -> None:
        with self.changed:
            self.given.setdefault(key, {})[rank] = what
            self.changed.notify_all()

    def found(self, key: tuple[str, int]) -> list[Any] | None:
        with self.changed:
            given = self.given.get(key, {})
            return [given[rank] for rank in range(self.size)] if len(given) == self.size else None


class ThreadWorld:
    """See bnfuse.parallel.World. `log` has what was begun and what was waited for, in order."""

    name = "threads"

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.local_rank, self.local_size = rank, meeting.size
        self.limit = 20.0
        self.number: dict[str, int] = {}
        self.log: list[tuple[str, str, int]] = []

    def _next(self, kind: str) -> tuple[str, int]:
        self.number[kind] = self.number.get(kind, 0) + 1
        return kind, self.number[kind]

    def start(self, exchange: Exchanged) -> ThreadRequest:
        arrays = exchange.arrays if exchange.kind == "sum" else [own for own, _ in exchange.pairs]
        key = self._next("exchange")
        self.meeting.give(key, self.rank, [array.copy() for array in arrays])
        self.log.append(("begin", exchange.kind, sum(array.nbytes for array in arrays)))
        return ThreadRequest(self, key, exchange)

    def sum(self, array: np.ndarray) -> None:
        self.start(Exchanged("sum", (array,))).wait()

    def gather(self, data: bytes) -> list[bytes]:
        key = self._next("gather")
        self.meeting.give(key, self.rank, data)
        return self.until(key)

    def broadcast(self, data: bytes) -> bytes:
        return self.gather(data)[0]

    def until(self, key: tuple[str, int]) -> list[Any]:
        end = time.monotonic() + self.limit
        while (found := self.meeting.found(key)) is None:
            if time.monotonic() > end:
                raise LostRankError(f"rank {self.rank} has waited for {key}")
            time.sleep(1e-4)
        return found

    def end(self, message: str, status: int) -> NoReturn:
        raise SystemExit(status)


class ThreadRequest:
    def __init__(self, world: ThreadWorld, key: tuple[str, int], exchange: Exchanged) -> None:
        self.world, self.key, self.exchange, self.is_done = world, key, exchange, False

    def test(self) -> bool:
        if not self.is_done and (found := self.world.meeting.found(self.key)) is not None:
            if self.exchange.kind == "sum":
                for index, array in enumerate(self.exchange.arrays):
                    array[...] = np.sum([parts[index] for parts in found], axis=0, dtype=np.float32)
            else:
                for index, (_, everyone) in enumerate(self.exchange.pairs):
                    everyone.reshape(len(found), -1)[...] = [parts[index].reshape(-1) for parts in found]
            self.is_done = True
        return self.is_done

    def wait(self) -> None:
        self.world.log.append(("wait", self.exchange.kind, self.key[1]))
        self.world.until(self.key)
        self.test()


def together(size: int, work: Callable[[ThreadWorld], Result]) -> list[Result]:
    """Run something on each rank, and give what each returns. Raises the first rank's error."""
    meeting = Meeting(size)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadWorld(meeting, rank))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[min(errors)]
    return [results[rank] for rank in range(size)]
