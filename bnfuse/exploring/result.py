"""What a sweep found, as text, JSON and CSV."""

from __future__ import annotations

import dataclasses
from typing import Any

from bnfuse.core.text import Section, count, csv_text, duration, join, number, percent, scaled
from bnfuse.exploring.axes import Settings, described, plain
from bnfuse.exploring.pareto import Goal
from bnfuse.exploring.points import Point
from bnfuse.inspecting.result import size


@dataclasses.dataclass(frozen=True)
class Exploration:
    """Points of a network; `hardware` is that of the times, None where nothing was estimated."""

    network: str
    base: Settings
    varied: tuple[str, ...]
    level: str
    hardware: str | None
    goals: tuple[Goal, ...]
    points: tuple[Point, ...]

    @property
    def front(self) -> tuple[Point, ...]:
        """The points that no other beats in all goals, by the first of them."""
        return tuple(sorted((p for p in self.points if p.pareto), key=self.goals[0].loss))

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "network": self.network,
            "base": self.base,
            "varied": list(self.varied),
            "level": self.level,
            "hardware": self.hardware,
            "pareto": [{"quantity": goal.name, "more": goal.more} for goal in self.goals],
            "points": [point.to_json() for point in self.points],
        }

    def to_csv(self) -> str:
        """Give a line a point: what was varied, a column each, then the quantities."""
        quantities = [*(f.name for f in dataclasses.fields(Point)), "speedup", "samples_per_s"]
        quantities = [name for name in quantities if name not in ("changes", "settings", *self.varied)]

        def row(point: Point) -> list[object]:
            settings = [plain(point.settings.get(name, self.base.get(name, ""))) for name in self.varied]
            values = [getattr(point, name) for name in quantities]
            return [*settings, *("" if value is None else value for value in values)]

        return csv_text([*self.varied, *quantities], map(row, self.points))

    def sections(self, units: str = "decimal") -> list[Section]:
        """Show a table of the points, and why some are none. `units` are decimal or binary."""
        failed = [point for point in self.points if point.error]
        parts = [
            self.table(units),
            Section.lines(
                f"Points that could not be built ({len(failed)})",
                [f"{described(point.changes)}: {point.error}" for point in failed],
            ),
            Section.lines(
                f"Pareto front: {', '.join(map(str, self.goals))}", [described(point.changes) for point in self.front]
            ),
        ]
        return [part for part in parts if part.rows]

    def table(self, units: str) -> Section:
        """Show the points that could be built."""
        where = f", step times on {self.hardware} before and after {self.level}" if self.hardware else ""
        share = "time before" if self.hardware else "bytes moved"
        title = f"{self.network}: {count(len(self.points), 'point')}{where} (*: on the front; BN share of {share})"
        columns = COUNTS + (TIMES if self.hardware else ())
        shown = [c for c in columns if c[0] != "accuracy" or any(p.accuracy is not None for p in self.points)]
        rows = [
            (
                "*" if point.pareto else "",
                described(point.changes),
                *(cell(point, units) for _, cell in shown),
            )
            for point in self.points
        ]
        return Section.table(title, ("", "point", *(name for name, _ in shown)), rows)

    def __str__(self) -> str:
        return join(self.sections())


def arrow(before: str, after: str | None) -> str:
    """Write before > after; before alone where there is no after."""
    return before if after is None else f"{before} > {after}"


def _or_dash(value: Any, text: Any) -> str:
    return "-" if value is None else str(text(value))


def _sweeps(point: Point, units: str) -> str:
    after = None if point.sweeps_after is None else number(point.sweeps_after)
    return _or_dash(point.sweeps, lambda value: arrow(number(value), after))


COUNTS: tuple[tuple[str, Any], ...] = (
    ("parameters", lambda p, _: _or_dash(p.parameters, number)),
    ("model", lambda p, units: _or_dash(p.model_bytes, lambda v: size(v, units))),
    ("forward", lambda p, _: _or_dash(p.flops_forward, lambda v: scaled(v, "FLOP"))),
    ("outputs", lambda p, units: _or_dash(p.output_bytes, lambda v: size(v, units))),
    ("sweeps", _sweeps),
    ("BN share", lambda p, _: _or_dash(p.norm_share if p.norm_time_share is None else p.norm_time_share, percent)),
    ("accuracy", lambda p, _: _or_dash(p.accuracy, lambda v: f"{v:g}")),
)
TIMES: tuple[tuple[str, Any], ...] = (
    ("before", lambda p, _: _or_dash(p.time_before_s, duration)),
    ("after", lambda p, _: _or_dash(p.time_s, duration)),
    ("speed-up", lambda p, _: _or_dash(p.speedup, lambda v: f"{v:.2f}x")),
)
