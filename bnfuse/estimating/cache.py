"""The software-managed cache of papers/004, chapter 4: what is loaded, kept, streamed and written out, and where.

    trace(workload)            who touches what, when next
    residency(trace, capacity) Belady's replacement: for each layer its loads, its streams and what leaves after it

Whole tensors are the units. A layer whose tensors fit together holds all of them; otherwise those that are there
already, then weights, then those that are used again soonest are held, and the others stream through the cache row by
row, once for each sweep (section 4.3.3). Replacing evicts the tensor whose next use is farthest. Time has no part in
this: what is evicted before its next use is known before the iteration runs, so it can leave right after its last use
(look-ahead offload), and what must be loaded can be issued ahead (prefetching.py).
"""

from __future__ import annotations

import dataclasses
import heapq
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from bnfuse.estimating.workload import Layer, Workload

NEVER = 1 << 60
TRACES: dict[int, list[list[Touch]]] = {}  # by id of the workload


class Touch(NamedTuple):
    """What one layer does with one tensor.

    `size` is what it holds of it; `until` the layer that needs its value next (NEVER: its value is dead here); `kept`:
    memory must have this value in the end.

    `swept_in` and `swept_out` are the bytes that cross the bus if it streams, all sweeps together.
    """

    tensor: int
    read: int
    written: int
    size: int
    swept_in: int
    swept_out: int
    until: int
    kept: bool
    weight: bool


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


def trace(workload: Workload) -> list[list[Touch]]:
    """For each layer its tensors, merged where it reads and writes the same. Remembered while the workload lives, for
    sweeps."""
    key = id(workload)
    if key not in TRACES:
        forget = weakref.finalize(workload, TRACES.pop, key, None)
        forget.atexit = False
        TRACES[key] = traced(workload)
    return TRACES[key]


def traced(workload: Workload) -> list[list[Touch]]:
    found: list[list[Touch]] = []
    later: dict[int, tuple[int, bool]] = {}  # tensor -> the next layer that touches it, and whether it needs the value
    for index in range(len(workload.layers) - 1, -1, -1):
        touches = merged(workload, workload.layers[index], later)
        for touch in touches:
            covers = touch.written >= workload.tensors[touch.tensor].bytes
            later[touch.tensor] = (index, touch.read > 0 or not covers)
        found.append(touches)
    found.reverse()
    return found


def merged(workload: Workload, layer: Layer, later: dict[int, tuple[int, bool]]) -> list[Touch]:
    sums: dict[int, list[int]] = {}
    for position, accesses in ((0, layer.reads), (1, layer.writes)):
        for access in accesses:
            entry = sums.setdefault(access.tensor, [0, 0, 0, 0])
            entry[position] += access.bytes
            entry[position + 2] += access.bytes * access.sweeps
    touches = []
    for index, (read, written, swept_in, swept_out) in sums.items():
        tensor = workload.tensors[index]
        until, needed = later.get(index, (NEVER, False))
        kept = tensor.kept and index not in later
        read, written = min(read, tensor.bytes), min(written, tensor.bytes)
        size, weight = max(read, written), tensor.kind == "weight"
        until = until if needed else NEVER
        touches.append(Touch(index, read, written, size, swept_in, swept_out, until, kept, weight))
    return touches


def residency(workload: Workload, touches: list[list[Touch]], capacity: int, *, look_ahead: bool) -> Residency:
    cache = Cache(workload, capacity, len(touches), look_ahead)
    for index, touched in enumerate(touches):
        cache.run(index, touched)
    return cache.result()


class Cache:
    def __init__(self, workload: Workload, capacity: int, layers: int, look_ahead: bool) -> None:
        self.capacity = capacity
        self.look_ahead = look_ahead
        count = len(workload.tensors)
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
        """What the layer holds whole, and what streams."""
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
        tensor = touch.tensor
        if self.present[tensor]:
            self.evict(index, tensor)
        self.stream_in[index] += touch.swept_in
        if touch.written and (touch.until != NEVER or touch.kept):
            self.stream_out[index] += touch.swept_out
        self.last[tensor] = index

    def make_room(self, index: int, held: list[Touch]) -> None:
        """Evicts until what is held fits beside the rest. What is held is used now, so it is never the farthest."""
        present, until, heap = self.present, self.until, self.farthest
        more = sum(max(0, touch.size - present[touch.tensor]) for touch in held)
        while self.used + more > self.capacity:
            negative, tensor = heapq.heappop(heap)
            if present[tensor] and until[tensor] == -negative:
                self.evict(index, tensor)

    def evict(self, index: int, tensor: int) -> None:
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
        self.used -= self.present[tensor]
        self.present[tensor] = self.dirty[tensor] = 0

    def hold(self, index: int, touch: Touch) -> None:
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
        tensor = touch.tensor
        if touch.until != NEVER:
            self.until[tensor] = touch.until
            heapq.heappush(self.farthest, (-touch.until, tensor))
            return
        if touch.kept:
            self.leaving[index] += self.dirty[tensor]
        self.drop(tensor)

    def result(self) -> Residency:
        total = 0
        for index, change in enumerate(self.change[:-1]):
            total += change
            self.occupied[index] += total
        return Residency(self.loads, self.stream_in, self.stream_out, self.leaving, self.occupied)
