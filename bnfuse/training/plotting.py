"""The curves of a run as a picture: loss and accuracy, epoch by epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnfuse.core.figures import pyplot_figure, require_plotting, save_figure
from bnfuse.training.history import History

__all__ = ["draw", "require_plotting"]

LOSS, ACCURACY = "#1f4e9c", "#c8472f"


def draw(history: History, path: str | Path, title: str = "") -> None:
    """Write the picture; its kind is that of the file's name."""
    require_plotting(path)
    figure = pyplot_figure()(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = history.epochs
    left.plot([e.epoch for e in epochs], [e.loss for e in epochs], color=LOSS, marker=".")
    evaluated = [(e.epoch, 100 * e.accuracy) for e in epochs if e.accuracy is not None]
    right.plot(*zip(*evaluated, strict=True), color=ACCURACY, marker=".") if evaluated else None
    averaged = [(e.epoch, 100 * e.ema_accuracy) for e in epochs if e.ema_accuracy is not None]
    if averaged:
        right.plot(*zip(*averaged, strict=True), color=ACCURACY, marker=".", linestyle="--", label="average of weights")
        right.legend(loc="lower left", fontsize=9, frameon=False)
    for axis, what in ((left, "training loss"), (right, "accuracy on held-out images, %")):
        finish(axis, what)
    best = history.best
    if best is not None:
        note = f"best {100 * (best.score or 0.0):.2f} % in epoch {best.epoch}"
        right.text(0.98, 0.03, note, ha="right", transform=right.transAxes, fontsize=9, color="#555555")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    save_figure(figure, path)


def finish(axis: Any, what: str) -> None:
    """Give an axis its titles and grid."""
    axis.set_xlabel("epoch")
    axis.set_title(what, loc="left", fontsize=10)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
