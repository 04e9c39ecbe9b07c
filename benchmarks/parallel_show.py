"""What parallel.py wrote: tables of steps and of scaling, the fit of what is between the ranks, pictures of traces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import parallel_trace

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import Section, duration, join, percent, scaled
from bnfuse.estimating.parallel.fit import Fit, Measured, fit
from bnfuse.estimating.parallel.schedule import Exchange, Schedule

Line = dict[str, Any]
FEW = 4  # steps


def show(folder: Path, plots: Path | None) -> None:
    lines = read(folder)
    print(join(sections(lines)))
    for found in fits(lines).values():
        print(f"\n{found}")
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("trace-*.json")):
            parallel_trace.draw(parallel_trace.read(path), plots / f"{path.stem}.png", path.stem.removeprefix("trace-"))


def read(path: Path) -> list[Line]:
    """Of a folder of results, or of a file of lines."""
    file = path / "parallel.jsonl" if path.is_dir() else path
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def sections(lines: Iterable[Line]) -> list[Section]:
    found, lines = [], list(lines)
    steps = [line for line in lines if line["what"] == "step"]
    for case, ranks in dict.fromkeys((line["case"], line["ranks"]) for line in steps):
        own = {
            (line["kind"], line["candidate"]): line for line in steps if (line["case"], line["ranks"]) == (case, ranks)
        }
        rows = [
            (kind, name, duration(line["min_s"]), duration(line["median_s"]), f"{line['images_per_s']:,.0f}")
            for (kind, name), line in own.items()
        ]
        columns = ("ranks that run", "step", "shortest", "median", "images/s")
        found.append(Section.table(f"{case}, {ranks} ranks", columns, rows))
    scaling = [
        (
            line["case"],
            line["candidate"],
            str(line["ranks"]),
            percent(line["efficiency_min"]),
            percent(line["efficiency_median"]),
            duration(max(0.0, line["exposed_median_s"])),
            f"{100 * line['exposed_median']:+.1f} %",
        )
        for line in lines
        if line["what"] == "scaling"
    ]
    columns = ("case", "step", "ranks", "efficiency, shortest", "median", "exposed", "of the step")
    found.append(Section.table("Scaling", columns, scaling))
    rows = [
        (line["engine"], str(line["ranks"]), scaled(line["bytes"], "B"), duration(line["seconds"]))
        for line in lines
        if line["what"] == "all-reduce"
    ]
    if rows:
        found.append(Section.table("A sum by itself", ("engine", "ranks", "bytes", "time"), rows))
    traces = [line for line in lines if line["what"] == "trace" and line["exchanges_s"]]
    if traces:
        about = (
            f"{line['case']} {line['candidate']}, {line['ranks']} ranks: {duration(line['exchanges_s'])} of exchanges, "
            f"{percent(line['hidden_s'] / line['exchanges_s'])} of it beside computing"
            for line in traces
        )
        found.append(Section.lines("Traces", about))
    return found


def schedule_of(line: Line) -> Schedule:
    exchanges = tuple(Exchange(*each) for each in line["exchanges"])
    name = f"{line['case']} {line['candidate']}"
    return Schedule(name, line["batch"], tuple(line["seconds"]), exchanges, line["update"])


def measured(lines: Iterable[Line], world: str | None = None) -> list[Measured]:
    """Steps of several ranks beside their schedules, whose launches take what the step takes without exchanges."""
    lines = list(lines)
    steps = {key(line): line["median_s"] for line in lines if line["what"] == "step"}
    found = []
    for line in lines:
        if line["what"] == "schedule" and world in (None, line["world"]):
            apart = next(other for other in lines if other["what"] == "scaling" and same(other, line))
            both = steps[line["case"], line["ranks"], "together", line["candidate"]]
            schedule = schedule_of(line).lasting(both - apart["exposed_median_s"])
            found.append(Measured(schedule, line["ranks"], both))
    return found


def key(line: Line) -> tuple[str, int, str, str]:
    return line["case"], line["ranks"], line["kind"], line["candidate"]


def same(a: Line, b: Line) -> bool:
    return all(a[name] == b[name] for name in ("case", "ranks", "candidate", "world"))


def fits(lines: list[Line]) -> dict[str, Fit]:
    """For each world whose steps tell something: fitted to steps, and to sums by themselves. Jitter is seen in steps
    alone, and where they are few it is taken for none."""
    found = {}
    for world in dict.fromkeys(line["world"] for line in lines if line["what"] == "schedule"):
        steps = measured(lines, world)
        try:
            found[world] = fit([*steps, *sums(lines, world)], fixed={"jitter": 0.0} if len(steps) < FEW else {})
        except BnfuseError as error:
            print(f"{world}: {error}")
    return found


def sums(lines: Iterable[Line], world: str) -> list[Measured]:
    """Sums by themselves as steps that compute nothing."""
    return [
        Measured(
            Schedule(f"a sum of {scaled(line['bytes'], 'B')}", 1, (0.0,), (Exchange("sum", line["bytes"], 0, 1),), 1),
            line["ranks"],
            line["seconds"],
        )
        for line in lines
        if line["what"] == "all-reduce" and line["engine"] == line["world"] == world
    ]
