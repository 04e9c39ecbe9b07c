"""Estimates as pictures, in the form of [Tsai21]'s figures 5.1 to 5.6. Every figure has a panel for each workload."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from bnfuse.core.figures import pyplot_figure
from bnfuse.estimating.hardware import MIB
from bnfuse.estimating.plots import (
    COLOURS,
    DARK,
    GREY,
    LEAST_SHARE,
    LIGHT,
    LINE,
    axis_title,
    byte_unit,
    draw_traffic,
    hardware_note,
    horizontal,
    memory_rate,
    note,
    rate,
    stacked,
    tidy,
)
from bnfuse.estimating.quantities import cache_text
from bnfuse.estimating.reuse import SCOPES, Reuse
from bnfuse.estimating.roofline import Roofline
from bnfuse.estimating.sweep import AXES, Sweep

MARKS = {"Conv2D": "o", "DepthwiseConv2D": "s", "Dense": "D", "MatMul": "P"}  # the others: x
SCOPE_COLOURS = dict(zip(SCOPES, ("#000000", "#0072B2", "#56B4E9", "#CC79A7", "#E69F00"), strict=True))


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two sweeps of one workload over the same values: of a slower and a faster hardware."""

    slow: Sweep
    fast: Sweep


def roofline_figure(found: Sequence[Roofline]) -> Any:
    """Draw figure 5.1: the performance that each layer attains at its reuse frequency; a dashed line parts type I and
    II."""
    figure, panels = grid(len(found), sharey=True)
    for panel, workload in zip(panels, found, strict=True):
        draw_roofline(panel, workload)
    panels[0].set_ylabel("attainable GFLOP/s")
    note(figure, hardware_note(found[0].hardware, "FLOP/s", "bandwidth"))
    return figure


def draw_roofline(panel: Any, found: Roofline) -> None:
    """Draw layers under the roof of the hardware."""
    points = [point for point in found.points if point.reuse_frequency > 0]
    low = min(point.reuse_frequency for point in points) / 2
    high = max(4 * found.ridge_point, 2 * max(point.reuse_frequency for point in points))
    peak, bandwidth = found.hardware.flops / 1e9, found.hardware.bandwidth / 1e9
    panel.plot([low, found.ridge_point, high], [low * bandwidth, peak, peak], color=GREY, linewidth=1, zorder=1)
    for kind in sorted({point.type for point in points}, key=list(COLOURS).index):
        mine = [point for point in points if point.type == kind]
        x, y = [point.reuse_frequency for point in mine], [point.attainable / 1e9 for point in mine]
        colour = darker(COLOURS[kind])
        panel.scatter(x, y, 16, color=colour, marker=MARKS.get(kind, "x"), linewidths=0.9, label=kind, zorder=2)
    parting = parting_line(found)
    if parting:
        panel.axvline(parting, color=GREY, linestyle="--", linewidth=0.9)
    panel.axvline(found.ridge_point, color=GREY, linestyle=":", linewidth=0.8)
    panel.annotate(
        f"ridge point {found.ridge_point:.1f}", (found.ridge_point, 0.02), (3, 0), xycoords=("data", "axes fraction"),
        textcoords="offset points", fontsize=7, color=GREY, rotation=90, va="bottom",
    )  # fmt: skip
    panel.set(xscale="log", yscale="log", xlabel="reuse frequency (FLOP/byte)")
    name(panel, found.workload)
    panel.legend(fontsize=6.5, loc="upper left", framealpha=0.9, handletextpad=0.1, borderpad=0.3)


def parting_line(found: Roofline) -> float | None:
    """Find a reuse frequency with no type-I layer below and no type-II layer above; between the two, where they
    overlap."""
    dense = [point.reuse_frequency for point in found.points if point.dense and point.reuse_frequency > 0]
    other = [point.reuse_frequency for point in found.points if not point.dense and point.reuse_frequency > 0]
    return math.sqrt(min(dense) * max(other)) if dense and other else None


def traffic_figure(sweeps: Sequence[Sweep]) -> Any:
    """Draw figure 5.2: bytes into and out of the cache in an iteration, over its size."""
    figure, panels = grid(len(sweeps))
    for panel, found in zip(panels, sweeps, strict=True):
        draw_traffic(panel, found)
        name(panel, found.workload)
    note(figure, hardware_note(sweeps[0].hardware, "FLOP/s", "bandwidth"))
    return figure


def time_figure(pairs: Sequence[Pair]) -> Any:
    """Draw figure 5.3: the time of an iteration at two rates of computing (left), and the speed-up (right)."""
    figure, panels = grid(len(pairs))
    for panel, pair in zip(panels, pairs, strict=True):
        x, _ = horizontal(panel, pair.slow)
        times = [[1000 * point.time_s for point in found.points] for found in (pair.slow, pair.fast)]
        for found, time, colour in zip((pair.slow, pair.fast), times, (DARK, LIGHT), strict=True):
            panel.plot(x, time, color=colour, label=rate(found.hardware))
        name(panel, pair.slow.workload)
        panel.set(ylabel="time (ms)", ylim=(0, None))
        right = panel.twinx()
        bound = pair.fast.hardware.flops / pair.slow.hardware.flops
        right.axhline(bound, color=LINE, linestyle="--", linewidth=0.9)
        right.plot(x, [a / b for a, b in zip(*times, strict=True)], color=LINE, linewidth=1, label="speed-up")
        right.set_ylabel("speed-up", color=LINE)
        right.tick_params(labelsize=8)
        right.set_ylim(1, 1 + 1.08 * (bound - 1))
        right.spines["top"].set_visible(False)
        lines = panel.get_lines() + right.get_lines()[1:]
    labels = [line.get_label() for line in lines]
    figure.legend(lines, labels, fontsize=8, loc="outside lower right", ncols=3, frameon=False)
    note(figure, f"{memory_rate(pairs[0].slow.hardware)}; dashed: the ratio of the rates of computing")
    return figure


