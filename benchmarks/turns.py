"""Candidates of one process in turns, which beside_torch.py and many_cores.py share."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bnfuse.measuring import idle

WARM_UP = 2


def in_turns(candidates: Mapping[str, Any], repetitions: int, wait: float) -> dict[str, Any]:
    """Run each once, and again, on a machine that is idle after at most `wait` seconds. Gives the least and the median
    seconds of each by its name, and the processors that others took meanwhile."""
    for candidate in candidates.values():
        for _ in range(WARM_UP):
            candidate.run()
            idle.settle()
    idle.wait_for_idle(wait)
    before = idle.take_sample()
    steps: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repetitions):
        for name, candidate in candidates.items():
            steps[name].append(candidate.run().step)
            idle.settle()
    others = idle.others_between(before, idle.take_sample())
    return {
        "cores_of_others": others if others is None else round(others, 2),
        "steps": {name: {"min": min(times), "median": statistics.median(times)} for name, times in steps.items()},
    }
