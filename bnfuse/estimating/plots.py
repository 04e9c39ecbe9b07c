"""Estimates as pictures, in the form of papers/004's figures 5.1 to 5.6; and what `--plot` draws.

Every figure has a panel for each workload. matplotlib is imported when a picture is made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bnfuse.benchmarking.plot import pyplot_figure, require_plotting, save_figure
from bnfuse.estimating.hardware import MIB
from bnfuse.estimating.quantities import cache_text
from bnfuse.estimating.result import Estimate
from bnfuse.estimating.reuse import SCOPES, Reuse, Roofline
from bnfuse.estimating.sweep import AXES, Sweep
from bnfuse.text import duration

# Okabe and Ito's colours, which colour-blind readers tell apart. Type-I layers are blues and greens.
COLOURS = {
    "Conv2D": "#0072B2",
    "DepthwiseConv2D": "#56B4E9",
    "Dense": "#004166",
    "MatMul": "#7FB8D8",
    "BatchNorm": "#D55E00",
    "LayerNorm": "#D55E00",
    "Activation": "#F0E442",
    "Dropout": "#CC79A7",
    "Add": "#009E73",
    "Mul": "#7BC8A4",
    "Softmax": "#8C5A9E",
    "Concat": "#A6761D",
    "Pool": "#BFBFBF",
    "Embedding": "#666666",
    "Loss": "#000000",
    "Copy": "#8C8C8C",
    "Other": "#D9D9D9",
}
MARKS = {"Conv2D": "o", "DepthwiseConv2D": "s", "Dense": "D", "MatMul": "P"}  # the others: x
DARK, LIGHT, LINE = "#0072B2", "#E69F00", "#009E73"
GREY = "#555555"
SCOPE_COLOURS = dict(zip(SCOPES, ("#000000", "#0072B2", "#56B4E9", "#CC79A7", "#E69F00"), strict=True))
LEAST_SHARE = 0.005  # of the time, for a type of layer to have its own place in a legend


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two sweeps of one workload over the same values: of a slower and a faster hardware."""

    slow: Sweep
    fast: Sweep


def roofline_figure(found: Sequence[Roofline]) -> Any:
    """Figure 5.1: the performance that each layer attains at its reuse frequency; a dashed line parts type I and II."""
    figure, panels = grid(len(found), sharey=True)
    for panel, workload in zip(panels, found, strict=True):
        draw_roofline(panel, workload)
    panels[0].set_ylabel("attainable GFLOP/s")
    note(figure, hardware_note(found[0].hardware, "FLOP/s", "bandwidth"))
    return figure


def draw_roofline(panel: Any, found: Roofline) -> None:
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
    """A reuse frequency with no type-I layer below and no type-II layer above; between the two, where they overlap."""
    dense = [point.reuse_frequency for point in found.points if point.dense and point.reuse_frequency > 0]
    other = [point.reuse_frequency for point in found.points if not point.dense and point.reuse_frequency > 0]
    return math.sqrt(min(dense) * max(other)) if dense and other else None


def traffic_figure(sweeps: Sequence[Sweep]) -> Any:
    """Figure 5.2: bytes into and out of the cache in an iteration, over its size."""
    figure, panels = grid(len(sweeps))
    for panel, found in zip(panels, sweeps, strict=True):
        draw_traffic(panel, found)
        name(panel, found.workload)
    note(figure, hardware_note(sweeps[0].hardware, "FLOP/s", "bandwidth"))
    return figure


def draw_traffic(panel: Any, found: Sweep) -> None:
    x, _ = horizontal(panel, found)
    total = [point.traffic_bytes for point in found.points]
    unit, factor = byte_unit(max(total))
    into = [point.traffic_in_bytes / factor for point in found.points]
    out = [point.traffic_out_bytes / factor for point in found.points]
    panel.plot(x, [count / factor for count in total], color=GREY, linewidth=1, linestyle="--", label="in and out")
    panel.plot(x, into, color=DARK, label="in")
    panel.plot(x, out, color=LIGHT, label="out")
    panel.set(ylabel=f"memory traffic ({unit})", ylim=(0, None))
    panel.legend(fontsize=7, frameon=False)


