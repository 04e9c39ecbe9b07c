"""A worker's step as a schedule: how long each launch takes, and what is exchanged between which of them.

    launches   | forward ... | backward ............................. | update |
    exchanges                      [bucket 0: ready ---- needed]
                                          [bucket 1: ready -- needed]

It comes from a compiled step, whose program has the exchanges and whose profile the times (`schedule_of`), or from an
estimated workload, whose gradients are put into buckets as compiling does it (`bucketed`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import check_whole
from bnfuse.estimating.workload import Workload
from bnfuse.parallel.ranks import BUCKET
from bnfuse.runtime.program import program as p

Kind = Literal["gradients", "sum", "gather"]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A message of `bytes` of each worker. It may begin when `ready` launches are done, and must have ended before the
    launch with the index `needed` begins (the number of launches: before the step ends).

    `gradients` are summed too, and may be summed in parts (`sharded`); `gather` brings every worker those of all.
    """

    kind: Kind
    bytes: int
    ready: int
    needed: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The step of one worker on `batch` samples. `seconds` are those of the launches, in order; those from the index
    `update` on belong to the update. Exchanges come in the order in which they begin."""

    name: str
    batch: int
    seconds: tuple[float, ...]
    exchanges: tuple[Exchange, ...]
    update: int

    def __post_init__(self) -> None:
        count = len(self.seconds)
        ready = [each.ready for each in self.exchanges]
        if ready != sorted(ready) or not all(0 <= e.ready <= e.needed <= count for e in self.exchanges):
            raise BnfuseError(f"{self.name}: exchanges must be in order, and needed behind where they are ready")
        if not 0 <= self.update <= count or not all(0 <= s < float("inf") for s in self.seconds):
            raise BnfuseError(f"{self.name}: launches must take seconds of at least 0, and the update be one of them")

    @property
    def compute_s(self) -> float:
        """Seconds of all launches: the step of a single worker."""
        return sum(self.seconds)

    @property
    def bytes(self) -> int:
        """Bytes of all exchanges of a worker."""
        return sum(each.bytes for each in self.exchanges)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients among them."""
        return sum(each.bytes for each in self.exchanges if each.kind == "gradients")

    def lasting(self, step_s: float, batch: int | None = None) -> Schedule:
        """Give the same schedule with launches that take `step_s` seconds together."""
        whole = self.compute_s
        factor = step_s / whole if whole else 0.0
        seconds = tuple(each * factor for each in self.seconds)
        return dataclasses.replace(self, seconds=seconds, batch=self.batch if batch is None else batch)

    def at_the_end(self) -> Schedule:
        """Give the same step with one message of all gradients behind the backward pass: nothing overlaps."""
        kept = [each for each in self.exchanges if each.kind != "gradients"]
        size = self.gradient_bytes
        whole = [Exchange("gradients", size, self.update, self.update)] if size else []
        found = sorted([*kept, *whole], key=lambda each: each.ready)
        return dataclasses.replace(self, exchanges=tuple(found))


def schedule_of(program: p.Program, seconds: Sequence[float], name: str) -> Schedule:
    """Give the schedule of a compiled step: `seconds` are those of its launches in order, forward, backward, update, as
    `step.profile` has them. Those of exchanges may be among them, and are left out."""
    launches = [launch for phase in p.ALL_PHASES for launch in program.phase(phase)]
    own = [launch for launch in launches if not launch.exchanges]
    if len(seconds) == len(launches):
        seconds = [s for s, launch in zip(seconds, launches, strict=True) if not launch.exchanges]
    if len(seconds) != len(own):
        raise BnfuseError(f"{name}: {len(seconds)} times for {len(own)} launches: profile this step")
    exchanges, done = [], 0
    for index, launch in enumerate(launches):
        if not launch.exchanges:
            done += 1
            continue
        later = [one for one in launches[index + 1 :] if not one.exchanges]
        needed = first_meeting(program, later, launch)
        if regions_of(program, launch) == {p.WIRE} and needed < len(
            later
        ):  # its way back to float32 waits beside others
            needed += 1 + first_meeting(program, later[needed + 1 :], later[needed])
        work = program.work_of(launch)
        assert work is not None
        is_gradient = regions_of(program, launch) <= {p.GRADIENTS, p.ACCUMULATED, p.WIRE}
        kind: Kind = "gather" if launch.kernel == p.GATHER else "gradients" if is_gradient else "sum"
        exchanges.append(Exchange(kind, work.bytes, done, done + needed))
    update = sum(not launch.exchanges and launch.phase != "update" for launch in launches)
    data = program.inputs[program.signature["data"][0]]
    return Schedule(name, data.shape[0], tuple(seconds), tuple(exchanges), update)


