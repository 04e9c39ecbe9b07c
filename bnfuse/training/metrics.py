"""Metrics as JSON lines: one object a line, one line an epoch, and every so many steps one more.

    {"kind": "step", "epoch": 1, "step": 20, "loss": 1.9, "lr": 0.1, "images_per_second": 812.0}
    {"kind": "epoch", "epoch": 1, "step": 44, "loss": 1.7, "accuracy": 0.61, "lr": 0.097, "seconds": 2.1, ...}

`step` counts from the start of the run. A run that goes on from a checkpoint first cuts off what the file has beyond
it, so that the file becomes that of an unbroken run but for the times.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import append_line, write_atomically
from bnfuse.training.checkpoints import remove_leftovers


class Metrics:
    """A file that lines are added to, each at once. Without a path nothing is written."""

    def __init__(self, path: Path | None, *, keep: int) -> None:
        """`keep`: of what the file has, the lines up to this step stay."""
        self.path, self.keep = path, keep
        self._stream: IO[bytes] | None = None

    def __enter__(self) -> Metrics:
        if self.path is not None:
            remove_leftovers(self.path.parent, self.path.name)
            write_atomically(self.path, kept_lines(self.path, self.keep), durable=True)
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
            append_line(self._stream, self.path, strict)


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
