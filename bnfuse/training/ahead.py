"""Items made ahead by a thread, and who waits for whom.

    with prefetched(loader.batches(first=1, last=10)) as batches:
        batches.filled(2.0)                                  # what is made in a second while nobody takes
        for batch in batches: ...
    batches.waited                                           # seconds that the loop stood still

The queue is bounded, the thread ends with the `with` block whatever ends that, and an error in the thread is raised
where the item would have come.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
DEPTH = 3  # items that wait
PATIENCE = 0.1  # seconds after which a thread that waits looks whether it is still wanted
LOOK = 0.002  # seconds between two looks at a queue that fills


class Ahead(Generic[T]):
    """The items, in order. `waited` are the seconds that whoever takes them has waited for them."""

    def __init__(self, source: Iterable[T], depth: int = DEPTH) -> None:
        self.waited = 0.0
        self._source, self._depth = source, depth
        self._ready: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(depth)
        self._unwanted, self._ended, self._made = threading.Event(), False, 0
        self._begun = self._first = self._latest = time.perf_counter()
        self._thread = threading.Thread(target=self._work, name="bnfuse-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        begun = time.perf_counter()
        kind, item = self._ready.get()
        self.waited += time.perf_counter() - begun
        if kind == "item":
            return item  # type: ignore[return-value]
        self._ended = True
        if kind == "error":
            assert isinstance(item, BaseException)
            raise item
        raise StopIteration

    def filled(self, seconds: float) -> float:
        """Wait for the first item, and then, for so long at most, until as many are ready as may be.

        Gives how many were made in a second from the first on, or up to it where there is no other; 0 where there is
        none. For before the first is taken."""
        while self._thread.is_alive() and not self._ready.full():
            if self._made and time.perf_counter() - self._begun > seconds:
                break
            time.sleep(LOOK)
        if self._made < 2:
            return self._made / (time.perf_counter() - self._begun)
        return (self._made - 1) / max(self._latest - self._first, 1e-9)

    def close(self) -> None:
        """End the thread, and drop what waits."""
        self._unwanted.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._thread.join(timeout=10)

    def _offer(self, kind: str, item: T | BaseException | None) -> bool:
        while not self._unwanted.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put((kind, item), timeout=PATIENCE)
                return True
        return False

    def _work(self) -> None:
        try:
            for item in self._source:
                self._latest = time.perf_counter()
                self._first = self._first if self._made else self._latest
                self._made += 1
                if not self._offer("item", item):
                    return
            self._offer("end", None)
        except BaseException as error:
            self._offer("error", error)
        finally:
            if (close := getattr(self._source, "close", None)) is not None:
                close()  # a generator ends its own threads


@contextlib.contextmanager
def prefetched(source: Iterable[T], depth: int = DEPTH) -> Iterator[Ahead[T]]:
    """Make the items of `source`, in order, up to `depth` of them ahead by a thread."""
    ahead = Ahead(source, depth)
    try:
        yield ahead
    finally:
        ahead.close()