def regions_of(program: p.Program, launch: p.Launch) -> set[str]:
    """List the regions that a launch touches."""
    return {program.storages[buffer.storage].region for buffer in launch.buffers}


def first_meeting(program: p.Program, later: Sequence[p.Launch], launch: p.Launch) -> int:
    """Find the place of the first of some launches that waits for one; their number where none does."""
    return next((index for index, one in enumerate(later) if meets(program, one, launch)), len(later))


def meets(program: p.Program, launch: p.Launch, earlier: p.Launch) -> bool:
    """Tell whether a launch touches bytes that an earlier one writes, or writes bytes that it reads."""
    return any(
        (a.access, b.access) != ("in", "in") and overlap(program.storages[a.storage], program.storages[b.storage])
        for a in launch.buffers
        for b in earlier.buffers
    )


def overlap(a: p.Storage, b: p.Storage) -> bool:
    """Tell whether two storages have bytes in common."""
    return a.region == b.region and a.offset < b.offset + b.bytes and b.offset < a.offset + a.bytes


def bucketed(workload: Workload, seconds: Sequence[float], bucket_bytes: int = BUCKET) -> Schedule:
    """Put the gradients of a workload into messages of at least `bucket_bytes`, in the order in which they are whole.

    `seconds` are those of its layers. The last message has what is left. A message is needed where the first of its
    gradients is read, by the layers of an optimiser or at the end. Those of biases and BatchNorms are not counted. What
    SyncBN exchanges is needed where it is read, a message for each (compiling joins some of them).
    """
    check_whole("bucket", bucket_bytes, 1)
    if len(seconds) != len(workload.layers):
        raise BnfuseError(f"{workload.name}: {len(seconds)} times for {len(workload.layers)} layers")
    layers = workload.layers
    update = next((i for i, layer in enumerate(layers) if layer.phase == "update"), len(layers))
    gradients = {i for i, t in enumerate(workload.tensors) if t.kind == "weight_gradient" and t.kept}
    written = {a.tensor: i for i, layer in enumerate(layers[:update]) for a in layer.writes if a.tensor in gradients}
    if not written:
        raise BnfuseError(f"{workload.name}: it has no weight gradients, so that there is nothing to exchange")
    whole = sorted(written, key=lambda tensor: written[tensor])
    exchanges = []
    for bucket in filled(whole, [workload.tensors[tensor].bytes for tensor in whole], bucket_bytes):
        ready = 1 + max(written[tensor] for tensor in bucket)
        readers = [i for i in range(ready, len(layers)) if any(a.tensor in bucket for a in layers[i].accesses)]
        size = sum(workload.tensors[tensor].bytes for tensor in bucket)
        exchanges.append(Exchange("gradients", size, ready, min(readers, default=len(layers))))
    exchanges += [exchange_of(workload, index) for index, layer in enumerate(layers) if layer.exchange]
    exchanges.sort(key=lambda each: each.ready)
    return Schedule(workload.name, workload.batch, tuple(seconds), tuple(exchanges), update)


def exchange_of(workload: Workload, index: int) -> Exchange:
    """Give what a layer exchanges: as much as it writes."""
    layer = workload.layers[index]
    assert layer.exchange
    made = {access.tensor for access in layer.writes}
    later = range(index + 1, len(workload.layers))
    readers = (i for i in later if any(access.tensor in made for access in workload.layers[i].reads))
    size = sum(access.bytes for access in layer.writes)
    return Exchange(layer.exchange, size, index, next(readers, len(workload.layers)))


def filled(items: Sequence[int], sizes: Iterable[int], least: int) -> list[list[int]]:
    """Cut items into runs of at least `least` bytes each; what is left at the end is a run of its own."""
    runs: list[list[int]] = [[]]
    held = 0
    for item, size in zip(items, sizes, strict=True):
        if held >= least:
            runs.append([])
            held = 0
        runs[-1].append(item)
        held += size
    return runs
