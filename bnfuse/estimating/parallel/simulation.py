"""Data-parallel steps by simulation: the step's own schedule on p workers, exchange by exchange.

    worker     | launch | launch | launch |...wait...| launch |
    network              [ exchange 0 ][ exchange 1 ]

Launches run one after the other. An exchange begins when what it moves is whole and the one before has ended; a launch
that reads what is exchanged waits until it has ended. How long one takes is of the network and the algorithm
(collectives.py).

Workers are not equally fast in each step. The time of a worker for a step has an exponential delay in it, whose mean
and deviation are the part `jitter` of the step; the slowest of p workers, for which all others wait, is slower than
the mean worker by jitter * (1 + 1/2 + ... + 1/p - 1) of it, the mean of the maximum of p draws. It is as slow in every
launch.

`sharded`: gradients are summed in parts (a reduce-scatter), each worker updates its p-th part of the parameters, and
gets those of all (an all-gather) before the step ends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.options import Mode, Strategy
from bnfuse.estimating.parallel.collectives import gather_s, half_s, sum_s
from bnfuse.estimating.parallel.scaling import Network, Point, Scaling, crossing
from bnfuse.estimating.parallel.schedule import Exchange, Schedule, bucketed
from bnfuse.estimating.workload import Workload
from bnfuse.parallel.ranks import BUCKET

DEFAULT = Network(6e9)
EULER = 0.5772156649015329
EXACT = 4096  # workers up to which the harmonic number is added up


@dataclasses.dataclass(frozen=True)
class Span:
    """An exchange in a simulated step: seconds from its beginning."""

    exchange: Exchange
    start: float
    stop: float


@dataclasses.dataclass(frozen=True)
class Simulated:
    """One step. `step_s` is made of the launches of a mean worker, `waiting_s` for the slowest one, and `exposed_s` of
    communication that nothing hides. `communication_s` is that of all exchanges, hidden or not."""

    workers: int
    step_s: float
    compute_s: float
    waiting_s: float
    communication_s: float
    exposed_s: float
    spans: tuple[Span, ...]


def simulate(
    schedule: Schedule,
    workers: int,
    network: Network,
    algorithm: Strategy = "ring",
    *,
    jitter: float = 0.0,
    sharded: bool = False,
) -> Simulated:
    """Run a schedule on so many workers."""
    if not 0 <= jitter < math.inf:
        raise BnfuseError(f"jitter={jitter:g} is no part of a step: it is at least 0")
    computed = sharded_update(schedule, workers) if sharded else schedule
    slowest = 1 + jitter * (harmonic(workers) - 1)
    now = idle = 0.0  # of the slowest worker, and when the network is free again
    spans: list[Span] = []
    waiting = list(schedule.exchanges) if workers > 1 else []
    for index in range(len(computed.seconds) + 1):
        while waiting and waiting[0].ready <= index:
            exchange = waiting.pop(0)
            start = max(now, idle)
            idle = start + cost_s(exchange, workers, network, algorithm, sharded=sharded)
            spans.append(Span(exchange, start, idle))
        now = max([now, *(span.stop for span in spans if span.exchange.needed == index)])
        if index < len(computed.seconds):
            now += computed.seconds[index] * slowest
    if sharded and workers > 1:  # the parameters, which are as many as their gradients
        for exchange in schedule.exchanges:
            if exchange.kind == "gradients":
                start = max(now, idle)
                now = idle = start + half_s(exchange.bytes, workers, network, algorithm)
                spans.append(Span(exchange, start, idle))
    compute = computed.compute_s
    return Simulated(
        workers,
        now,
        compute,
        compute * (slowest - 1),
        sum(span.stop - span.start for span in spans),
        max(0.0, now - compute * slowest),
        tuple(spans),
    )


def cost_s(exchange: Exchange, workers: float, network: Network, algorithm: Strategy, *, sharded: bool) -> float:
    """Give the seconds of an exchange by itself."""
    if exchange.kind == "gather":
        return gather_s(exchange.bytes, workers, network, algorithm)
    if exchange.kind == "gradients" and sharded:
        return half_s(exchange.bytes, workers, network, algorithm)
    return sum_s(exchange.bytes, workers, network, algorithm)


def sharded_update(schedule: Schedule, workers: int) -> Schedule:
    """Let each worker do its part of the update."""
    seconds = (s if index < schedule.update else s / workers for index, s in enumerate(schedule.seconds))
    return dataclasses.replace(schedule, seconds=tuple(seconds))


def harmonic(count: int) -> float:
    """Give 1 + 1/2 + ... + 1/count: the mean of the maximum of so many exponential draws of mean 1."""
    if count <= EXACT:
        return math.fsum(1 / k for k in range(1, count + 1))
    return math.log(count) + EULER + 1 / (2 * count) - 1 / (12 * count**2)


Source = Schedule | Workload | Callable[[int], Workload]


def scale_schedule(
    source: Source,
    hardware: Hardware | None = None,
    workers: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    network: Network = DEFAULT,
    algorithm: Strategy = "ring",
    mode: Mode = "strong",
    *,
    batch: int | None = None,
    bucket_bytes: int = BUCKET,
    jitter: float = 0.0,
    sharded: bool = False,
    assumptions: Assumptions | None = None,
) -> Scaling:
    """Simulate steps of `source` on each number of workers.

    A schedule has its own times, a workload those that are estimated on `hardware`; with strong scaling both are
    divided by the samples. A function batch -> workload is estimated for every share, from its `batch` on.
    """
    if mode not in ("strong", "weak"):
        raise BnfuseError(f"scaling={mode} is unknown: it is strong or weak")
    if not workers or min(workers) < 1:
        raise BnfuseError("workers: give numbers of workers, each at least 1")
    share_of, whole = shares(source, hardware, batch, bucket_bytes, assumptions or Assumptions())
    if mode == "strong" and max(workers) > whole.batch:
        raise BnfuseError(
            f"{whole.name}: {max(workers)} workers have no sample each of a batch of {whole.batch}."
            " Take a larger batch, or weak scaling."
        )
    rate = whole.batch / whole.compute_s if whole.compute_s else 0.0  # samples a second of one worker

    def point(p: int) -> Point:
        share = -(-whole.batch // p) if mode == "strong" else whole.batch
        total = whole.batch if mode == "strong" else whole.batch * p
        step = simulate(share_of(share), p, network, algorithm, jitter=jitter, sharded=sharded)
        samples = total / step.step_s
        speedup = samples / rate
        return Point(
            p,
            share,
            total,
            step.compute_s,
            step.communication_s,
            step.exposed_s,
            step.step_s,
            samples,
            speedup,
            speedup / p,
            step.waiting_s,
        )

    def is_early(p: float) -> bool:
        seconds = sum(cost_s(e, p, network, algorithm, sharded=False) for e in whole.exchanges)
        return seconds < (whole.compute_s / p if mode == "strong" else whole.compute_s)

    return Scaling(
        name=whole.name,
        gradient_bytes=whole.gradient_bytes,
        hardware=hardware.name if hardware else "as measured",
        network=network,
        strategy=algorithm,
        mode=mode,
        overlap=0.0,
        balance=crossing(is_early),
        points=tuple(point(p) for p in workers),
        exchanges=len(whole.exchanges),
        jitter=jitter,
        sharded=sharded,
    )


def shares(
    source: Source, hardware: Hardware | None, batch: int | None, bucket_bytes: int, assumptions: Assumptions
) -> tuple[Callable[[int], Schedule], Schedule]:
    """Give what makes the schedule of so many samples, and that of the whole batch."""
    if isinstance(source, Schedule):
        whole = source
    elif hardware is None:
        raise BnfuseError("scaling of a workload needs a hardware")
    else:
        machine = hardware

        def made(workload: Workload) -> Schedule:
            times = [layer.time_s for layer in estimate(workload, machine, assumptions).layers]
            return bucketed(workload, times, bucket_bytes)

        if not isinstance(source, Workload):
            if batch is None:
                raise BnfuseError("scaling of a function batch -> workload needs a batch")
            found: dict[int, Schedule] = {}

            def share_of(share: int) -> Schedule:
                if share not in found:
                    found[share] = made(source(share))
                return found[share]

            return share_of, share_of(batch)
        whole = made(source)

    def scaled(share: int) -> Schedule:
        """Divide the times by the samples; an update takes as long for any number of them."""
        part = share / whole.batch
        seconds = (s * part if index < whole.update else s for index, s in enumerate(whole.seconds))
        return dataclasses.replace(whole, seconds=tuple(seconds), batch=share)

    return scaled, whole
