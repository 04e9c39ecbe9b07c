"""What connects the workers, found from measured steps: latency, bandwidth and jitter of the simulation, and its error.

    points     schedule of a step, workers, measured seconds
    fitted     network and jitter with which the simulated steps come nearest, in relative terms
    error      of the points fitted to, and of each point by a fit to all others (`held_out`)

The times of a single worker are not fitted: a schedule has them from a profile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import Section, duration, join, number, percent
from bnfuse.estimating.options import Strategy
from bnfuse.estimating.parallel.scaling import Network
from bnfuse.estimating.parallel.schedule import Schedule
from bnfuse.estimating.parallel.simulation import simulate

PARAMETERS = ("latency", "seconds_a_byte", "jitter")
UNITS = (1e-6, 1e-9, 1e-2)  # a step of the search: a microsecond, 1 GB/s, a hundredth of the step
STARTS = ((10.0, 0.1, 1.0), (100.0, 1.0, 5.0), (3.0, 0.01, 0.1))  # in these units


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measured step: `step_s` on `workers` workers, each of which runs `schedule`."""

    schedule: Schedule
    workers: int
    step_s: float

    def __post_init__(self) -> None:
        if self.workers < 2 or not 0 < self.step_s < math.inf:
            raise BnfuseError(
                f"{self.schedule.name}: a step of {self.step_s:g} s on {self.workers} workers tells nothing of what is "
                "between workers: give steps of at least two"
            )


