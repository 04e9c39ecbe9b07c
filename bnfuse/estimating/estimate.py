"""Time and traffic of one training iteration on a hardware ([Tsai21], chapter 4).

    residency       what each layer loads, streams and lets go       (cache.py)
    issued          when the loads are issued                        (prefetching.py)
    Bus             one transfer after another at the full bandwidth: a layer stalls until what it needs has come

A layer's time is its wait for the tensors that it needs whole, then its computing or, if that takes longer, its
streaming. What nothing waits for crosses the bus when it is idle.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from bnfuse.estimating import cache, prefetching
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.cache import Load
from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.result import Estimate, LayerEstimate
from bnfuse.estimating.workload import Layer, Workload

__all__ = ["Assumptions", "Estimate", "LayerEstimate", "estimate"]


def estimate(workload: Workload, hardware: Hardware, assumptions: Assumptions | None = None) -> Estimate:
    """Give the estimate of one iteration, which starts with an empty cache and ends when memory holds all it must."""
    chosen = assumptions or Assumptions()
    resident = cache.residency(workload, hardware.cache, look_ahead=chosen.look_ahead)
    flops = [operations(layer, chosen) for layer in workload.layers]
    streamed = [0] * len(flops)
    if not chosen.streams_overlap:  # what is added at the memory's bandwidth passes the cache meanwhile
        streamed = [i + o for i, o in zip(resident.stream_in, resident.stream_out, strict=True)]
    compute = [compute_s(*each, hardware) for each in zip(workload.layers, flops, streamed, strict=True)]
    issued = prefetching.issued(resident, hardware.cache, hardware.bandwidth, compute, chosen.prefetch)
    bus = Bus(hardware, chosen)
    rows = []
    for index, layer in enumerate(workload.layers):
        loads = resident.loads[index]
        into, out = resident.stream_in[index], resident.stream_out[index]
        bus.start(issued.get(index, ()))
        bus.free(hardware.cache - resident.occupied[index])
        bus.fetch(loads)
        bus.compute(compute[index], into, out)
        bus.leave(resident.leaving[index])
        if index == len(workload.layers) - 1:
            bus.drain()
        rows.append(
            LayerEstimate(
                layer.name,
                layer.type,
                layer.phase,
                bus.time,
                compute[index],
                bus.time - compute[index],
                into + sum(load.bytes for load in loads),
                out + resident.leaving[index],
                bus.moved,
                flops[index],
                layer.part,
            )
        )
        bus.next()
    return Estimate(workload.name, workload.batch, hardware, chosen, tuple(rows), workload.precision)


def operations(layer: Layer, assumptions: Assumptions) -> float:
    """Tell what a layer takes of the peak rate: a workload counts a multiply-add as two."""
    return layer.flops * assumptions.mac_operations / 2 if layer.is_dense else layer.flops


def compute_s(layer: Layer, flops: float, streamed: int, hardware: Hardware) -> float:
    """Give the seconds of computing, or of moving within the cache what does not stream, if that takes longer."""
    time = flops / hardware.flops
    if hardware.cache_bandwidth is not None:
        touched = sum(a.bytes * a.sweeps for a in layer.accesses) - streamed
        time = max(time, touched / hardware.cache_bandwidth)
    return time


@dataclasses.dataclass
class Pending:
    bytes: float
    load: Load | None  # None: on its way out


class Bus:
    """The memory bus while one layer runs: `time` since the layer began, `moved` bytes since then."""

    def __init__(self, hardware: Hardware, assumptions: Assumptions) -> None:
        self.bandwidth = hardware.bandwidth
        self.assumptions = assumptions
        self.time = 0.0
        self.moved = 0.0
        self.pending: deque[Pending] = deque()
        self.on_its_way: dict[Load, Pending] = {}
        self.going_out = 0.0
        self.own = 0.0  # bytes of this layer's whole inputs that come while it computes

    def next(self) -> None:
        self.time = self.moved = 0.0

    def start(self, loads: Iterable[Load]) -> None:
        for load in loads:
            entry = Pending(load.bytes, load)
            self.on_its_way[load] = entry
            self.pending.append(entry)

    def leave(self, count: int) -> None:
        if count:
            self.pending.append(Pending(count, None))
            self.going_out += count

    def free(self, room: int) -> None:
        """Wait until what is on its way out leaves the layer its space."""
        if not self.assumptions.leaving_holds_space or self.going_out <= room:
            return
        ahead: list[Pending] = []
        while self.going_out > room and self.pending:
            entry = self.pending.popleft()
            if entry.load is not None and self.assumptions.demand_first:
                ahead.append(entry)
                continue
            if entry.load is None:
                part = min(entry.bytes, self.going_out - room)
                self.going_out -= part
            else:
                part = entry.bytes
            self.wait_for(part)
            entry.bytes -= part
            if entry.bytes:
                self.pending.appendleft(entry)
        self.pending.extendleft(reversed(ahead))

    def fetch(self, loads: Iterable[Load]) -> None:
        """Wait for loads of this layer that have not come."""
        missing = 0.0
        for load in loads:
            entry = self.on_its_way.pop(load, None)
            missing += load.bytes if entry is None else entry.bytes
            if entry is not None:
                entry.bytes = 0.0
        if missing and not self.assumptions.demand_first:
            self.drain()
        self.own = missing if self.assumptions.loads_overlap else 0.0
        if not self.assumptions.loads_overlap:
            self.wait_for(missing)

    def compute(self, compute: float, into: int, out: int) -> None:
        streamed = self.own + into + out
        if streamed and not self.assumptions.demand_first:
            self.drain()
        needed = streamed / self.bandwidth
        took = max(compute, needed) if self.assumptions.streams_overlap else compute + needed
        self.time += took
        self.moved += streamed
        self.use_idle(took - needed)

    def use_idle(self, time: float) -> None:
        room = time * self.bandwidth
        while room > 0 and self.pending:
            entry = self.pending[0]
            part = min(room, entry.bytes)
            entry.bytes -= part
            room -= part
            self.moved += part
            if entry.load is None:
                self.going_out -= part
            if entry.bytes <= 0:
                self.pending.popleft()

    def drain(self) -> None:
        """Wait for all that was issued."""
        for entry in self.pending:
            self.wait_for(entry.bytes)
            entry.bytes = 0.0
        self.pending.clear()
        self.going_out = 0.0

    def wait_for(self, count: float) -> None:
        self.time += count / self.bandwidth
        self.moved += count
