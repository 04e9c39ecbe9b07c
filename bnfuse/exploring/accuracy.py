"""Accuracies that were measured elsewhere, joined to the points that they belong to.

    squeeze,accuracy
    0.125,80.3
    0.75,86.0

Columns other than `accuracy` are settings; a row belongs to the points that have all of its settings.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from bnfuse.core.errors import BnfuseError
from bnfuse.exploring.axes import Settings, settings_of
from bnfuse.exploring.points import Point

COLUMN = "accuracy"
Row = tuple[Settings, float]


def read_accuracies(path: str | Path, network: str) -> list[Row]:
    """Read a CSV of accuracies: settings of the network, and what they gave. Raises BnfuseError, with the line, where
    one is no such thing."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as stream:
            lines = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BnfuseError(f"{path}: cannot be read: {error}") from None
    if not lines or COLUMN not in lines[0]:
        raise BnfuseError(f"{path}: has no column '{COLUMN}' with a line below it")
    return [_row(path, network, number, line) for number, line in enumerate(lines, 2)]


def _row(path: str | Path, network: str, number: int, line: dict[str, str]) -> Row:
    if None in line or None in line.values():
        raise BnfuseError(f"{path}: line {number} has not as many cells as there are columns")
    try:
        accuracy = float(line[COLUMN])
    except ValueError:
        accuracy = math.nan
    if not math.isfinite(accuracy):
        raise BnfuseError(f"{path}: line {number}: accuracy '{line[COLUMN]}' is no number")
    try:
        return settings_of(network, {key: value for key, value in line.items() if key != COLUMN}), accuracy
    except BnfuseError as error:
        raise BnfuseError(f"{path}: line {number}: {error}") from None


def row_of(rows: Sequence[Row], full: Settings) -> Row | None:
    """Give the last row that belongs to a point with these settings, defaults included."""
    found = [row for row in rows if all(full.get(key) == value for key, value in row[0].items())]
    return found[-1] if found else None


def with_accuracies(points: Sequence[Point], rows: Sequence[Row], settings: Sequence[Settings]) -> list[Point]:
    """Join accuracies to points; `settings` are each point's in full, defaults included."""
    known = [row_of(rows, full) for full in settings]
    return [
        dataclasses.replace(point, accuracy=row[1] if row else None) for point, row in zip(points, known, strict=True)
    ]
