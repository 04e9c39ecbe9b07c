"""Memory plan: which storages are alive when, and where in one arena each of them lies.

A storage lives from the first to the last launch that names it. Storages are placed from the largest to the
smallest, each in the tightest gap between those already placed that are alive at the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bnfuse.runtime.program.program import Launch, aligned


@dataclasses.dataclass(frozen=True)
class Interval:
    """A storage to be placed: its size in bytes and the first and last launch (inclusive) during which it lives."""

    storage: int
    bytes: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """Byte offsets of the storages in the arena, and its size."""

    offsets: dict[int, int]
    bytes: int


def lifetimes(
    launches: Sequence[Launch], sizes: Mapping[int, int], base: Mapping[int, int] | None = None
) -> list[Interval]:
    """Find the intervals of the storages in `sizes` (storage -> bytes). One that no launch names is left out.

    `base` maps a storage that is a part of another one to that one. What an exchange between ranks touches lives until
    the exchange must be done.
    """
    spans: dict[int, tuple[int, int]] = {}
    base = base or {}
    for index, launch in enumerate(launches):
        end = done_before(launches, index, base) if launch.exchanges else index
        for buffer in launch.buffers:
            storage = base.get(buffer.storage, buffer.storage)
            if storage in sizes:
                first, last = spans.get(storage, (index, index))
                spans[storage] = (first, max(last, end))
    return [Interval(storage, sizes[storage], *span) for storage, span in spans.items()]


def done_before(launches: Sequence[Launch], index: int, base: Mapping[int, int]) -> int:
    """Find the first launch that touches what an exchange does: until then it may be under way, and none of its memory
    is another's. The last launch of all where none does."""
    under_way = {base.get(buffer.storage, buffer.storage) for buffer in launches[index].buffers}
    for later in range(index + 1, len(launches)):
        if any(base.get(buffer.storage, buffer.storage) in under_way for buffer in launches[later].buffers):
            return later
    return len(launches) - 1


def place(intervals: Iterable[Interval]) -> Placement:
    """Place storages, best fit by decreasing size. Two that live at the same time never overlap."""
    chosen = sorted(intervals, key=lambda i: (-i.bytes, i.first, i.storage))
    # start and stop in the arena, first and last launch, by start; arrays, for a network has two thousand storages, and
    # each is held against all others
    placed = np.zeros((4, len(chosen)), np.int64)
    offsets: dict[int, int] = {}
    for count, interval in enumerate(chosen):
        size = aligned(interval.bytes)
        start, stop, first, last = placed[:, :count]
        busy = (first <= interval.last) & (interval.first <= last)
        offsets[interval.storage] = offset = tightest_gap(start[busy], stop[busy], size)
        at = int(np.searchsorted(start, offset))
        placed[:, at + 1 : count + 1] = placed[:, at:count]
        placed[:, at] = offset, offset + size, interval.first, interval.last
    return Placement(offsets, int(placed[1].max(initial=0)))


def tightest_gap(start: np.ndarray, stop: np.ndarray, size: int) -> int:
    """Find the offset of the smallest gap between what is taken that takes `size` bytes, or the end.

    Both are int64, sorted by start; what is taken may overlap.
    """
    ends = np.concatenate(([0], np.maximum.accumulate(stop)))  # what is behind all before
    gaps = start - ends[:-1]
    fits = gaps >= size
    if not fits.any():
        return int(ends[-1])
    return int(ends[np.argmin(np.where(fits, gaps, gaps.max() + 1))])


def lower_bound(intervals: Sequence[Interval], launches: int) -> int:
    """Count the most bytes that are alive during any one launch: no placement can be smaller."""
    change = [0] * (launches + 1)
    for i in intervals:
        change[i.first] += aligned(i.bytes)
        change[i.last + 1] -= aligned(i.bytes)
    alive = peak = 0
    for delta in change:
        alive += delta
        peak = max(peak, alive)
    return peak
