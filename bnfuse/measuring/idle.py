"""Quiet before timing: who else computes, and whether our own threads have gone to sleep.

The load average knows neither: after a compilation it stays high for a minute, though nothing runs. So processor time
is read directly: that of all processes from /proc/stat, on the processors that we may use, less our own.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

from bnfuse.core.progress import Progress, quiet

IDLE = 0.10  # cores that others may use
WINDOW = 1.0  # seconds; /proc/stat counts hundredths of one


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds: on the clock, of processor time that was not idle (stolen by the host included), of that our own."""

    clock: float
    busy: float
    own: float


def take_sample() -> Sample | None:
    """Read the clocks; None where the system has no /proc/stat."""
    try:
        text = Path("/proc/stat").read_text()
    except OSError:
        return None
    return Sample(time.monotonic(), busy_seconds(text, own_cpus(), os.sysconf("SC_CLK_TCK")), time.process_time())


def own_cpus() -> frozenset[int]:
    """Give the numbers of the processors that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def busy_seconds(text: str, cpus: frozenset[int], ticks: int) -> float:
    """Sum the lines `cpuN user nice system idle iowait irq softirq steal ...`: all but idle and iowait.

    Guests' time (the two columns after steal) is in user and nice already.
    """
    total = 0
    for line in text.splitlines():
        name, *numbers = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _, _, *rest = map(int, numbers[:8])
            total += user + nice + system + sum(rest)
    return total / ticks


def others_between(before: Sample | None, after: Sample | None) -> float | None:
    """Give the cores' worth of processor time that others had."""
    if before is None or after is None or after.clock <= before.clock:
        return None
    return max(0.0, (after.busy - before.busy - (after.own - before.own)) / (after.clock - before.clock))


@dataclasses.dataclass(frozen=True)
class Quiet:
    """How a wait ended: cores that others had in its last second, seconds waited."""

    others: float | None
    waited: float

    @property
    def is_idle(self) -> bool:
        """Whether others leave the machine alone, as far as it could be told."""
        return self.others is None or self.others <= IDLE


def wait_for_idle(
    patience: float,
    progress: Progress = quiet,
    *,
    sample: Callable[[], Sample | None] = take_sample,
    sleep: Callable[[float], None] = time.sleep,
) -> Quiet:
    """Watch a second at a time until others have less than a tenth of a core, or patience is over: then say so."""
    first = before = sample()
    while True:
        sleep(WINDOW)
        after = sample()
        others = others_between(before, after)
        waited = after.clock - first.clock if first is not None and after is not None else 0.0
        found = Quiet(others, waited)
        if found.is_idle:
            return found
        if waited >= patience:
            progress(f"the machine is not idle: others use {others:.1f} cores; measuring all the same")
            return found
        before = after


def settle(
    limit: float = 1.0,
    window: float = 0.02,
    *,
    spent: Callable[[], float] = time.process_time,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait until this process uses less than a tenth of a core, so that spinning threads of the candidate that has just
    run do not tax the next one. Returns the seconds that it took."""
    start = clock()
    while clock() - start < limit:
        before = spent()
        sleep(window)
        if spent() - before < window / 10:
            break
    return clock() - start
