"""A search as a picture: the accuracies of all evaluations against cost, and how the best placement came about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.core.figures import pyplot_figure, require_plotting, save_figure
from bnfuse.searching.evaluation import best_of
from bnfuse.searching.result import SearchResult

OURS, OTHER, LIMIT = "#1f4e9c", "#b8b8b8", "#c8472f"


def plot(result: SearchResult, path: str | Path) -> None:
    """Write the picture; its kind is that of the file's name."""
    require_plotting(path)
    figure = pyplot_figure()(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_front(left, result)
    draw_course(right, result)
    for axis in (left, right):
        finish_axis(axis)
    figure.suptitle(f"BatchNorms of {Path(result.model).stem}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    save_figure(figure, path)


def draw_front(axis: Any, result: SearchResult) -> None:
    """Draw all evaluations, the Pareto set joined by steps, the line below which a placement is not valid."""
    cost, accuracy = points(result, result.evaluations)
    front_cost, front_accuracy = points(result, result.pareto)
    axis.plot(cost, accuracy, "o", color=OTHER, markersize=5, label="evaluated")
    axis.step(front_cost, front_accuracy, where="post", color=OURS, linewidth=1)
    axis.plot(front_cost, front_accuracy, "o", color=OURS, markersize=6, label="Pareto set")
    least = 100 * (result.reference.accuracy - result.tolerance)
    axis.axhline(least, color=LIMIT, linewidth=1, linestyle="--", label="least valid")
    best_cost, best_accuracy = points(result, (result.best,))
    axis.plot(best_cost, best_accuracy, "o", markersize=12, markerfacecolor="none", color=LIMIT, label="best")
    axis.set_title("accuracy (%) against the cost of the BatchNorms that are kept (%)", fontsize=9, loc="left")
    axis.legend(fontsize=8, frameon=False, loc="lower right")


def points(result: SearchResult, evaluations: Any) -> tuple[np.ndarray, np.ndarray]:
    """Give costs and accuracies of evaluations, in per cent."""
    cost = [100 * result.space.cost(e.placement) for e in evaluations]
    return np.array(cost), np.array([100 * e.accuracy for e in evaluations])


def draw_course(axis: Any, result: SearchResult) -> None:
    """Draw the BatchNorms of every evaluation (filled where valid), and of the best so far."""
    done = result.evaluations
    numbers = np.arange(1, len(done) + 1)
    best = [best_of(result.space, done[:k], result.tolerance).kept for k in numbers]
    axis.step(numbers, best, where="post", color=OURS, linewidth=1.8, label="best so far")
    for valid, face in ((True, OURS), (False, "none")):
        some = [k for k, e in enumerate(done) if result.is_valid(e) == valid]
        label = "valid" if valid else "not valid"
        axis.plot(numbers[some], [done[k].kept for k in some], "o", color=OURS, markerfacecolor=face, label=label)
    axis.set_title("BatchNorms, evaluation by evaluation", fontsize=9, loc="left")
    axis.legend(fontsize=8, frameon=False)


def finish_axis(axis: Any) -> None:
    """Give an axis its grid, without the frame."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#e2e2e2", linewidth=0.8)
    axis.set_axisbelow(True)
