"""A sweep as a picture: two quantities of every point, before and after fusion, and the front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.figures import pyplot_figure, require_plotting, save_figure
from bnfuse.exploring.axes import described, plain
from bnfuse.exploring.pareto import Goal
from bnfuse.exploring.points import Point
from bnfuse.exploring.result import Exploration

POINT, BEFORE, FRONT = "#1f4e9c", "#b8b8b8", "#c8472f"
SCALES = {
    "parameters": (1e-6, "million parameters"),
    "model": (1e-6, "model, MB"),
    "flops": (1e-9, "forward and backward, GFLOP a batch"),
    "outputs": (1e-6, "outputs of all layers, MB"),
    "sweeps": (1, "sweeps over feature maps after fusion"),
    "moved": (1e-9, "feature maps moved after fusion, GB a step"),
    "bn-share": (100, "BatchNorm's part, per cent"),
    "time": (1e3, "estimated step, ms"),
    "time-before": (1e3, "estimated step before fusion, ms"),
    "throughput": (1, "images a second after fusion, estimated"),
    "speedup": (1, "estimated speed-up by fusion"),
    "accuracy": (1, "accuracy"),
}
WIDE = 20  # what lies further apart than so many times is drawn on a logarithmic scale


def require_drawable(path: str | Path, asked: tuple[Goal, ...]) -> None:
    """Check before any work that a picture can be made of these goals."""
    require_plotting(path)
    if len(asked) < 2:
        raise BnfuseError("a plot needs two quantities: --pareto NAME,NAME")


def plot(found: Exploration, path: str | Path) -> None:
    """Draw the points, the first goal to the right, the second upwards. Raises BnfuseError where there are not two of
    them."""
    require_drawable(path, found.goals)
    across, up = found.goals[:2]
    shown = [p for p in found.points if across.value(p) is not None and up.value(p) is not None]
    if not shown:
        raise BnfuseError(f"{path}: no point has both {across.name} and {up.name}: there is nothing to draw")
    figure = pyplot_figure()(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    if up.name == "time":
        draw_before(axis, shown, across)
    for on_front, color in ((False, POINT), (True, FRONT)):
        chosen = [p for p in shown if p.pareto == on_front]
        label = "on the front" if on_front else "point"
        axis.scatter(*coordinates(chosen, across, up), color=color, s=36, zorder=3, label=label if chosen else None)
    axis.plot(*coordinates([p for p in found.front if p in shown], across, up), color=FRONT, linewidth=1.2, zorder=2)
    finish(axis, shown, across, up)
    figure.suptitle(f"{found.network} by {', '.join(found.varied)}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    if found.hardware:
        note = f"estimated on {found.hardware}, after {found.level} (grey: before)"
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="#555555")
    label_points(figure, axis, found, shown)
    save_figure(figure, path)


def scaled_value(goal: Goal, point: Point) -> float:
    """Give the quantity in the unit of its axis."""
    value = goal.value(point)
    assert value is not None
    return value * SCALES[goal.name][0]


def coordinates(points: list[Point], across: Goal, up: Goal) -> tuple[list[float], list[float]]:
    """Give the points' places on both axes."""
    return [scaled_value(across, p) for p in points], [scaled_value(up, p) for p in points]


def draw_before(axis: Any, points: list[Point], across: Goal) -> None:
    """Draw the time without fusion above each point, and a line between them."""
    for index, point in enumerate(p for p in points if p.time_before_s and p.time_s):
        x, low, high = scaled_value(across, point), 1e3 * (point.time_s or 0), 1e3 * (point.time_before_s or 0)
        axis.plot([x, x], [low, high], color=BEFORE, linewidth=1, zorder=1)
        axis.scatter([x], [high], color=BEFORE, s=24, zorder=2, label=None if index else "before fusion")


def label_points(figure: Any, axis: Any, found: Exploration, points: list[Point]) -> None:
    """Write what each point is, where there is room: those of the front first."""
    across, up = found.goals[:2]
    figure.draw_without_rendering()  # now every text knows its size
    taken: list[Any] = []
    for point in sorted(points, key=lambda p: not p.pareto):
        where = (scaled_value(across, point), scaled_value(up, point))
        text = axis.annotate(
            label_of(found, point), where, (6, -9), textcoords="offset points", fontsize=7, color="#333333"
        )
        box = text.get_window_extent()
        dots = [axis.transData.transform((scaled_value(across, p), scaled_value(up, p))) for p in points if p != point]
        hidden = not point.pareto and any(box.contains(*dot) for dot in dots)
        if hidden or any(box.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(box)


def label_of(found: Exploration, point: Point) -> str:
    """Write the values that a point varies, alone where every point has all that vary: the title names them."""
    if all(len(p.changes) == len(found.varied) for p in found.points):
        return ", ".join(plain(value) for value in point.changes.values())
    return described(point.changes)


def finish(axis: Any, points: list[Point], across: Goal, up: Goal) -> None:
    """Give both axes their titles, and logarithmic scales where values are far apart."""
    for goal, set_scale in ((across, axis.set_xscale), (up, axis.set_yscale)):
        values = [scaled_value(goal, point) for point in points]
        if min(values) > 0 and max(values) > WIDE * min(values):
            set_scale("log")
    axis.set_xlabel(SCALES[across.name][1])
    axis.set_ylabel(SCALES[up.name][1])
    axis.margins(0.12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#e2e2e2", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, frameon=False)
