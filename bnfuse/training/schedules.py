"""The learning rate of each step, by name: `cosine`, `constant`, `step:30,60,80@0.1`, `poly:2`, `exp:0.97`,
`one-cycle:0.3`, `restarts:10x2`.

    schedule = parse_schedule("step:30,60", warm_up=5)
    schedule.rate(0.1, index, steps_per_epoch=390, epochs=90)

The first `warm_up` epochs climb linearly to the first rate. What follows is counted from their end, but for the epochs
of `step`, which are counted from the start of the run. `one-cycle` climbs by itself. Rates change from step to step, or
with `by="epoch"` from epoch to epoch, as torch.optim.lr_scheduler has them where `step()` is called at these times.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import spelt

HELP = (
    "cosine, constant, step:30,60,80[@0.1], poly[:power], exp:factor, one-cycle[:share of the climb] or "
    "restarts:epochs[xfactor]"
)
BY = ("step", "epoch")
FIRST, LAST = 1 / 25, 1 / 25e4  # one-cycle: of the highest rate, where it begins and ends


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the learning rate goes over a run."""

    kind: str = "cosine"
    milestones: tuple[float, ...] = ()  # step: epochs after which the rate is multiplied by `factor`
    factor: float = 0.1  # step; exp: of an epoch to the one before; restarts: of a cycle's length to the last one's
    power: float = 1.0  # poly
    warm_up: float = 0.0  # epochs
    share: float = 0.3  # one-cycle: of the run, in which it climbs
    period: float = 0.0  # restarts: epochs of the first cycle
    min_lr: float = 0.0  # what cosine, poly, restarts and one-cycle fall to, and below which step and exp do not fall
    warm_up_lr: float | None = None  # rate that the warm-up begins at; None: it begins a step above 0
    by: str = "step"  # or "epoch": one rate for all steps of an epoch

    @property
    def needs_end(self) -> bool:
        """Whether the rates depend on how many epochs there will be."""
        return self.kind in ("cosine", "poly", "one-cycle")

    def rate(self, first: float, index: int, steps_per_epoch: int, epochs: int) -> float:
        """Give the learning rate of step `index`, counted from 0 over the whole run; `first` is the highest."""
        ticks = steps_per_epoch  # of an epoch
        if self.by == "epoch":
            index, ticks = index // steps_per_epoch, 1
        if self.kind == "one-cycle":
            return self._one_cycle(first, index, epochs * ticks)
        climb = whole(self.warm_up * ticks)
        if index < climb:
            if self.warm_up_lr is None:
                return first * min(1.0, (index + 1) / climb)
            return self.warm_up_lr + (first - self.warm_up_lr) * index / climb
        if self.kind == "step":
            passed = sum(index >= whole(milestone * ticks) for milestone in self.milestones)
            return max(first * self.factor**passed, self.min_lr)
        if self.kind == "constant":
            return first
        if self.kind == "exp":
            return max(first * self.factor ** ((index - climb) / ticks), self.min_lr)
        if self.kind == "restarts":
            return self._fallen(first, self._cosine(self._share_of_cycle(index - climb, whole(self.period * ticks))))
        share = (index - climb) / max(epochs * ticks - climb, 1)
        if self.kind == "poly":
            return self._fallen(first, max(0.0, 1 - share) ** self.power)
        return self._fallen(first, self._cosine(min(share, 1.0)))

    def _fallen(self, first: float, height: float) -> float:
        """Give the rate at a height of 1 (`first`) to 0 (`min_lr`)."""
        return self.min_lr + (first - self.min_lr) * height

    def _cosine(self, share: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * share))

    def _share_of_cycle(self, ticks: float, length: float) -> float:
        """Tell which share of its cycle a place is at; each is `factor` times as long as the one before."""
        if self.factor == 1:
            return 0.0 if whole(ticks / length) % 1 == 0 else (ticks % length) / length
        more = self.factor - 1  # the first n cycles are length*(factor**n - 1)/more long
        cycle = int(whole(math.log1p(ticks * more / length) / math.log1p(more)))
        begun = whole(length * math.expm1(cycle * math.log1p(more)) / more)
        return max(ticks - begun, 0.0) / (length * self.factor**cycle)

    def _one_cycle(self, first: float, index: int, total: int) -> float:
        """Climb by half a cosine to the top, then fall by one: torch's OneCycleLR, whose ends are ticks."""
        top, end = self.share * total - 1, total - 1
        if index <= top:
            return first + (first * FIRST - first) * self._cosine(index / top if top > 0 else 1.0)
        last = self.min_lr or first * LAST
        return last + (first - last) * self._cosine(min((index - top) / max(end - top, 1e-9), 1.0))

    def check(self, first: float, steps_per_epoch: int | None = None) -> None:
        """Raise BnfuseError where the rates could not be reached from the highest, `first`, or, where the steps of an
        epoch are known, a cycle has none of its own."""
        ticks = 1 if self.by == "epoch" else steps_per_epoch
        if self.kind == "restarts" and ticks is not None and whole(self.period * ticks) < 1:
            raise BnfuseError(f"schedule '{self}': its first cycle is shorter than one {self.by}: give a longer one")
        for option, rate in (("--min-lr", self.min_lr), ("--warm-up-lr", self.warm_up_lr or 0.0)):
            if rate > first:
                raise BnfuseError(f"{option} {rate:g} is above --lr {first:g}, the highest rate: give a smaller one")

    def __str__(self) -> str:
        """Give the spelling that `parse_schedule` reads, without the options beside it."""
        if self.kind == "step":
            return f"step:{','.join(map(spelt, self.milestones))}@{spelt(self.factor)}"
        if self.kind == "restarts":
            return f"restarts:{spelt(self.period)}" + (f"x{spelt(self.factor)}" if self.factor != 1 else "")
        numbers = {"poly": self.power, "exp": self.factor, "one-cycle": self.share}
        return f"{self.kind}:{spelt(numbers[self.kind])}" if self.kind in numbers else self.kind


