"""The learning rate of each step, by name: `cosine`, `constant`, `step:30,60,80@0.1`, `poly:2`.

    schedule = parse_schedule("step:30,60", warm_up=5)
    schedule.rate(0.1, index, steps_per_epoch=390, epochs=90)

The first `warm_up` epochs climb linearly, step by step, to the first rate. `cosine` and `poly` fall to 0 over all
epochs after these. The epochs of `step` are counted from the start of the run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from bnfuse.core.errors import BnfuseError

HELP = "cosine, constant, step:30,60,80[@0.1] or poly[:power]"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the learning rate goes over a run."""

    kind: str = "cosine"
    milestones: tuple[float, ...] = ()  # step: epochs after which the rate is multiplied by `factor`
    factor: float = 0.1
    power: float = 1.0  # poly
    warm_up: float = 0.0  # epochs

    @property
    def needs_end(self) -> bool:
        """Whether the rates depend on how many epochs there will be."""
        return self.kind in ("cosine", "poly")

    def rate(self, first: float, index: int, steps_per_epoch: int, epochs: int) -> float:
        """Give the learning rate of step `index`, counted from 0 over the whole run."""
        climb = self.warm_up * steps_per_epoch
        if index < climb:
            return first * min(1.0, (index + 1) / climb)
        if self.kind == "constant":
            return first
        if self.kind == "step":
            passed = sum(index >= milestone * steps_per_epoch for milestone in self.milestones)
            return first * self.factor**passed
        share = (index - climb) / max(epochs * steps_per_epoch - climb, 1)
        if self.kind == "poly":
            return first * max(0.0, 1 - share) ** self.power
        return first * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))

    def __str__(self) -> str:
        """Give the spelling that `parse_schedule` reads, without the warm-up."""
        if self.kind == "step":
            return f"step:{','.join(f'{m:g}' for m in self.milestones)}@{self.factor:g}"
        return f"poly:{self.power:g}" if self.kind == "poly" else self.kind


def parse_schedule(text: str | Schedule, warm_up: float = 0.0) -> Schedule:
    """Read a schedule as people write it, with so many epochs of warm-up. Raises BnfuseError where it is unknown."""
    if isinstance(text, Schedule):
        return text
    if not (math.isfinite(warm_up) and warm_up >= 0):
        raise BnfuseError(f"a warm-up of {warm_up} epochs is none: give a number from 0 on")
    kind, _, rest = text.partition(":")
    if kind in ("cosine", "constant") and text == kind:
        return Schedule(kind, warm_up=warm_up)
    if kind == "poly":
        power = _number(rest, text) if rest or text != kind else 1.0
        if power > 0:
            return Schedule(kind, power=power, warm_up=warm_up)
    if kind == "step" and rest:
        listed, at, factor = rest.partition("@")
        milestones = tuple(_number(part, text) for part in listed.split(","))
        scale = _number(factor, text) if at else 0.1
        if scale > 0 and min(milestones) > 0 and all(a < b for a, b in itertools.pairwise(milestones)):
            return Schedule(kind, milestones, scale, warm_up=warm_up)
    raise BnfuseError(f"schedule '{text}' is unknown: write {HELP}")


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BnfuseError(f"schedule '{whole}': '{text}' is no number: write {HELP}")
    return value


def cosine(first: float, index: int, total: int) -> float:
    """Give the learning rate of step `index` of `total`, half a cosine from `first` to 0."""
    return Schedule().rate(first, index, total, 1)