def bandwidth_figure(pairs: Sequence[Pair]) -> Any:
    """Draw figure 5.4: the average bandwidth of an iteration with two memories."""
    figure, panels = grid(len(pairs))
    for panel, pair in zip(panels, pairs, strict=True):
        x, _ = horizontal(panel, pair.slow)
        for found, colour in ((pair.slow, DARK), (pair.fast, LIGHT)):
            label = f"memory of {memory_rate(found.hardware)}"
            panel.plot(x, [point.average_bandwidth / 1e9 for point in found.points], color=colour, label=label)
        name(panel, pair.slow.workload)
        panel.set(ylabel="average bandwidth (GB/s)", ylim=(0, None))
        panel.legend(fontsize=7, frameon=False)
    note(figure, rate(pairs[0].slow.hardware))
    return figure


def breakdown_figure(sweeps: Sequence[Sweep]) -> Any:
    """Draw figure 5.5: the time by type of layer, a bar for each cache size."""
    figure, panels = grid(len(sweeps))
    for panel, found in zip(panels, sweeps, strict=True):
        draw_breakdown(panel, found)
        name(panel, found.workload)
    note(figure, hardware_note(sweeps[0].hardware, "FLOP/s", "bandwidth"))
    return figure


def draw_breakdown(panel: Any, found: Sweep) -> None:
    """Draw bars of the time by type."""
    bottoms = [0.0] * len(found.points)
    for kind, shares in stacked(found):
        heights = [1000 * share for share in shares]
        panel.bar(
            range(len(heights)), heights, 0.7, bottoms, color=COLOURS.get(kind, COLOURS["Other"]), label=kind,
            edgecolor="white", linewidth=0.3,
        )  # fmt: skip
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    panel.set_xticks(range(len(found.points)), [AXES[found.axis].text(value) for value in found.values], fontsize=7)
    panel.set(ylabel="time (ms)", xlabel=axis_title(found.axis))
    handles, labels = panel.get_legend_handles_labels()
    beside = {"loc": "upper left", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    panel.legend(handles[::-1], labels[::-1], fontsize=6.5, frameon=False, handlelength=1.2, **beside)


def batch_figure(pairs: Sequence[Pair]) -> Any:
    """Draw figure 5.6: samples a second over the batch, with a small cache (left axis) and a large one (right)."""
    figure, panels = grid(len(pairs))
    for panel, pair in zip(panels, pairs, strict=True):
        right = panel.twinx()
        places = range(len(pair.slow.points))
        for found, axis, colour, shift in ((pair.slow, panel, DARK, -0.2), (pair.fast, right, LIGHT, 0.2)):
            heights = [point.samples_per_s for point in found.points]
            label = f"cache of {cache_text(found.hardware.cache)}"
            axis.bar([place + shift for place in places], heights, 0.38, color=colour)
            axis.set_ylabel(f"samples/s, {label}", color=darker(colour), fontsize=8)
        panel.set_xticks(places, [str(value) for value in pair.slow.values])
        name(panel, pair.slow.workload)
        panel.set(xlabel="batch")
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        right.set_ylim(0, 1.1 * right.get_ylim()[1])
        right.tick_params(labelsize=8)
        right.spines["top"].set_visible(False)
    note(figure, hardware_note(pairs[0].slow.hardware, "FLOP/s", "bandwidth") + "; two axes: compare shapes, not bars")
    return figure


def reuse_figure(found: Sequence[Reuse]) -> Any:
    """Draw bytes that the cache keeps off the memory bus, by scope of reuse, over its size."""
    figure, panels = grid(len(found))
    for panel, workload in zip(panels, found, strict=True):
        x = [each.cache / MIB for each in workload.caches]
        possible = sum(workload.possible.saved.values())
        unit, factor = byte_unit(possible)
        scopes = [scope for scope in SCOPES if workload.possible.saved[scope] > LEAST_SHARE * possible]
        layers = [[each.saved[scope] / factor for each in workload.caches] for scope in scopes]
        panel.stackplot(x, layers, labels=scopes, colors=[SCOPE_COLOURS[scope] for scope in scopes])
        panel.axhline(possible / factor, color=GREY, linestyle="--", linewidth=0.9)
        name(panel, workload.workload)
        panel.set(xlabel=axis_title("cache"), ylabel=f"kept off the bus ({unit})")
        panel.set(xlim=(x[0], x[-1]), ylim=(0, 1.05 * possible / factor))
        handles, labels = panel.get_legend_handles_labels()
        panel.legend(handles[::-1], labels[::-1], fontsize=7, loc="lower right", framealpha=0.9)
    note(figure, "dashed: all reuse there is")
    return figure


def grid(count: int, **share: Any) -> tuple[Any, list[Any]]:
    """Give a figure of `count` panels: in a row up to two, else in two columns."""
    columns = min(count, 2)
    rows = math.ceil(count / columns)
    figure = pyplot_figure()(figsize=(5 * columns, 0.4 + 2.9 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
    for panel in panels[count:]:
        panel.set_visible(False)
    for panel in panels:
        tidy(panel)
    return figure, panels[:count]


def name(panel: Any, workload: str) -> None:
    """Write the workload's name above a panel."""
    panel.set_title(workload, fontsize=10, fontweight="bold", loc="left")


def darker(colour: str) -> str:
    """Darken a colour for thin marks and letters: yellow and orange are too light on white."""
    return {"#F0E442": "#A89A00", "#E69F00": "#A87400", "#BFBFBF": "#8C8C8C"}.get(colour, colour)