def parse_schedule(
    text: str | Schedule,
    warm_up: float = 0.0,
    *,
    min_lr: float = 0.0,
    warm_up_lr: float | None = None,
    by: str = "step",
) -> Schedule:
    """Read a schedule as people write it, with so many epochs of warm-up. Raises BnfuseError where it is unknown, or
    where an option means nothing to it."""
    if isinstance(text, Schedule):
        return text
    if not isinstance(text, str):
        raise BnfuseError(
            f'a schedule is a text such as "cosine", not a {type(text).__name__}: rates are those of the loop here'
        )
    for what, value in (("warm-up", warm_up), ("min-lr", min_lr), ("warm-up-lr", warm_up_lr or 0.0)):
        if not (math.isfinite(value) and value >= 0):
            raise BnfuseError(f"a {what} of {value} is none: give a number from 0 on")
    if by not in BY:
        raise BnfuseError(f"a schedule by '{by}' is unknown: it is by {' or by '.join(BY)}")
    found = _parsed(text)
    if found.kind == "one-cycle" and warm_up:
        raise BnfuseError(f"schedule '{text}' climbs by itself: leave the warm-up out")
    if found.kind == "constant" and min_lr:
        raise BnfuseError("schedule 'constant' does not fall: leave --min-lr out")
    if warm_up_lr is not None and not warm_up:
        raise BnfuseError("--warm-up-lr is the rate that a warm-up begins at: give --warm-up EPOCHS too")
    return dataclasses.replace(found, warm_up=warm_up, min_lr=min_lr, warm_up_lr=warm_up_lr, by=by)


def _parsed(text: str) -> Schedule:
    kind, colon, rest = text.partition(":")
    if kind in ("cosine", "constant") and not colon:
        return Schedule(kind)
    if kind == "poly":
        power = _number(rest, text) if colon else 1.0
        if power > 0:
            return Schedule(kind, power=power)
    if kind == "exp" and colon and 0 < (factor := _number(rest, text)) <= 1:
        return Schedule(kind, factor=factor)
    if kind == "one-cycle" and 0 < (share := _number(rest, text) if colon else 0.3) < 1:
        return Schedule(kind, share=share)
    if kind == "restarts" and (match := re.fullmatch(r"([^x]+)(?:x(.+))?", rest)):
        period, times = _number(match[1], text), _number(match[2] or "1", text)
        if period > 0 and times >= 1:
            return Schedule(kind, period=period, factor=times)
    if kind == "step" and rest:
        listed, at, factor_text = rest.partition("@")
        milestones = tuple(_number(part, text) for part in listed.split(","))
        scale = _number(factor_text, text) if at else 0.1
        if scale > 0 and min(milestones) > 0 and all(a < b for a, b in itertools.pairwise(milestones)):
            return Schedule(kind, milestones, scale)
    raise BnfuseError(f"schedule '{text}' is unknown: write {HELP}")


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BnfuseError(f"schedule '{whole}': '{text}' is no number: write {HELP}")
    return value


def whole(ticks: float) -> float:
    """Give the whole number that so many ticks are but for the rounding of a product: 0.7 epochs of 10 steps are 7."""
    near = round(ticks)
    return float(near) if near and abs(ticks - near) <= 1e-9 * max(1.0, abs(ticks)) else ticks


def cosine(first: float, index: int, total: int) -> float:
    """Give the learning rate of step `index` of `total`, half a cosine from `first` to 0."""
    return Schedule().rate(first, index, total, 1)
