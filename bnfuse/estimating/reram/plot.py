"""A pipeline as a picture: the time of every stage, forward and back, and the period that the longest sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnfuse.core.figures import finish, pyplot_figure, require_plotting, save_figure
from bnfuse.estimating.reram.pipeline import Pipeline, Stage

RERAM, ERROR, GPU, PERIOD = "#1f4e9c", "#7ea6de", "#d98324", "#c8472f"
KINDS = (
    ("Conv/FC, forward (ReRAM)", RERAM, lambda x: x.unit == "reram" and x.phase in ("forward", "both")),
    ("Conv/FC, backward (ReRAM)", ERROR, lambda x: x.unit == "reram" and x.phase not in ("forward", "both")),
    ("BatchNorm, both (GPU)", GPU, lambda x: x.unit == "gpu"),
)


def plot(found: Pipeline, path: str | Path) -> None:
    """Write the picture; its kind is that of the file's name."""
    require_plotting(path)
    figure = pyplot_figure()(figsize=(10, 1.6 + 0.17 * len(found.stages)), layout="constrained")
    axis = figure.subplots()
    draw(axis, found.stages)
    axis.axvline(1e6 * found.period_s, color=PERIOD, linewidth=1.4)
    axis.invert_yaxis()
    finish(axis)
    axis.legend(loc="upper left", bbox_to_anchor=(0, -0.03), ncols=3, fontsize=8, frameon=False)
    axis.set_title(
        f"microseconds of a stage, for one image; red: the period, {1e6 * found.period_s:.1f}", fontsize=9, loc="left"
    )
    figure.suptitle(f"{found.network} on {found.config}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    save_figure(figure, path)


def draw(axis: Any, stages: tuple[Stage, ...]) -> None:
    """Draw the stages as bars of their times."""
    for label, color, belongs in KINDS:
        rows = [(index, 1e6 * stage.time_s) for index, stage in enumerate(stages) if belongs(stage)]
        axis.barh([row for row, _ in rows], [time for _, time in rows], color=color, height=0.7, label=label)
    axis.set_yticks(range(len(stages)), [f"{x.name} {x.phase if x.unit == 'reram' else ''}" for x in stages])
    axis.tick_params(axis="y", labelsize=7)
    axis.set_ylim(-0.8, len(stages) - 0.2)
