"""What the experiments share: candidates that take turns, and their rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def seconds(candidates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Wall times of every candidate, their runs interleaved, after one run each that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for repeat in range(repeats + 1):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return times


def rates(candidates: Mapping[str, Callable[[], object]], work: float, repeats: int) -> dict[str, str]:
    """10^9 of `work` a second, as text: from the minimum (from the median)."""
    return {
        name: f"{work / min(times) / 1e9:7.1f} ({work / statistics.median(times) / 1e9:7.1f})"
        for name, times in seconds(candidates, repeats).items()
    }
