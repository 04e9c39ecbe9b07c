"""`bnfuse explore`: every point of a sweep, one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.core.files import require_apart, require_writable, write_atomically
from bnfuse.core.progress import Progress, bar_of, quiet
from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.settings import settle
from bnfuse.estimating.source import behaviour_of, hardware_of
from bnfuse.exploring.accuracy import read_accuracies, row_of, with_accuracies
from bnfuse.exploring.axes import (
    Settings,
    axes_of,
    check_limit,
    check_number,
    described,
    full_settings,
    one_at_a_time,
    product,
    settings_of,
    typed,
)
from bnfuse.exploring.pareto import TIMED, Goal, front, goals
from bnfuse.exploring.plot import plot as draw
from bnfuse.exploring.plot import require_drawable
from bnfuse.exploring.points import Measure, Point, measured
from bnfuse.exploring.presets import Preset, preset
from bnfuse.exploring.result import Exploration
from bnfuse.models import entry_of
from bnfuse.passes import LEVELS


def explore(
    network: str | None = None,
    vary: Iterable[str] = (),
    *,
    base: Mapping[str, object] | None = None,
    preset_name: str | None = None,
    separately: bool = False,
    limit: int | None = None,
    hardware: str | Hardware | None = "h100",
    level: str = "icf",
    assume: Mapping[str, object] | None = None,
    pareto: str | None = None,
    accuracy: str | Path | None = None,
    plot: str | Path | None = None,
    output: str | Path | None = None,
    progress: Progress = quiet,
) -> Exploration:
    """Sweep many variants of a zoo network: sizes, work and estimated step time (docs/design-space.md).

    vary         "squeeze=0.125,0.5", "growth=12:48:12", also of batch, image, channels, classes
    base         settings that all points share
    preset_name  a sweep of the papers, whose axes `vary` adds to; the network may be left out
    separately   one change of the base at a time, instead of every combination
    limit        how many points may be
    hardware     a profile, or what is estimated on; None: counts alone, without training graphs
    level        what the times after fusion are of
    assume       choices of the estimate (bnfuse/estimating/assumptions.py)
    pareto       what the front is of: "parameters,time", "max:accuracy,time"
    accuracy     a CSV of accuracies to join (bnfuse/exploring/accuracy.py)
    plot, output files for a picture of the front's first two quantities and for the points as CSV
    progress     what hears of each point by its method `bar`, if it has one

    A point that cannot be built is a point with an error. Raises BnfuseError where none can.
    """
    plan = preset(preset_name) if preset_name else Preset("", network or "")
    name = network or plan.network
    if not name:
        raise BnfuseError("name a network of the zoo, or a preset")
    entry_of(name)
    if level not in LEVELS:
        raise BnfuseError(f"there is no level '{level}'; the levels are {', '.join(LEVELS)}")
    shared = settings_of(name, {**plan.base, **(base or {})})
    listed = {key: tuple(typed(name, key, value) for value in values) for key, values in plan.axes.items()}
    axes = {**listed, **axes_of(name, vary)}
    asked = goals(pareto or default_goals(hardware, accuracy))
    check_known(asked, timed=hardware is not None, accuracy=accuracy is not None)
    check_files(accuracy, plot, output, asked)
    rows = read_accuracies(accuracy, name) if accuracy is not None else []
    changes = changes_of(name, plan, axes, shared, separately=separately, limit=limit)
    if rows and not any(row_of(rows, full_settings(name, {**shared, **change})) for change in changes):
        raise BnfuseError(f"{accuracy}: no line belongs to any of these points: its settings are of others")
    machine = hardware_of(hardware, progress=progress) if isinstance(hardware, str) else hardware
    (assumptions,) = settle(assume or {}, behaviour_of(hardware))
    measure = Measure(level, machine, assumptions)
    bar = bar_of(progress) or (lambda done, total, what: None)
    points = []
    for index, change in enumerate(changes):
        bar(index, len(changes), described(change))
        points.append(attempt(name, change, {**shared, **change}, measure))
    bar(len(changes), len(changes), "points")
    if all(point.error for point in points):
        raise BnfuseError(f"no point could be built; the first: {points[0].error}")
    points = with_accuracies(points, rows, [full_settings(name, point.settings) for point in points])
    marks = front(points, asked)
    found = Exploration(
        network=name,
        base=full_settings(name, shared),
        varied=tuple(dict.fromkeys(key for change in changes for key in change)),
        level=level,
        hardware=machine.name if machine else None,
        goals=asked,
        points=tuple(dataclasses.replace(p, pareto=mark) for p, mark in zip(points, marks, strict=True)),
    )
    if output is not None:
        write_atomically(Path(output), found.to_csv().encode())
    if plot is not None:
        draw(found, plot)
    return found


def check_known(asked: tuple[Goal, ...], *, timed: bool, accuracy: bool) -> None:
    """Check before the work that points have what the front is of: of nothing it would be empty."""
    for goal in asked:
        if goal.name in TIMED and not timed:
            raise BnfuseError(f"a front of {goal.name} needs step times, and nothing is estimated")
        if goal.name == "accuracy" and not accuracy:
            raise BnfuseError("a front of accuracy needs accuracies: --accuracy FILE.csv")


def check_files(accuracy: object, plot: str | Path | None, output: str | Path | None, asked: tuple[Goal, ...]) -> None:
    """Check before the work that the results can be written."""
    require_apart(accuracy, plot, output)
    if output is not None:
        require_writable(output)
    if plot is not None:
        require_writable(plot)
        require_drawable(plot, asked)


def changes_of(
    name: str,
    plan: Preset,
    axes: Mapping[str, tuple[Any, ...]],
    shared: Settings,
    *,
    separately: bool,
    limit: int | None,
) -> list[Settings]:
    """Tell what each point changes of the base, in order and without repetition."""
    listed = [settings_of(name, change) for change in plan.changes]
    if not axes and not listed:
        raise BnfuseError("nothing varies: say what with --vary KEY=VALUE,VALUE or --preset NAME")
    full = full_settings(name, shared)
    if both := sorted({*axes} & {*shared}):
        raise BnfuseError(f"{both[0]} is both set and varied: leave one of them out")
    check_number(axes, separately=separately, limit=limit)
    if separately:
        found = one_at_a_time(axes, full)
    else:
        found = product(axes) if axes else []
    if listed:
        found = [{}, *listed, *(change for change in found if change)]
    unique: dict[str, Settings] = {described(change): change for change in found}
    check_limit(len(unique), limit)
    return list(unique.values())


def attempt(name: str, change: Settings, settings: Settings, measure: Measure) -> Point:
    """Measure a point, or make a point that says why it is none: a sweep of hours must not end for one network of
    it."""
    try:
        return measured(name, change, settings, measure)
    except Exception as error:
        reason = str(error) if isinstance(error, BnfuseError) else f"{type(error).__name__}: {first_line(error)}"
        return Point(change, settings, error=reason)


def default_goals(hardware: object, accuracy: object) -> str:
    """Name the goals of a front for which none were asked."""
    second = "accuracy" if accuracy is not None else "parameters"
    return f"{second},{'flops' if hardware is None else 'time'}"
