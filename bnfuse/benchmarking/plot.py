"""A benchmark as a picture: bars of the shortest forward and backward times, marks at medians, peak memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnfuse.benchmarking.results import Benchmark, Result
from bnfuse.core.figures import finish, pyplot_figure, require_plotting, save_figure

OURS, BASELINE = ("#1f4e9c", "#7ea6de"), ("#6b6b6b", "#b8b8b8")  # forward, backward
MEDIAN = "#c8472f"


def plot(found: Benchmark, path: str | Path) -> None:
    """Write the picture; its kind is that of the file's name."""
    require_plotting(path)
    results = found.results
    figure = pyplot_figure()(figsize=(10, 1.5 + 0.5 * len(results)), layout="constrained")
    memory = any(result.peak_bytes for result in results)
    axes = figure.subplots(1, 2 if memory else 1, sharey=True, squeeze=False, width_ratios=[3, 2] if memory else [1])[0]
    draw_times(axes[0], results)
    axes[0].set_yticks(range(len(results)), [result.name for result in results])
    axes[0].invert_yaxis()
    if memory:
        draw_memory(axes[1], results)
    for axis in axes:
        finish(axis)
    machine = found.machine
    figure.suptitle(f"A training step of {Path(found.model).stem}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    note = f"{machine.get('cpu_model', '')}, {machine.get('threads')} threads, {found.repetitions} repetitions"
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="#555555")
    save_figure(figure, path)


def draw_times(axis: Any, results: tuple[Result, ...]) -> None:
    """Draw milliseconds; beside each bar its step's minimum. Medians far off the bars are written, not drawn."""
    right = 1.3 * max(1000 * result.times.min_s for result in results)
    for index, result in enumerate(results):
        dark, light = OURS if result.is_ours else BASELINE
        forward = 1000 * (result.times.forward_min_s or 0.0)
        whole = max(1000 * result.times.min_s, forward)
        axis.barh(index, forward, color=dark, height=0.62)
        axis.barh(index, whole - forward, left=forward, color=light, height=0.62)
        median, label, end = 1000 * result.times.median_s, short(whole), whole
        if median < right:
            axis.plot([median, median], [index - 0.38, index + 0.38], color=MEDIAN, linewidth=1.8)
            end = max(whole, median)
        else:
            label += f"  (median {short(median)})"
        axis.annotate(label, (end, index), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axis.set_title("milliseconds: forward (dark), backward and update (light), median (red)", fontsize=9, loc="left")


def short(value: float) -> str:
    """Write a number in three digits, or whole from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw_memory(axis: Any, results: tuple[Result, ...]) -> None:
    """Draw a bar for each peak of memory, in MB."""
    for index, result in enumerate(results):
        if result.peak_bytes:
            size = result.peak_bytes / 1e6
            axis.barh(index, size, color=(OURS if result.is_ours else BASELINE)[1], height=0.62)
            axis.annotate(short(size), (size, index), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axis.set_title("peak memory, MB", fontsize=9, loc="left")
