"""The times of steps and what they come to."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one step, and of its forward phase. The rest is backward, and where there is one the update."""

    step: float
    forward: float


class Candidate(Protocol):
    @property
    def name(self) -> str:
        """What tables call it."""

    def run(self) -> Times:
        """One training step."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of all repetitions."""

    min_s: float
    median_s: float
    forward_min_s: float
    forward_median_s: float
    backward_min_s: float
    backward_median_s: float


def summarize(times: Sequence[Times], *, apart: bool = False) -> Summary:
    """`apart`: forward was a run of its own, not a part of the step, so minima and medians are subtracted."""
    steps, forward = [t.step for t in times], [t.forward for t in times]
    backward = [t.step - t.forward for t in times]
    shortest, middle = min(backward), statistics.median(backward)
    if apart:
        shortest = max(0.0, min(steps) - min(forward))
        middle = max(0.0, statistics.median(steps) - statistics.median(forward))
    return Summary(min(steps), statistics.median(steps), min(forward), statistics.median(forward), shortest, middle)