def time_figure(pairs: Sequence[Pair]) -> Any:
    """Figure 5.3: the time of an iteration at two rates of computing (left), and the speed-up (right)."""
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
    """Figure 5.4: the average bandwidth of an iteration with two memories."""
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
    """Figure 5.5: the time by type of layer, a bar for each cache size."""
    figure, panels = grid(len(sweeps))
    for panel, found in zip(panels, sweeps, strict=True):
        draw_breakdown(panel, found)
        name(panel, found.workload)
    note(figure, hardware_note(sweeps[0].hardware, "FLOP/s", "bandwidth"))
    return figure


def draw_breakdown(panel: Any, found: Sweep) -> None:
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


def stacked(found: Sweep) -> list[tuple[str, list[float]]]:
    """Seconds at each point by type of layer, type I first; types of next to no time together as Other."""
    kinds = {kind for point in found.points for kind in point.by_type}
    large = {kind for kind in kinds if any(point.share({kind}) >= LEAST_SHARE for point in found.points)}
    rows = [(kind, [point.by_type.get(kind, 0.0) for point in found.points]) for kind in COLOURS if kind in large]
    rest = [sum(time for kind, time in point.by_type.items() if kind not in large) for point in found.points]
    return [*rows, ("other", rest)] if any(rest) else rows


def batch_figure(pairs: Sequence[Pair]) -> Any:
    """Figure 5.6: samples a second over the batch, with a small cache (left axis) and a large one (right)."""
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
    """Bytes that the cache keeps off the memory bus, by scope of reuse, over its size."""
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


def plot_estimate(found: Estimate, path: str | Path) -> None:
    """`--plot` of one estimate: time by type of layer, computing and stalled; and the layers as they run."""
    require_plotting(path)
    figure = pyplot_figure()(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 3])
    draw_types(left, found)
    draw_timeline(right, found)
    what = f"{found.workload}, batch {found.batch}: {duration(found.time_s)} an iteration"
    title(figure, f"{what} on {found.hardware.name}")
    note(figure, hardware_note(found.hardware, "FLOP/s", "bandwidth", "cache"))
    save_figure(figure, path)


def draw_types(panel: Any, found: Estimate) -> None:
    kinds = [kind for kind, time in found.by_type.items() if time >= LEAST_SHARE * found.time_s]
    for place, kind in enumerate(kinds):
        mine = [layer for layer in found.layers if layer.type == kind]
        compute = 1000 * sum(layer.compute_s for layer in mine)
        stall = 1000 * sum(layer.stall_s for layer in mine)
        panel.barh(place, compute, 0.65, color=DARK, label="computing" if not place else None)
        panel.barh(place, stall, 0.65, left=compute, color=LIGHT, label="waiting for memory" if not place else None)
    panel.set_yticks(range(len(kinds)), kinds)
    panel.invert_yaxis()
    panel.set_xlabel("time (ms)")
    panel.legend(fontsize=8, frameon=False, loc="lower right")
    tidy(panel)


def draw_timeline(panel: Any, found: Estimate) -> None:
    """Bandwidth while each layer runs, over time; the backward pass begins at the mark."""
    edges, heights, start = [0.0], [], 0.0
    turn = None
    for layer in found.layers:
        if layer.phase == "backward" and turn is None:
            turn = 1000 * start
        start += layer.time_s
        if layer.time_s:
            edges.append(1000 * start)
            heights.append(layer.average_bandwidth / 1e9)
    panel.stairs(heights, edges, fill=True, color=DARK, alpha=0.8, linewidth=0)
    panel.axhline(found.hardware.bandwidth / 1e9, color=GREY, linestyle="--", linewidth=0.9)
    if turn is not None:
        panel.axvline(turn, color=LINE, linewidth=1)
        panel.annotate(
            "backward", (turn, 1), (3, 3), xycoords=("data", "axes fraction"), textcoords="offset points",
            fontsize=8, color=LINE,
        )  # fmt: skip
    panel.set(xlabel="time (ms)", ylabel="memory bus (GB/s)", xlim=(0, edges[-1]))
    tidy(panel)


