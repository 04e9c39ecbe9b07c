"""Times of several ways to do the same, taken in turns: what disturbs the machine for a while disturbs all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

HOPELESS = 1.4  # times the best: dropped after the rounds that all get
ROUNDS = 3, 40  # at least, at most
SECONDS = 0.2  # of measuring a problem, after which no further round is begun


def shortest_times(runs: Sequence[Callable[[], float]]) -> list[float]:
    """Find the shortest of the seconds that each run gives.

    What is hopeless after the rounds that all get is not run again: one round alone may have met another process.
    """
    times = [float("inf")] * len(runs)
    start = time.perf_counter()
    for round_ in range(ROUNDS[1]):
        if round_ >= ROUNDS[0] and time.perf_counter() - start > SECONDS:
            break
        limit = HOPELESS * min(times)
        for index, run in enumerate(runs):
            if round_ < ROUNDS[0] or times[index] <= limit:
                times[index] = min(times[index], run())
    return times