@dataclasses.dataclass(frozen=True)
class Fit:
    """Errors are of predicted to measured steps, minus 1. `deviations` are the standard deviations of latency (s),
    bandwidth (in parts of it) and jitter; None where there are no more points than numbers fitted."""

    network: Network
    jitter: float
    algorithm: Strategy
    sharded: bool
    points: tuple[Measured, ...]
    predicted_s: tuple[float, ...]
    held_out: tuple[float, ...] | None
    deviations: tuple[float, ...] | None

    @property
    def errors(self) -> tuple[float, ...]:
        """The error of each point that was fitted to."""
        return tuple(s / point.step_s - 1 for s, point in zip(self.predicted_s, self.points, strict=True))

    @property
    def error(self) -> float:
        """Root of their mean square."""
        return rms(self.errors)

    @property
    def held_out_error(self) -> float | None:
        """Root of the mean square of the errors of points that were left out of the fit."""
        return None if self.held_out is None else rms(self.held_out)

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types, without the launches of the schedules."""
        held = self.held_out or [None] * len(self.points)
        return {
            "latency_s": self.network.latency,
            "bandwidth": self.network.bandwidth,
            "jitter": self.jitter,
            "deviations": self.deviations,
            "algorithm": self.algorithm,
            "sharded": self.sharded,
            "error": self.error,
            "held_out_error": self.held_out_error,
            "points": [
                {
                    "name": point.schedule.name,
                    "batch": point.schedule.batch,
                    "workers": point.workers,
                    "measured_s": point.step_s,
                    "predicted_s": seconds,
                    "error": error,
                    "held_out_error": out,
                }
                for point, seconds, error, out in zip(self.points, self.predicted_s, self.errors, held, strict=True)
            ],
        }

    def sections(self) -> list[Section]:
        """Show what was found, then point by point."""
        about = [f"{self.network}, {self.algorithm}, workers differ by {percent(self.jitter)} of a step"]
        about.append(f"error of a step: {percent(self.error)}")
        if self.held_out_error is not None:
            about[-1] += f", of steps that the fit has not seen {percent(self.held_out_error)}"
        held = self.held_out or [math.nan] * len(self.points)
        rows = [
            (
                point.schedule.name,
                number(point.schedule.batch),
                number(point.workers),
                duration(point.step_s),
                duration(seconds),
                f"{100 * error:+.1f} %",
                "-" if math.isnan(out) else f"{100 * out:+.1f} %",
            )
            for point, seconds, error, out in zip(self.points, self.predicted_s, self.errors, held, strict=True)
        ]
        columns = ("step", "samples each", "workers", "measured", "predicted", "error", "not fitted to")
        return [Section.lines("What is between the workers", about), Section.table("Steps", columns, rows)]

    def __str__(self) -> str:
        return join(self.sections())


def fit(
    points: Sequence[Measured],
    algorithm: Strategy = "ring",
    *,
    sharded: bool = False,
    fixed: Mapping[str, float] | None = None,
) -> Fit:
    """Fit latency, bandwidth and jitter to measured steps. `fixed` says those that are known: `latency` in seconds,
    `bandwidth` in bytes/s, `jitter` as part of a step. At least as many points as numbers to find are needed, and one
    more for an error that says something. Needs scipy."""
    known = known_values(fixed or {})
    free = [index for index, name in enumerate(PARAMETERS) if name not in known]
    if len(points) < max(len(free), 1):
        raise BnfuseError(
            f"{len(points)} measured steps do not tell {len(free)} numbers: measure more, or say some by fixed="
        )
    model = Model(algorithm, sharded, known, tuple(free))
    found, deviations = solved(model, points)
    network, jitter = model.read(found)
    predicted = tuple(model.step_s(point, found) for point in points)
    held = None
    if len(points) > len(free):
        out = []
        for index, point in enumerate(points):
            others, _ = solved(model, [*points[:index], *points[index + 1 :]])
            out.append(model.step_s(point, others) / point.step_s - 1)
        held = tuple(out)
    return Fit(network, jitter, algorithm, sharded, tuple(points), predicted, held, deviations)


def known_values(fixed: Mapping[str, float]) -> dict[str, float]:
    """Give what is fixed by the names of the numbers that are fitted."""
    if unknown := set(fixed) - {"latency", "bandwidth", "jitter"}:
        raise BnfuseError(f"fixed={min(unknown)} is none of latency, bandwidth, jitter")
    found = dict(fixed)
    if "bandwidth" in found:
        found["seconds_a_byte"] = 1 / Network(found.pop("bandwidth")).bandwidth
    return found


@dataclasses.dataclass(frozen=True)
class Model:
    """The simulation as a function of the numbers that are fitted, in `UNITS`."""

    algorithm: Strategy
    sharded: bool
    known: Mapping[str, float]
    free: tuple[int, ...]

    def read(self, values: Sequence[float]) -> tuple[Network, float]:
        """Give network and jitter."""
        given = dict(self.known)
        for index, value in zip(self.free, values, strict=True):
            given[PARAMETERS[index]] = float(value) * UNITS[index]
        bandwidth = 1 / max(given["seconds_a_byte"], 1e-15)  # 1 PB/s: nothing of bandwidth is seen
        return Network(bandwidth, given["latency"]), given["jitter"]

    def step_s(self, point: Measured, values: Sequence[float]) -> float:
        """Predict a step."""
        network, jitter = self.read(values)
        how = {"jitter": jitter, "sharded": self.sharded}
        return simulate(point.schedule, point.workers, network, self.algorithm, **how).step_s  # type: ignore[arg-type]


def solved(model: Model, points: Sequence[Measured]) -> tuple[list[float], tuple[float, ...] | None]:
    """Find the least squares of relative errors, from several starts, and how far the numbers found are certain."""
    if not model.free:
        return [], None
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise BnfuseError("fitting what is between workers needs scipy: pip install scipy") from None

    def residuals(values: Any) -> list[float]:
        return [model.step_s(point, values) / point.step_s - 1 for point in points]

    starts = [[start[index] for index in model.free] for start in STARTS]
    runs = [least_squares(residuals, start, bounds=(0, math.inf), diff_step=1e-4) for start in starts]
    best = min(runs, key=lambda run: run.cost)
    values = [float(value) for value in best.x]
    spare = len(points) - len(model.free)
    if spare < 1:
        return values, None
    return values, deviations(model, values, best.jac, 2 * best.cost / spare)


def deviations(model: Model, values: Sequence[float], jacobian: Any, variance: float) -> tuple[float, ...] | None:
    """Give the standard deviations of all numbers, 0 of those that are known; None where the points do not tell them
    apart."""
    import numpy as np

    square = jacobian.T @ jacobian
    if np.linalg.matrix_rank(square, tol=1e-18) < len(values):
        return None
    spread = np.sqrt(np.diag(np.linalg.inv(square)) * variance)
    found = [0.0, 0.0, 0.0]
    for index, value, deviation in zip(model.free, values, spread, strict=True):
        name = PARAMETERS[index]
        relative = name == "seconds_a_byte"
        found[index] = float(deviation / value) if relative and value else float(deviation * UNITS[index])
    return tuple(found)


def rms(errors: Sequence[float]) -> float:
    """Give the root of the mean square."""
    return math.sqrt(math.fsum(e * e for e in errors) / len(errors)) if errors else 0.0
