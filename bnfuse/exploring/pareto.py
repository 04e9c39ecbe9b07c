"""The points that no other point beats in every quantity."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from bnfuse.core.errors import BnfuseError
from bnfuse.exploring.points import Point

# name on the command line -> field of a point
QUANTITIES = {
    "parameters": "parameters",
    "model": "model_bytes",
    "flops": "flops",
    "outputs": "output_bytes",
    "sweeps": "sweeps_after",
    "moved": "moved_bytes_after",
    "bn-share": "norm_share",
    "time": "time_s",
    "time-before": "time_before_s",
    "throughput": "samples_per_s",
    "speedup": "speedup",
    "accuracy": "accuracy",
}
TIMED = ("time", "time-before", "throughput", "speedup")  # known where something is estimated
HIGHER = ("accuracy", "speedup", "throughput")  # better the more there is
AFTER = {"sweeps": "sweeps", "moved": "moved_bytes", "time": "time_before_s"}  # of what cannot be fused, or was not


@dataclasses.dataclass(frozen=True)
class Goal:
    """A quantity, and whether more of it is better."""

    name: str
    more: bool

    def value(self, point: Point) -> float | None:
        """Give the quantity of a point; None where the point has none."""
        if self.name == "bn-share" and point.norm_time_share is not None:
            return point.norm_time_share
        found = getattr(point, QUANTITIES[self.name])
        if found is None and self.name in AFTER:
            found = getattr(point, AFTER[self.name])
        return None if found is None else float(found)

    def loss(self, point: Point) -> float:
        """Give the quantity so that less is better."""
        value = self.value(point)
        assert value is not None
        return -value if self.more else value

    def __str__(self) -> str:
        return f"{'most' if self.more else 'least'} {self.name}"


def goals(text: str) -> tuple[Goal, ...]:
    """Read "parameters,time" as the least of each; "max:flops" asks for the most, "min:accuracy" for the least."""
    found = []
    for part in text.split(","):
        way, colon, name = part.strip().rpartition(":")
        if name not in QUANTITIES or (colon and way not in ("min", "max")):
            names = ", ".join(QUANTITIES)
            raise BnfuseError(f"'{part}' is nothing to compare points by: write NAME, min:NAME or max:NAME of {names}")
        found.append(Goal(name, way == "max" if colon else name in HIGHER))
    if len({goal.name for goal in found}) < len(found):
        raise BnfuseError(f"{text} has a quantity twice: name each once")
    return tuple(found)


def front(points: Sequence[Point], asked: Iterable[Goal]) -> tuple[bool, ...]:
    """Tell whether each point is on the front. A point that lacks one of the quantities is not."""
    wanted = tuple(asked)
    losses = [
        None if any(goal.value(point) is None for goal in wanted) else tuple(goal.loss(point) for goal in wanted)
        for point in points
    ]
    known = [loss for loss in losses if loss is not None]
    return tuple(loss is not None and not any(beats(other, loss) for other in known) for loss in losses)


def beats(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Tell whether a point is nowhere worse, and somewhere better."""
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))
