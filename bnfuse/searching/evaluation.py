"""What a search knows: its settings, the placements that were trained, and which of them are worth having."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.searching.space import Placement, Space, from_text, to_text

METHODS = ("bo", "random", "annealing", "exhaustive")


@dataclasses.dataclass(frozen=True)
class Score:
    """The accuracies of one placement on held-out data, one a seed; `diverged` counts the trainings that broke off."""

    accuracies: tuple[float, ...]
    diverged: int = 0

    @property
    def accuracy(self) -> float:
        """The mean over the seeds."""
        return float(np.mean(self.accuracies))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One placement that was trained, and what came of it."""

    iteration: int  # from 0, the reference
    placement: Placement
    score: Score
    seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        """The mean accuracy."""
        return self.score.accuracy

    @property
    def kept(self) -> int:
        """How many BatchNorms stayed."""
        return sum(self.placement)

    def to_json(self) -> dict[str, Any]:
        """Give a line of the file."""
        return {
            "iteration": self.iteration,
            "placement": to_text(self.placement),
            "accuracy": self.accuracy,
            "accuracies": list(self.score.accuracies),
            "diverged": self.score.diverged,
            "seconds": round(self.seconds, 3),
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Evaluation:
        """Read what `to_json` wrote. Raises ValueError, KeyError, TypeError or OverflowError where a line is none of
        ours."""
        accuracies, diverged = line["accuracies"], int(line["diverged"])
        if not isinstance(accuracies, list) or not isinstance(line["placement"], str):
            raise TypeError("a list of accuracies and a text are expected")
        score = Score(tuple(float(value) for value in accuracies), diverged)
        seconds = float(line["seconds"])
        if not all(0 <= value <= 1 for value in score.accuracies) or not 0 <= seconds < np.inf:
            raise ValueError("accuracies are shares, seconds a number")
        return cls(int(line["iteration"]), from_text(line["placement"]), score, seconds)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a search goes. `lambdas`, accuracy per BatchNorm of average cost, take turns (None: `default_lambda`)."""

    method: str = "bo"
    iterations: int | None = 20  # evaluations in all, the reference included; None: all placements (exhaustive)
    initial: int = 4  # random placements after the reference
    lambdas: tuple[float, ...] | None = None
    tolerance: float = 0.01  # below the reference's accuracy, that a valid placement may be
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise BnfuseError(f"method '{self.method}' is unknown: it is {', '.join(METHODS)}")
        if self.iterations is None and self.method != "exhaustive":
            raise BnfuseError(f"method {self.method} needs --iterations")
        for what, value, least in (("iterations", self.iterations, 1), ("initial", self.initial, 0)):
            if value is not None and value < least:
                raise BnfuseError(f"{what}={value}: it must be at least {least}")
        if not 0 <= self.tolerance < 1:
            raise BnfuseError(f"tolerance={self.tolerance:g}: it is a difference of accuracies, at least 0 and below 1")
        if self.lambdas is not None and (not self.lambdas or not all(0 <= value < 1 for value in self.lambdas)):
            raise BnfuseError("lambda is accuracy per BatchNorm: one number or more, each at least 0 and below 1")

    def lambda_at(self, iteration: int, size: int) -> float:
        """Give the penalty of one BatchNorm at an iteration."""
        values = self.lambdas or (default_lambda(self.tolerance, size),)
        return values[iteration % len(values)]


def default_lambda(tolerance: float, size: int) -> float:
    """Give four tolerances over C: a quarter of the BatchNorms is worth the accuracy that may be lost
    (docs/search.md)."""
    return 4 * max(tolerance, 0.005) / size


def reference_of(history: Sequence[Evaluation]) -> float:
    """Give the accuracy with all BatchNorms."""
    return history[0].accuracy


def is_valid(evaluation: Evaluation, reference: float, tolerance: float) -> bool:
    """Tell whether it is within the tolerance; the small term forgives the rounding of a mean."""
    return evaluation.accuracy >= reference - tolerance - 1e-9


def best_of(space: Space, history: Sequence[Evaluation], tolerance: float) -> Evaluation:
    """Find the cheapest valid one; of equally cheap ones the most accurate, then the first."""
    valid = [e for e in history if is_valid(e, reference_of(history), tolerance)]
    return min(valid, key=lambda e: (round(space.cost(e.placement), 12), -e.accuracy, e.iteration))


def pareto(space: Space, history: Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """Find those than which none is at once as cheap and more accurate, or as accurate and cheaper; cheapest first."""
    front: list[Evaluation] = []
    for e in sorted(history, key=lambda e: (round(space.cost(e.placement), 12), -e.accuracy, e.iteration)):
        if not front or e.accuracy > front[-1].accuracy:
            front.append(e)
    return tuple(front)
