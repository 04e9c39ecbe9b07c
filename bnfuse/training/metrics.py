"""Metrics as JSON lines, or as CSV: one line an epoch, and every so many steps one more.

    {"kind": "step", "epoch": 1, "step": 20, "loss": 1.9, "lr": 0.1, "images_per_second": 812.0}
    {"kind": "epoch", "epoch": 1, "step": 44, "loss": 1.7, "accuracy": 0.61, "lr": 0.097, "seconds": 2.1, ...}

`step` counts from the start of the run. A run that goes on from a checkpoint first cuts off what the file has beyond
it, so that the file becomes that of an unbroken run but for the times. A file FILE.csv has the same in columns, which
are empty where a line has no such number.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import append, append_line, write_atomically
from bnfuse.training.checkpoints import remove_leftovers
from bnfuse.training.history import Epoch

COLUMNS = tuple(dict.fromkeys(("kind", "epoch", "step", *(field.name for field in dataclasses.fields(Epoch)))))


class Metrics:
    """A file that lines are added to, each at once. Without a path nothing is written."""

    def __init__(self, path: Path | None, *, keep: int) -> None:
        """`keep`: of what the file has, the lines up to this step stay."""
        self.path, self.keep = path, keep
        self._stream: IO[bytes] | None = None

    @property
    def is_table(self) -> bool:
        """Whether the file is of CSV."""
        return self.path is not None and self.path.suffix.lower() == ".csv"

    def __enter__(self) -> Metrics:
        if self.path is not None:
            remove_leftovers(self.path.parent, self.path.name)
            kept = kept_rows(self.path, self.keep) if self.is_table else kept_lines(self.path, self.keep)
            write_atomically(self.path, kept, durable=True)
            try:
                self._stream = self.path.open("ab", buffering=0)
            except OSError as error:
                raise BnfuseError(f"{self.path}: cannot be written: {error.strerror}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.close()

    def write(self, **fields: Any) -> None:
        """Add a line; numbers that are not finite become null."""
        if self._stream is not None and self.path is not None:
            strict = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
            if self.is_table:
                append(self._stream, self.path, row_of(strict.get(name) for name in COLUMNS))
            else:
                append_line(self._stream, self.path, strict)


def row_of(cells: Iterable[Any]) -> bytes:
    """Write a row of CSV; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow("" if cell is None else cell for cell in cells)
    return text.getvalue().encode(errors="backslashreplace")


def kept_rows(path: Path, last: int) -> bytes:
    """Do what `kept_lines` does of a CSV file; its first row is always there."""
    head = row_of(COLUMNS)
    lines = path.read_bytes().splitlines(keepends=True) if last > 0 and path.exists() else []
    if not lines or lines[0] != head:
        return head
    found = [head]
    for line in lines[1:]:
        cells = line.decode(errors="replace").split(",")
        step = cells[COLUMNS.index("step")] if len(cells) == len(COLUMNS) else ""
        if not line.endswith(b"\n") or not (step.isascii() and step.isdigit()) or int(step) > last:
            break
        found.append(line)
    return b"".join(found)


def kept_lines(path: Path, last: int) -> bytes:
    """Give the lines of steps up to `last`. A line that was cut short, or is not ours, ends them."""
    if last <= 0 or not path.exists():
        return b""
    found = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        if not line.endswith(b"\n") or not isinstance(step, int) or step > last:
            break
        found.append(line)
    return b"".join(found)
