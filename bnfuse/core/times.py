"""The times of steps and what they come to."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Protocol

STEPS_A_RUN = 10  # on a GPU: steps in a row between two events


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one step, and of its forward phase. The rest is backward, and where there is one the update.

    On a GPU a step is one piece: `forward` is None.
    """

    step: float
    forward: float | None


class Candidate(Protocol):
    """What can be timed: a step of some runtime."""

    @property
    def name(self) -> str:
        """What tables call it."""

    def run(self) -> Times:
        """Run one training step."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of all repetitions."""

    min_s: float
    median_s: float
    forward_min_s: float | None = None
    forward_median_s: float | None = None
    backward_min_s: float | None = None
    backward_median_s: float | None = None


def summarize(times: Sequence[Times], *, apart: bool = False) -> Summary:
    """Summarize times. `apart`: forward was a run of its own, not a part of the step, so minima and medians are
    subtracted.

    Where that leaves nothing, backward is lost in the noise of the two: None.
    """
    steps = [t.step for t in times]
    forward = [t.forward for t in times if t.forward is not None]
    if not forward:
        return Summary(min(steps), statistics.median(steps))
    backward = [t.step - t.forward for t in times if t.forward is not None]
    found = [min(backward), statistics.median(backward)]
    if apart:
        found = [min(steps) - min(forward), statistics.median(steps) - statistics.median(forward)]
    shortest, middle = (left if left > 0 or not apart else None for left in found)
    return Summary(min(steps), statistics.median(steps), min(forward), statistics.median(forward), shortest, middle)
