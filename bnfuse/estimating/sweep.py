"""Estimates over a range of one quantity: the cache, the bandwidth, the rate of computing, or the batch.

cache=24MB:1000MB:2MB       from, to (with it), step
batch=8,16,32,64            or a list
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import Section, csv_text, duration, join, percent, scaled
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.quantities import cache_text, parse_bandwidth, parse_bytes, parse_count, parse_flops
from bnfuse.estimating.result import Estimate
from bnfuse.estimating.workload import Workload

Value = int | float
Make = Callable[[int], Workload]
Progress = Callable[[int, int], None]  # points done, of how many

MOST = 10_000  # points
SHOWN = 16  # rows of the text


@dataclasses.dataclass(frozen=True)
class Axis:
    """How a swept quantity is read, shown and set. `unit` is that of its values as numbers."""

    name: str
    unit: str
    parse: Callable[[str], Value]
    text: Callable[[Value], str]

    def hardware(self, hardware: Hardware, value: Value) -> Hardware:
        """Put a value of the axis into the hardware."""
        change: dict[str, Any] = {} if self.name == "batch" else {self.name: value}
        return dataclasses.replace(hardware, **change)


AXES = {
    axis.name: axis
    for axis in (
        Axis("cache", "B", parse_bytes, cache_text),
        Axis("bandwidth", "B/s", parse_bandwidth, lambda value: scaled(value, "B/s")),
        Axis("flops", "FLOP/s", parse_flops, lambda value: scaled(value, "FLOP/s")),
        Axis("batch", "samples", parse_count, str),
    )
}


@dataclasses.dataclass(frozen=True)
class Range:
    """What `--sweep` names."""

    axis: str
    values: tuple[Value, ...]


def parse_sweep(text: str) -> Range:
    """Read 'cache=24MB:1000MB:2MB' or 'batch=8,16,32' as axis and values."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise BnfuseError(f"--sweep {text}: it is AXIS=FROM:TO:STEP or AXIS=A,B,C, with AXIS {', '.join(AXES)}")
    axis = axis_of(name.strip())
    if ":" not in values:
        return Range(axis.name, tuple(axis.parse(part) for part in values.split(",")))
    parts = values.split(":")
    if len(parts) != 3:
        raise BnfuseError(f"--sweep {text}: a range is FROM:TO:STEP, like cache=24MB:1000MB:2MB")
    first, last, step = (axis.parse(part) for part in parts)
    if last < first:
        raise BnfuseError(f"--sweep {text}: it ends before it begins")
    steps = (last - first) / step
    if steps >= MOST:
        raise BnfuseError(f"--sweep {text}: it has {steps + 1:,.0f} points, more than {MOST:,}. Take a larger step.")
    count = int(steps + 1e-9) + 1
    return Range(axis.name, tuple(first + index * step for index in range(count)))


