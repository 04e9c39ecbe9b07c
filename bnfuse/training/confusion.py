"""Which classes are taken for which: a confusion matrix as a table or a picture.

    require_confusion("confusion.png")                # before the work
    write_confusion(evaluation, "confusion.png")      # or .csv, .svg, .pdf

A row is a class, its columns what its images were taken for. Colours are shares of the row.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.figures import FORMATS, pyplot_figure, require_plotting, save_figure
from bnfuse.core.files import require_writable, write_atomically
from bnfuse.training.history import percent
from bnfuse.training.scoring import CONFUSED, Evaluation

TABLE = ".csv"
NUMBERED, NAMED = 24, 60  # classes up to which cells have numbers, and axes names
DARK = 0.55  # share of a row from which numbers are white


def require_confusion(path: str | Path) -> None:
    """Check before any work that such a file can be written. Raises BnfuseError where it cannot."""
    suffix = Path(path).suffix.lower()
    if suffix != TABLE and suffix not in FORMATS:
        raise BnfuseError(f"{path}: a confusion matrix ends in {', '.join((TABLE, *FORMATS))}")
    if suffix != TABLE:
        require_plotting(path)
    require_writable(path)


def write_confusion(found: Evaluation, path: str | Path) -> None:
    """Write the matrix; its kind is that of the file's name."""
    if found.confusion is None:
        raise BnfuseError(f"{path}: a confusion matrix of more than {CONFUSED} classes is not counted")
    names = [found.name_of(index) for index in range(len(found.confusion))]
    if Path(path).suffix.lower() == TABLE:
        write_atomically(Path(path), table(found.confusion, names).encode(errors="backslashreplace"))
    else:
        save_figure(figure_of(found, found.confusion, names), path)


def table(counts: np.ndarray, names: list[str]) -> str:
    """Write the counts as CSV: a row for each class, a column for each answer, names in front."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["class", *names])
    writer.writerows([name, *map(int, row)] for name, row in zip(names, counts, strict=True))
    return text.getvalue()


def figure_of(found: Evaluation, counts: np.ndarray, names: list[str]) -> Any:
    """Draw the matrix."""
    classes = len(names)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    cell = max(0.5, 0.085 * max(len(str(counts.max())), 3)) if classes <= NUMBERED else 0.22
    side = float(np.clip(cell * classes, 2.2, 14))
    longest = max(map(len, names)) if classes <= NAMED else 0
    margin = 0.7 + 0.08 * min(longest, 24)
    figure = pyplot_figure()(figsize=(side + margin + 0.9, side + margin + 0.5), layout="constrained")
    axis = figure.subplots()
    picture = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    bar = figure.colorbar(picture, ax=axis, fraction=0.046, pad=0.03, format=lambda share, _: f"{100 * share:.0f} %")
    bar.outline.set_visible(False)
    bar.set_label("share of the class", fontsize=9)
    if classes <= NAMED:
        short = [name if len(name) <= 24 else f"{name[:23]}…" for name in names]
        axis.set_xticks(range(classes), short, rotation=90 if longest > 2 else 0, fontsize=9)
        axis.set_yticks(range(classes), short, fontsize=9)
    if classes <= NUMBERED:
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > DARK else "#222222"
            axis.text(column, row, f"{counts[row, column]}", ha="center", va="center", fontsize=8, color=colour)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_xlabel("taken for")
    axis.set_ylabel("class")
    axis.set_title(f"{percent(found.accuracy)} right", loc="left", fontsize=11)
    return figure
