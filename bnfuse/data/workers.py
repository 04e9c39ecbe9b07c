"""Threads that decode images: Pillow decodes and resizes without Python's lock, so they use all the cores there are.

They belong to the process, end with it, and are made anew in a forked child.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from bnfuse.core.processors import usable_cpus

A = TypeVar("A")
B = TypeVar("B")
MOST = 64  # more of them wait for Python's lock
IN_HAND = 4  # tasks for each worker that are handed out at once


def default_workers(busy: int = 0, sharing: int = 1) -> int:
    """Choose how many decode: as many as there are cores that nobody else keeps busy, one at least. Of processes that
    share the cores each has its part of them."""
    return max(1, min(MOST, usable_cpus() // sharing - busy))


def threads(count: int) -> ThreadPoolExecutor:
    """Give the process's pool of so many threads."""
    return _pool(count, os.getpid())


@functools.lru_cache(maxsize=4)
def _pool(count: int, _process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="bnfuse-worker")


def each(work: Callable[[A], B], items: Sequence[A], workers: int) -> Iterator[B]:
    """Apply `work` to all items, and give the results in order. What is handed out is bounded, and dropped where the
    caller stops. Not to be called by a worker."""
    if workers <= 1:
        yield from map(work, items)
        return
    pool, waiting = threads(workers), list[Future[B]]()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > IN_HAND * workers:
                yield waiting.pop(0).result()
        while waiting:
            yield waiting.pop(0).result()
    finally:
        for future in waiting:
            future.cancel()
