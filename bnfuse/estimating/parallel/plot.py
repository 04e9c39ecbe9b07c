"""Scaling curves as a picture: speed-up over the number of workers, and what a step's time goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bnfuse.core.figures import pyplot_figure, require_plotting, save_figure
from bnfuse.estimating.parallel.scaling import NAMES, Point, Scaling

COLOURS = ("#1f4e9c", "#c8472f", "#3b8a4e", "#8a5a9c", "#b58a1b", "#6b6b6b")
Mark = tuple[str, int, float]  # measured: label of its curve's colour, workers, speed-up


def plot(scalings: Sequence[Scaling], path: str | Path, *, marks: Sequence[Mark] = (), title: str = "") -> None:
    """Draw one curve a scaling: solid where it is strong, dashed where it is weak. `marks` are measured speed-ups."""
    require_plotting(path)
    figure = pyplot_figure()(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = colours_of(scalings)
    for scaling in scalings:
        style = {"color": colours[scaling.name], "linestyle": "-" if scaling.mode == "strong" else "--"}
        draw(left, scaling, lambda p: p.speedup, f"{scaling.name}, {scaling.mode}", style)
        draw(right, scaling, lambda p: p.exposed_s / p.step_s, None, style)
    workers = sorted({p.workers for scaling in scalings for p in scaling.points})
    left.plot(workers, workers, color="#b8b8b8", linewidth=1, label="linear")
    for label, count, speedup in marks:
        left.plot([count], [speedup], "o", color=colours.get(label, "#333333"), markersize=6)
    if marks:
        left.plot([], [], "o", color="#333333", label="measured")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(workers, [str(n) for n in workers])
        axis.set_xlabel("workers", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e2e2e2", linewidth=0.8)
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    left.set_title("speed-up over one worker", fontsize=9, loc="left")
    left.legend(fontsize=8, frameon=False)
    right.set_ylim(0, None)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_title("waiting for communication, part of a step", fontsize=9, loc="left")
    figure.suptitle(title or heading(scalings), x=0.01, ha="left", fontsize=12, fontweight="bold")
    save_figure(figure, path)


def colours_of(scalings: Sequence[Scaling]) -> dict[str, str]:
    """Give each network a colour."""
    names = dict.fromkeys(scaling.name for scaling in scalings)
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def heading(scalings: Sequence[Scaling]) -> str:
    """Give the title where none is given: what one scaling is of."""
    if len(scalings) != 1:
        return "Data-parallel training"
    return f"{scalings[0].name} on {scalings[0].hardware}, {NAMES[scalings[0].strategy]}, {scalings[0].network}"


def draw(
    axis: Any, scaling: Scaling, value: Callable[[Point], float], label: str | None, style: dict[str, str]
) -> None:
    """Draw a line over the number of workers."""
    points = sorted(scaling.points, key=lambda p: p.workers)
    axis.plot([p.workers for p in points], [value(p) for p in points], marker=".", label=label, **style)