def axis_of(name: str) -> Axis:
    """Find an axis by its name. Raises BnfuseError where there is none."""
    if name not in AXES:
        raise BnfuseError(f"no axis '{name}' to sweep: there are {', '.join(AXES)}")
    return AXES[name]


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """The totals of one estimate. `value` is in the axis's unit."""

    value: Value
    batch: int
    time_s: float
    compute_s: float
    stall_s: float
    traffic_in_bytes: int
    traffic_out_bytes: int
    average_bandwidth: float
    active_time: float
    compute_utilization: float
    samples_per_s: float
    flops: float
    by_type: dict[str, float]

    @property
    def traffic_bytes(self) -> int:
        """Bytes moved, both ways."""
        return self.traffic_in_bytes + self.traffic_out_bytes

    def share(self, types: frozenset[str] | set[str]) -> float:
        """Give the share of the time that layers of these types take."""
        return sum(self.by_type.get(kind, 0.0) for kind in types) / self.time_s if self.time_s else 0.0


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Points in the order of the values that were asked for. `hardware` has the swept quantity at what it was."""

    workload: str
    hardware: Hardware
    assumptions: Assumptions
    axis: str
    points: tuple[SweepPoint, ...]

    @property
    def values(self) -> list[Value]:
        """The values that were asked for."""
        return [point.value for point in self.points]

    def at(self, value: Value) -> SweepPoint:
        """Find the point of a value. Raises KeyError where there is none."""
        for point in self.points:
            if point.value == value:
                return point
        raise KeyError(f"the sweep has no point at {self.axis} {AXES[self.axis].text(value)}")

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "workload": self.workload,
            "hardware": dataclasses.asdict(self.hardware),
            "assumptions": dataclasses.asdict(self.assumptions),
            "axis": self.axis,
            "unit": AXES[self.axis].unit,
            "points": [dataclasses.asdict(point) for point in self.points],
        }

    def to_csv(self) -> str:
        """Give a point a line; seconds by type as columns `time_s:TYPE`."""
        types = sorted({kind for point in self.points for kind in point.by_type})
        columns = [field.name for field in dataclasses.fields(SweepPoint) if field.name not in ("value", "by_type")]
        swept = "batch_swept" if self.axis == "batch" else self.axis

        def row(point: SweepPoint) -> list[object]:
            totals = [getattr(point, column) for column in columns]
            return [point.value, *totals, *(point.by_type.get(kind, 0.0) for kind in types)]

        return csv_text([swept, *columns, *(f"time_s:{kind}" for kind in types)], map(row, self.points))

    def sections(self) -> list[Section]:
        """Show the points, evenly chosen where there are many."""
        axis = AXES[self.axis]
        shown = spread(self.points, SHOWN)
        rows = [
            (
                axis.text(point.value),
                duration(point.time_s),
                percent(point.stall_s / point.time_s if point.time_s else 0.0),
                scaled(point.traffic_in_bytes, "B"),
                scaled(point.traffic_out_bytes, "B"),
                scaled(point.average_bandwidth, "B/s"),
                percent(point.compute_utilization),
                f"{point.samples_per_s:.4g}",
            )
            for point in shown
        ]
        columns = (axis.name, "time", "stalled", "in", "out", "bandwidth", "compute utilization", "samples/s")
        some = "" if len(shown) == len(self.points) else f" ({len(shown)} of {len(self.points)} points)"
        return [Section.table(f"{self.workload} over the {self.axis}{some}", columns, rows)]

    def __str__(self) -> str:
        return join(self.sections())


def sweep(
    source: Workload | Make,
    hardware: Hardware,
    axis: str,
    values: Sequence[Value],
    *,
    assumptions: Assumptions | None = None,
    progress: Progress = lambda done, total: None,
) -> Sweep:
    """Estimate at each value. `source` is the workload; to sweep the batch, what makes it of a batch."""
    chosen = assumptions or Assumptions()
    known = axis_of(axis)
    if not values:
        raise BnfuseError(f"nothing to sweep: no value of the {axis} is given")
    points, name = [], ""
    for done, (value, workload) in enumerate(each(source, known, values), start=1):
        found = estimate(workload, known.hardware(hardware, value), chosen)
        points.append(point_of(value, found))
        name = workload.name
        progress(done, len(values))
    return Sweep(name, hardware, chosen, axis, tuple(points))


def each(source: Workload | Make, axis: Axis, values: Sequence[Value]) -> Iterator[tuple[Value, Workload]]:
    """Go through the values, each with the workload that it is estimated for."""
    if axis.name == "batch":
        if isinstance(source, Workload):
            raise BnfuseError(f"{source.name}: its batch is fixed, so it cannot be swept. Sweep a network of the zoo.")
        for value in values:
            yield value, source(int(value))
    else:
        if not isinstance(source, Workload):
            raise TypeError(f"a sweep of the {axis.name} needs a workload")
        for value in values:
            yield value, source


def point_of(value: Value, found: Estimate) -> SweepPoint:
    """Take over the totals of an estimate."""
    names = [field.name for field in dataclasses.fields(SweepPoint) if field.name not in ("value", "by_type")]
    return SweepPoint(value, **{name: getattr(found, name) for name in names}, by_type=dict(found.by_type))


def spread(points: Sequence[SweepPoint], most: int) -> list[SweepPoint]:
    """Pick at most so many of them, evenly, with the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]
