"""Data-parallel training on several workers ([Iandola16], section 3.6): how long a step takes, what more of them bring.

These are the formulas of the paper, with one message behind the backward pass; simulation.py follows the schedule of a
step that exchanges its gradients in buckets, beside it.

Each worker computes the gradients of its share of the batch; then the gradients of all are summed and every worker
gets the sum. With |W| bytes of gradients, p workers and BW bytes/s in and out of each of them, summing takes

    parameter server    |W| * p / BW                (eq. 3.3)
    reduction tree      |W| * 2*log2(p) / BW        (eq. 3.4; a p that is no power of two has a broken log2)

and a latency for each of these messages, none by default. One worker does not communicate. The share is the batch
divided by p, rounded up (strong scaling), or the batch itself, so that all of them train p batches (weak scaling).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import Section, count, csv_text, duration, join, number, percent, scaled
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.options import Mode, Strategy
from bnfuse.estimating.quantities import parse_bandwidth
from bnfuse.estimating.workload import Workload

MOST = 2.0**40  # workers; where balance is not reached by then, it never is

# serial messages of |W| bytes that summing the gradients of p > 1 workers takes
MESSAGES: dict[str, Callable[[float], float]] = {"tree": lambda p: 2 * math.log2(p), "server": lambda p: p}
NAMES: dict[Strategy, str] = {
    "ring": "ring, overlapped",
    "halving": "halving and doubling, overlapped",
    "tree": "reduction tree (eq. 3.4)",
    "server": "parameter server (eq. 3.3)",
}


@dataclasses.dataclass(frozen=True)
class Network:
    """What connects the workers: `bandwidth` in bytes/s, in and out of each, and `latency` of a message in seconds."""

    bandwidth: float
    latency: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth < math.inf and 0 <= self.latency < math.inf):
            raise BnfuseError(
                f"network of {self.bandwidth:g} B/s and {self.latency:g} s: the bandwidth must be positive, the latency"
                " not negative"
            )

    def __str__(self) -> str:
        latency = f", {duration(self.latency)} a message" if self.latency else ""
        return f"{self.name}{': ' if self.name else ''}{scaled(self.bandwidth, 'B/s')}{latency}"


def network(text: str, latency: float = 0.0) -> Network:
    """Read 6GB/s, 100Gbit/s or plain bytes/s as a network."""
    bits = re.fullmatch(r"(.*?)bit/s", text.strip(), re.IGNORECASE)
    try:
        return Network(parse_bandwidth(bits[1]) / 8 if bits else parse_bandwidth(text), latency)
    except BnfuseError as error:
        raise BnfuseError(f"network: {error}; write its bandwidth as 6GB/s or 100Gbit/s") from None


@dataclasses.dataclass(frozen=True)
class Quantities:
    """What scaling depends on, where there is no workload: a step of `batch` samples, forward and backward.

    `gradient_bytes` is |W|; `step_s` the time of the whole batch on one worker (None: flops at the hardware's rate);
    `forward_share` the part of it that passes before gradients come.
    """

    name: str
    batch: int
    gradient_bytes: float
    flops: float = 0.0
    step_s: float | None = None
    forward_share: float = 1 / 3


@dataclasses.dataclass(frozen=True)
class Point:
    """A step on `workers` workers, `share` samples on each. `exposed_s` is the communication that nothing hides.

    `speedup` compares samples a second with those of one worker, `efficiency` is speed-up a worker.
    """

    workers: int
    share: int
    batch: int
    compute_s: float
    communication_s: float
    exposed_s: float
    step_s: float
    samples_per_s: float
    speedup: float
    efficiency: float
    waiting_s: float = 0.0  # for the slowest worker, where workers are not equally fast


@dataclasses.dataclass(frozen=True)
class Scaling:
    """`balance`: so many workers at which communication takes as long as computing (None: it never does).

    Of a simulation (simulation.py) `exchanges` is the number of messages of a step, `jitter` the spread of the workers'
    times, as part of a step, and `sharded` whether each updates its part of the parameters.
    """

    name: str
    gradient_bytes: float
    hardware: str
    network: Network
    strategy: Strategy
    mode: Mode
    overlap: float
    balance: float | None
    points: tuple[Point, ...]
    exchanges: int = 1
    jitter: float = 0.0
    sharded: bool = False

    def at(self, workers: int) -> Point:
        """Find the point of so many workers. Raises BnfuseError where there is none."""
        for point in self.points:
            if point.workers == workers:
                return point
        raise BnfuseError(f"{self.name}: no point of {workers} workers was asked for")

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return dataclasses.asdict(self)

    def to_csv(self) -> str:
        """Give a point a line."""
        return csv_text((field.name for field in dataclasses.fields(Point)), map(dataclasses.astuple, self.points))

    def sections(self) -> list[Section]:
        """Show what is communicated and how, then the points."""
        messages = f"{count(self.exchanges, 'message')} by " if self.strategy not in MESSAGES else ""
        about = [
            f"{scaled(self.gradient_bytes, 'B')} of gradients, {messages}{NAMES[self.strategy]}, {self.network}",
            f"each worker: {self.hardware}",
        ]
        if self.overlap:
            about.append(f"communication may hide behind {percent(self.overlap)} of the backward pass")
        if self.jitter:
            about.append(f"workers differ by {percent(self.jitter)} of a step")
        if self.sharded:
            about.append("each worker updates its part of the parameters")
        if self.balance is not None:
            about.append(f"communication takes as long as computing at {self.balance:.3g} workers")
        is_formula = self.strategy in MESSAGES
        columns: dict[str, Callable[[Point], str]] = {
            "workers": lambda p: number(p.workers),
            "samples each": lambda p: number(p.share),
            "computing": lambda p: duration(p.compute_s),
            "communication": lambda p: duration(p.communication_s),
            **({} if is_formula else {"exposed": lambda p: duration(p.exposed_s)}),
            **({"slowest": lambda p: f"+{duration(p.waiting_s)}"} if self.jitter else {}),
            "step": lambda p: duration(p.step_s),
            "samples/s": lambda p: f"{p.samples_per_s:,.0f}" if p.samples_per_s >= 100 else number(p.samples_per_s),
            "speed-up": lambda p: f"{p.speedup:.3g}x",
            "efficiency": lambda p: percent(p.efficiency),
        }
        rows = [[show(p) for show in columns.values()] for p in self.points]
        return [
            Section.lines(f"{self.name}, {self.mode} scaling", about),
            Section.table("Data-parallel training", tuple(columns), rows),
        ]

    def __str__(self) -> str:
        return join(self.sections())


def communication_s(gradient_bytes: float, workers: float, network: Network, strategy: Strategy = "tree") -> float:
    """Compute equations 3.3 and 3.4, in seconds; `workers` may be broken."""
    if strategy not in MESSAGES:
        raise BnfuseError(f"strategy={strategy} is unknown: it is {' or '.join(MESSAGES)}")
    messages = MESSAGES[strategy](workers) if workers > 1 else 0.0
    return messages * (gradient_bytes / network.bandwidth + network.latency)


@dataclasses.dataclass(frozen=True)
class Computing:
    """The time that one worker takes for so many samples, and how much of it is the forward pass."""

    batch: int
    gradient_bytes: float
    name: str
    time_s: Callable[[int], float]
    forward_share: float


def scale(
    source: Workload | Quantities | Callable[[int], Workload],
    hardware: Hardware | None = None,
    workers: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    network: Network = Network(6e9),
    strategy: Strategy = "tree",
    mode: Mode = "strong",
    *,
    batch: int | None = None,
    overlap: float = 0.0,
    assumptions: Assumptions | None = None,
) -> Scaling:
    """Estimate steps of `source` on each number of workers.

    A workload is estimated once on `hardware` and its time divided by the samples; a function batch -> workload is
    estimated for every share, from its `batch` on; quantities have their own time, or flops at the hardware's rate.
    `overlap` is the part of the backward pass, 0 to 1, that communication may hide behind.
    """
    if mode not in ("strong", "weak"):
        raise BnfuseError(f"scaling={mode} is unknown: it is strong or weak")
    if not 0 <= overlap <= 1:
        raise BnfuseError(f"overlap={overlap:g} is no part of the backward pass: it is from 0 to 1")
    if not workers or min(workers) < 1:
        raise BnfuseError("workers: give numbers of workers, each at least 1")
    computing = computing_of(source, hardware, batch, assumptions or Assumptions())
    if mode == "strong" and max(workers) > computing.batch:
        raise BnfuseError(
            f"{computing.name}: {max(workers)} workers have no sample each of a batch of {computing.batch}."
            " Take a larger batch, or weak scaling."
        )
    found = [point(computing, p, network, strategy, mode, overlap) for p in workers]
    return Scaling(
        name=computing.name,
        gradient_bytes=computing.gradient_bytes,
        hardware=hardware.name if hardware else "as measured",
        network=network,
        strategy=strategy,
        mode=mode,
        overlap=overlap,
        balance=balance(computing, network, strategy, mode),
        points=tuple(found),
    )


def point(
    computing: Computing, workers: int, network: Network, strategy: Strategy, mode: Mode, overlap: float
) -> Point:
    """Estimate the step of so many workers."""
    share = -(-computing.batch // workers) if mode == "strong" else computing.batch
    batch = computing.batch if mode == "strong" else computing.batch * workers
    compute = computing.time_s(share)
    communication = communication_s(computing.gradient_bytes, workers, network, strategy)
    exposed = max(0.0, communication - overlap * (1 - computing.forward_share) * compute)
    step = compute + exposed
    speedup = batch / step * (computing.time_s(computing.batch) / computing.batch)
    return Point(workers, share, batch, compute, communication, exposed, step, batch / step, speedup, speedup / workers)


def balance(computing: Computing, network: Network, strategy: Strategy, mode: Mode) -> float | None:
    """Give the broken number of workers at which communication takes as long as computing, by bisection.

    Computing shrinks with the number of workers or stays, communication grows.
    """
    whole = computing.time_s(computing.batch)

    def is_early(p: float) -> bool:
        share = whole / p if mode == "strong" else whole
        return communication_s(computing.gradient_bytes, p, network, strategy) < share

    return crossing(is_early)


def crossing(is_early: Callable[[float], bool]) -> float | None:
    """Find from which broken number of workers on it is no longer early, by bisection; None where it always is."""
    low, high = 1.0, MOST
    if is_early(high):
        return None
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_early(middle) else (low, middle)
    return low


def computing_of(
    source: Workload | Quantities | Callable[[int], Workload],
    hardware: Hardware | None,
    batch: int | None,
    assumptions: Assumptions,
) -> Computing:
    """Tell how long a worker computes on so many samples."""
    if isinstance(source, Quantities):
        whole = source.step_s
        if whole is None:
            if hardware is None or not source.flops:
                raise BnfuseError(f"{source.name}: give its step_s, or its flops and a hardware")
            whole = source.flops / hardware.flops
        return linear(source.name, source.batch, source.gradient_bytes, whole, source.forward_share)
    if hardware is None:
        raise BnfuseError("scaling of a workload needs a hardware")
    if isinstance(source, Workload):
        found = estimate(source, hardware, assumptions)
        return linear(source.name, source.batch, gradient_bytes(source), found.time_s, forward_share(source))
    if batch is None:
        raise BnfuseError("scaling of a function batch -> workload needs a batch")
    first = source(batch)
    times: dict[int, float] = {}

    def time_s(share: int) -> float:
        if share not in times:
            times[share] = estimate(source(share), hardware, assumptions).time_s
        return times[share]

    return Computing(batch, gradient_bytes(first), first.name, time_s, forward_share(first))


def linear(name: str, batch: int, size: float, whole: float, forward: float) -> Computing:
    """Let computing take its time by the samples."""
    return Computing(batch, size, name, lambda share: whole * share / batch, forward)


def gradient_bytes(workload: Workload) -> int:
    """Sum |W|: the bytes of all weight gradients (those of biases and BatchNorms are vectors, and not counted)."""
    found = sum(t.bytes for t in workload.tensors if t.kind == "weight_gradient" and t.kept)
    if not found:
        raise BnfuseError(f"{workload.name}: it has no weight gradients, so that there is nothing to exchange")
    return found


def forward_share(workload: Workload) -> float:
    """Give the forward pass's part of the operations, which stands for its part of the time."""
    forward = sum(layer.flops for layer in workload.layers if layer.phase == "forward")
    return forward / workload.flops if workload.flops else 0.0
