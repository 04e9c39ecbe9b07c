"""The software-managed cache of [Tsai21], chapter 4: what is loaded, kept, streamed and written out, and where.

    workload.touches               who touches what, when next
    residency(workload, capacity)  Belady's replacement: for each layer its loads, its streams and what leaves after it

Whole tensors are the units. A layer whose tensors fit together holds all of them; otherwise those that are there
already, then weights, then those that are used again soonest are held, and the others stream through the cache row by
row, once for each sweep (section 4.3.3). Replacing evicts the tensor whose next use is farthest. Time has no part in
this: what is evicted before its next use is known before the iteration runs, so it can leave right after its last use
(look-ahead offload), and what must be loaded can be issued ahead (prefetching.py).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from bnfuse.estimating.workload import NEVER, Touch, Workload


class Load(NamedTuple):
    """A tensor that layer `layer` needs whole and that is not there; it can be fetched after layer `after`."""

    layer: int
    tensor: int
    bytes: int
    after: int


@dataclasses.dataclass
class Residency:
    """Per layer: what it loads, bytes that stream in and out, bytes written out after it, bytes of the cache in use.

    `occupied` counts what is kept from before and what the layer holds, not what is prefetched for later layers.
    """

    loads: list[Sequence[Load]]
    stream_in: list[int]
    stream_out: list[int]
    leaving: list[int]
    occupied: list[int]


def residency(workload: Workload, capacity: int, *, look_ahead: bool) -> Residency:
    """Run a workload through a cache of `capacity` bytes. Gives what is loaded and stored, and when."""
    cache = Cache(workload, capacity, look_ahead)
    for index, touched in enumerate(workload.touches):
        cache.run(index, touched)
    return cache.result()


class Cache:
    """The state of the cache while a workload runs: what is in it, and what of that memory lacks."""

    def __init__(self, workload: Workload, capacity: int, look_ahead: bool) -> None:
        self.capacity = capacity
        self.look_ahead = look_ahead
        count, layers = len(workload.tensors), len(workload.layers)
        self.present = [0] * count  # bytes in the cache
        self.dirty = [0] * count  # of these, bytes that memory lacks
        self.until = [NEVER] * count  # next use
        self.last = [-1] * count  # last layer that touched it
        self.used = 0
        self.farthest: list[tuple[int, int]] = []  # heap of (-next use, tensor), entries may be out of date
        self.loads: list[Sequence[Load]] = [()] * layers
        self.stream_in = [0] * layers
        self.stream_out = [0] * layers
        self.leaving = [0] * layers
        self.occupied = [0] * layers
        self.change = [0] * (layers + 1)  # of `occupied`, from a layer on: what leaves earlier than space needs it

    def run(self, index: int, touched: list[Touch]) -> None:
        """Run layer `index`, which touches these tensors."""
        held, streamed = self.divided(touched)
        for touch in streamed:
            self.stream(index, touch)
        self.make_room(index, held)
        for touch in held:
            self.hold(index, touch)
        self.occupied[index] = self.used
        for touch in held:
            self.release(index, touch)

    def divided(self, touched: list[Touch]) -> tuple[list[Touch], list[Touch]]:
        """Tell what the layer holds whole, and what streams."""
        present, room = self.present, self.capacity
        total = 0
        for touch in touched:
            size, there = touch.size, present[touch.tensor]
            total += size if size > there else there
        if total <= room:
            return touched, []
        held, streamed = [], []
        for touch in sorted(touched, key=lambda t: (not present[t.tensor], not t.weight, t.until)):
            size = max(touch.size, present[touch.tensor])
            if size <= room:
                room -= size
                held.append(touch)
            else:
                streamed.append(touch)
        return held, streamed

    def stream(self, index: int, touch: Touch) -> None:
        """Let a tensor pass through the cache without staying there."""
        tensor = touch.tensor
        if self.present[tensor]:
            self.evict(index, tensor)
        self.stream_in[index] += touch.swept_in
        if touch.written and (touch.until != NEVER or touch.kept):
            self.stream_out[index] += touch.swept_out
        self.last[tensor] = index

    def make_room(self, index: int, held: list[Touch]) -> None:
        """Evict until what is held fits beside the rest. What is held is used now, so it is never the farthest."""
        present, until, heap = self.present, self.until, self.farthest
        more = sum(max(0, touch.size - present[touch.tensor]) for touch in held)
        while self.used + more > self.capacity:
            negative, tensor = heapq.heappop(heap)
            if present[tensor] and until[tensor] == -negative:
                self.evict(index, tensor)

    def evict(self, index: int, tensor: int) -> None:
        """Take a tensor out; what memory lacks of it is stored."""
        size, last = self.present[tensor], self.last[tensor]
        if self.look_ahead:
            self.leaving[last] += self.dirty[tensor]
            self.change[last + 1] -= size
            self.change[index] += size
        else:
            self.leaving[index - 1] += self.dirty[tensor]
            self.last[tensor] = index - 1
        self.drop(tensor)

    def drop(self, tensor: int) -> None:
        """Forget a tensor: its value is dead."""
        self.used -= self.present[tensor]
        self.present[tensor] = self.dirty[tensor] = 0

    def hold(self, index: int, touch: Touch) -> None:
        """Bring what a layer reads of a tensor into the cache, and keep it there."""
        tensor, before = touch.tensor, self.present[touch.tensor]
        if touch.read > before:
            load = Load(index, tensor, touch.read - before, self.last[tensor])
            self.loads[index] = (*self.loads[index], load)
        now = max(touch.size, before)
        self.present[tensor] = now
        self.used += now - before
        if touch.written:
            self.dirty[tensor] = min(now, self.dirty[tensor] + touch.written)
        self.last[tensor] = index

    def release(self, index: int, touch: Touch) -> None:
        """Decide what becomes of a tensor when the layer is done."""
        tensor = touch.tensor
        if touch.until != NEVER:
            self.until[tensor] = touch.until
            heapq.heappush(self.farthest, (-touch.until, tensor))
            return
        if touch.kept:
            self.leaving[index] += self.dirty[tensor]
        self.drop(tensor)

    def result(self) -> Residency:
        """Sum up what was loaded, stored and held."""
        total = 0
        for index, change in enumerate(self.change[:-1]):
            total += change
            self.occupied[index] += total
        return Residency(self.loads, self.stream_in, self.stream_out, self.leaving, self.occupied)
