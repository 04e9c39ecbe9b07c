"""Methods compared over a table of all placements: what an exhaustive search stored takes the place of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.searching.evaluation import Evaluation, Score, Settings, best_of
from bnfuse.searching.loop import search
from bnfuse.searching.space import Placement, Space, to_text

Table = Mapping[Placement, Score]


@dataclasses.dataclass(frozen=True)
class Replay:
    """One method over many seeds. `fewest[s, k]`: BatchNorms of seed s's best placement after k + 1 evaluations."""

    method: str
    fewest: np.ndarray
    optimum: int  # BatchNorms of the best placement of all
    size: int

    def to_json(self) -> dict[str, object]:
        """Give it as JSON's types."""
        last = self.fewest[:, -1]
        return {
            "method": self.method,
            "seeds": len(last),
            "evaluations": self.fewest.shape[1],
            "found_half": float(np.mean(last <= self.size // 2)),
            "mean_best": float(last.mean()),
            "found_optimum": float(np.mean(last == self.optimum)),
            "mean_distance": float((last - self.optimum).mean()),
            "optimum": self.optimum,
        }


def table_of(space: Space, history: Sequence[Evaluation]) -> dict[Placement, Score]:
    """Give the evaluations of an exhaustive search by placement."""
    table = {e.placement: e.score for e in history}
    missing = next((p for p in space.all_placements() if p not in table), None)
    if missing is not None:
        raise BnfuseError(
            f"{len(table)} of {2**space.size} placements are evaluated, {to_text(missing)} is not:"
            " finish the exhaustive search first"
        )
    return table


def replay(space: Space, table: Table, settings: Settings, seeds: Sequence[int]) -> Replay:
    """Give a search for each seed, with the table as its objective."""
    everything = [Evaluation(i, p, table[p]) for i, p in enumerate(space.all_placements())]
    rows = []
    for seed in seeds:
        history = search(space, table.__getitem__, dataclasses.replace(settings, seed=seed))
        rows.append([best_of(space, history[: k + 1], settings.tolerance).kept for k in range(len(history))])
    return Replay(settings.method, np.array(rows), best_of(space, everything, settings.tolerance).kept, space.size)
