"""How results look: tables through rich on a terminal, the same as plain text elsewhere, JSON on request."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from bnfuse.core.errors import one_line
from bnfuse.core.files import require_writable, write_atomically
from bnfuse.core.text import Section, join, readable


def show(sections: Iterable[Section]) -> None:
    """Print sections on stdout."""
    if not sys.stdout.isatty():
        print(join(sections))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for section in sections:
        console.print(Text(section.title, style="bold"))
        if not section.columns:
            for row in section.rows:
                console.print(Text(f"  {row[0]}"))
        else:
            table = Table(box=None, pad_edge=True, header_style="dim", show_header=any(section.columns))
            for index, column in enumerate(section.columns):
                side: Literal["right", "left"] = "right" if section.is_number_column(index) else "left"
                table.add_column(column, justify=side, overflow="fold")
            for cells in section.rows:
                table.add_row(*(Text(cell) for cell in cells))
            console.print(table)
        console.print()


def show_json(value: Any) -> None:
    """Print JSON on stdout."""
    print(to_json(value))


def to_json(value: Any) -> str:
    """Write strict JSON: numbers that are not finite become null."""
    return readable(json.dumps(finite(value), indent=2, ensure_ascii=False))  # \udce9 is an escape of JSON too


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by null, at any depth."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_text(path: Path, text: str) -> None:
    """Write all of the text and a line end, or leave what was there before; through links, of which some lead to no
    file."""

    is_special = path.exists() and not path.is_file()
    write_atomically(path if is_special else path.resolve(), f"{text}\n".encode(errors="backslashreplace"))


def require_text_writable(path: Path) -> None:
    """Raise, before the work, where `write_text` could not write there."""

    if path.is_dir() or path.is_file() or not path.exists():
        require_writable(path.resolve())


SILENCE = 10.0  # seconds that pass without a line before a plain one is printed


class Progress:
    """What is going on, on stderr: a bar on a terminal that goes when it is full, timed lines elsewhere."""

    def __init__(self, opening: str | None = None) -> None:
        """`opening` is printed before the first line: not at all, where the work is refused before it begins."""
        self.opening = opening
        self.start = self.last = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.transient = False

    def __call__(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        self.last = time.monotonic()
        if self.opening is not None:
            opening, self.opening = self.opening, None
            self(opening)
        print(f"[{time.monotonic() - self.start:6.1f} s] {one_line(text)}", file=sys.stderr, flush=True)

    def bar(self, done: int, total: int, text: str = "") -> None:
        """Draw a bar on a terminal; elsewhere print a line now and then."""
        if self.terminal:
            full = 30 * done // max(total, 1)
            print(
                f"\r\x1b[K[{'#' * full}{'.' * (30 - full)}] {done}/{total} {text}", end="", file=sys.stderr, flush=True
            )
            self.transient = True
            if done == total:
                self.clear()
        elif time.monotonic() - self.last > SILENCE or done == total:
            self(f"{done} of {total} {text}".rstrip())

    def clear(self) -> None:
        """Wipe the bar off its line."""
        if self.transient:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.transient = False
