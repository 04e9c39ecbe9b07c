"""What `--plot` draws of an estimate, a sweep and levels. matplotlib is imported when a picture is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnfuse.core.figures import pyplot_figure, require_plotting, save_figure
from bnfuse.core.text import duration
from bnfuse.estimating.compare import Comparison
from bnfuse.estimating.hardware import MIB
from bnfuse.estimating.quantities import cache_text
from bnfuse.estimating.result import Estimate
from bnfuse.estimating.sweep import Sweep

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
DARK, LIGHT, LINE = "#0072B2", "#E69F00", "#009E73"
GREY = "#555555"
LEAST_SHARE = 0.005  # of the time, for a type of layer to have its own place in a legend


def plot_estimate(found: Estimate, path: str | Path) -> None:
    """Draw one estimate: time by type of layer, computing and stalled; and the layers as they run."""
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
    """Draw the time by type, compute and stall apart."""
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
    """Draw the bandwidth while each layer runs, over time; the backward pass begins at the mark."""
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
    """Draw a sweep: traffic, time by type of layer, average bandwidth and samples a second."""
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


def draw_traffic(panel: Any, found: Sweep) -> None:
    """Draw the bytes in and out over the axis."""
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


def draw_line(panel: Any, found: Sweep, values: list[float], label: str) -> None:
    """Draw values over the axis."""
    x, mark = horizontal(panel, found)
    panel.plot(x, values, color=DARK, marker=mark, markersize=4)
    panel.set(ylabel=label, ylim=(0, None))


def plot_comparison(found: Comparison, path: str | Path) -> None:
    """Draw levels: a bar for each, of the time by type of layer."""
    require_plotting(path)
    names = [each.workload for each in found.estimates]
    figure = pyplot_figure()(figsize=(8, 1.7 + 0.42 * len(names)), layout="constrained")
    panel = figure.subplots()
    starts = [0.0] * len(names)
    for kind, colour in COLOURS.items():
        widths = [1000 * each.by_type.get(kind, 0.0) for each in found.estimates]
        seen = max(each.share({kind}) for each in found.estimates) >= LEAST_SHARE
        panel.barh(
            names, widths, 0.7, starts, color=colour, label=kind if seen else None, edgecolor="white", linewidth=0.3
        )
        starts = [a + b for a, b in zip(starts, widths, strict=True)]
    for place, each in enumerate(found.estimates):
        panel.text(starts[place], place, f" {duration(each.time_s)}", va="center", fontsize=8)
    panel.margins(x=0.14)
    panel.invert_yaxis()
    panel.set_xlabel("time (ms)")
    tidy(panel)
    panel.grid(axis="y", visible=False)
    figure.legend(fontsize=8, frameon=False, ncols=8, loc="outside lower right")
    first = found.estimates[0]
    title(figure, f"{found.name}, batch {first.batch}, on {first.hardware.name}")
    note(figure, hardware_note(first.hardware, "FLOP/s", "bandwidth", "cache"))
    save_figure(figure, path)


def stacked(found: Sweep) -> list[tuple[str, list[float]]]:
    """Give the seconds at each point by type of layer, type I first; types of next to no time together as Other."""
    kinds = {kind for point in found.points for kind in point.by_type}
    large = {kind for kind in kinds if any(point.share({kind}) >= LEAST_SHARE for point in found.points)}
    rows = [(kind, [point.by_type.get(kind, 0.0) for point in found.points]) for kind in COLOURS if kind in large]
    rest = [sum(time for kind, time in point.by_type.items() if kind not in large) for point in found.points]
    return [*rows, ("other", rest)] if any(rest) else rows


def horizontal(panel: Any, found: Sweep) -> tuple[list[float], str | None]:
    """Give the sweep's values in the unit of their axis, which gets its title; and a mark where points are few."""
    factor = {"cache": MIB, "bandwidth": 1e9, "flops": 1e12, "batch": 1}[found.axis]
    panel.set_xlabel(axis_title(found.axis))
    return [value / factor for value in found.values], "o" if len(found.points) <= 20 else None


def axis_title(axis: str) -> str:
    """Write what an axis is, with its unit."""
    titles = {"cache": "cache (MB of $2^{20}$ bytes)", "bandwidth": "memory bandwidth (GB/s)", "flops": "TFLOP/s"}
    return titles.get(axis, axis)


def byte_unit(most: float) -> tuple[str, float]:
    """Choose GB or MB, and how many bytes it has."""
    return ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)


def tidy(panel: Any) -> None:
    """Give a panel its grid, without the frame."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#e6e6e6", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8)


def title(figure: Any, text: str) -> None:
    """Write the title of a figure."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")


def note(figure: Any, text: str) -> None:
    """Write a note below a figure."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color=GREY)


def hardware_note(hardware: Any, *which: str) -> str:
    """Write which hardware it is, of what is asked for."""
    texts = {
        "FLOP/s": rate(hardware),
        "bandwidth": memory_rate(hardware),
        "cache": f"cache of {cache_text(hardware.cache)}",
    }
    return ", ".join(texts[each] for each in which)


def rate(hardware: Any) -> str:
    """Write a rate of computing."""
    return f"{hardware.flops / 1e12:.4g} TFLOP/s"


def memory_rate(hardware: Any) -> str:
    """Write a bandwidth."""
    return f"{hardware.bandwidth / 1e9:.4g} GB/s"