def plot_sweep(found: Sweep, path: str | Path) -> None:
    """`--plot` of a sweep: traffic, time by type of layer, average bandwidth and samples a second."""
    require_plotting(path)
    figure = pyplot_figure()(figsize=(10, 6.4), layout="constrained")
    panels = figure.subplots(2, 2).flat
    draw_traffic(panels[0], found)
    draw_areas(panels[1], found)
    draw_line(panels[2], found, [point.average_bandwidth / 1e9 for point in found.points], "average bandwidth (GB/s)")
    draw_line(panels[3], found, [point.samples_per_s for point in found.points], "samples a second")
    for panel in panels:
        tidy(panel)
    title(figure, f"{found.workload} over the {found.axis}")
    fixed = [
        axis for axis in ("FLOP/s", "bandwidth", "cache") if axis != {"flops": "FLOP/s"}.get(found.axis, found.axis)
    ]
    note(figure, f"{found.hardware.name}: {hardware_note(found.hardware, *fixed)}")
    save_figure(figure, path)


def draw_line(panel: Any, found: Sweep, values: list[float], label: str) -> None:
    x, mark = horizontal(panel, found)
    panel.plot(x, values, color=DARK, marker=mark, markersize=4)
    panel.set(ylabel=label, ylim=(0, None))


def draw_areas(panel: Any, found: Sweep) -> None:
    """Time by type of layer, stacked; the axis is a quantity, so areas and not bars."""
    x, _ = horizontal(panel, found)
    rows = stacked(found)
    colours = [COLOURS.get(kind, COLOURS["Other"]) for kind, _ in rows]
    panel.stackplot(
        x, [[1000 * time for time in times] for _, times in rows], labels=[k for k, _ in rows], colors=colours
    )
    panel.set(ylabel="time (ms)", ylim=(0, None))
    handles, labels = panel.get_legend_handles_labels()
    panel.legend(handles[::-1], labels[::-1], fontsize=7, framealpha=0.9)


def horizontal(panel: Any, found: Sweep) -> tuple[list[float], str | None]:
    """The sweep's values in the unit of their axis, which gets its title; and a mark where points are few."""
    factor = {"cache": MIB, "bandwidth": 1e9, "flops": 1e12, "batch": 1}[found.axis]
    panel.set_xlabel(axis_title(found.axis))
    return [value / factor for value in found.values], "o" if len(found.points) <= 20 else None


def axis_title(axis: str) -> str:
    titles = {"cache": "cache (MB of $2^{20}$ bytes)", "bandwidth": "memory bandwidth (GB/s)", "flops": "TFLOP/s"}
    return titles.get(axis, axis)


def byte_unit(most: float) -> tuple[str, float]:
    return ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)


def grid(count: int, **share: Any) -> tuple[Any, list[Any]]:
    """A figure of `count` panels: in a row up to two, else in two columns."""
    columns = min(count, 2)
    rows = math.ceil(count / columns)
    figure = pyplot_figure()(figsize=(5 * columns, 0.4 + 2.9 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
    for panel in panels[count:]:
        panel.set_visible(False)
    for panel in panels:
        tidy(panel)
    return figure, panels[:count]


def tidy(panel: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#e6e6e6", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8)


def title(figure: Any, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")


def name(panel: Any, workload: str) -> None:
    panel.set_title(workload, fontsize=10, fontweight="bold", loc="left")


def note(figure: Any, text: str) -> None:
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color=GREY)


def hardware_note(hardware: Any, *which: str) -> str:
    texts = {
        "FLOP/s": rate(hardware),
        "bandwidth": memory_rate(hardware),
        "cache": f"cache of {cache_text(hardware.cache)}",
    }
    return ", ".join(texts[each] for each in which)


def rate(hardware: Any) -> str:
    return f"{hardware.flops / 1e12:.4g} TFLOP/s"


def memory_rate(hardware: Any) -> str:
    return f"{hardware.bandwidth / 1e9:.4g} GB/s"


def darker(colour: str) -> str:
    """For thin marks and letters: yellow and orange are too light on white."""
    return {"#F0E442": "#A89A00", "#E69F00": "#A87400", "#BFBFBF": "#8C8C8C"}.get(colour, colour)
