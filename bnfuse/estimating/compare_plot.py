"""The picture of a comparison: a bar for each level, of the time by type of layer."""

from __future__ import annotations

from typing import Any

from bnfuse.benchmarking.plot import pyplot_figure
from bnfuse.estimating.compare import Comparison
from bnfuse.estimating.plots import COLOURS, LEAST_SHARE, hardware_note, note, tidy, title
from bnfuse.text import duration


def comparison_figure(found: Comparison) -> Any:
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
    return figure
