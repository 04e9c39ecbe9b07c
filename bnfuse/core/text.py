"""Plain text for people: aligned tables and numbers with units. Terminals get the same tables through rich."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Section:
    """A titled table, or titled lines where there are no columns (each row is then one line)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def table(cls, title: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Section:
        """Make a table; cells are shown as text."""
        return cls(title, tuple(columns), tuple(tuple(str(cell) for cell in row) for row in rows))

    @classmethod
    def lines(cls, title: str, lines: Iterable[str]) -> Section:
        """Make a titled list of lines."""
        return cls(title, (), tuple((line,) for line in lines))

    def __str__(self) -> str:
        if not self.columns:
            return "\n".join([self.title, *(f"  {row[0]}" for row in self.rows)])
        cells = (self.columns, *self.rows)
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        right = [self.is_number_column(i) for i in range(len(self.columns))]
        cells = cells if any(self.columns) else self.rows
        lines = [
            "  ".join(
                cell.rjust(width) if flush else cell.ljust(width)
                for cell, width, flush in zip(row, widths, right, strict=True)
            )
            for row in cells
        ]
        return "\n".join([self.title, *(f"  {line.rstrip()}" for line in lines)])

    def is_number_column(self, index: int) -> bool:
        """Tell whether the column is flushed right: every cell starts like a number."""
        return bool(self.rows) and all(re.match(r"[-+]?[0-9.]|-?$|inf|nan", row[index]) for row in self.rows)


def csv_text(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Write CSV with a line of names, every line with its end."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def spelt(value: float) -> str:
    """Write a number as it reads best, `0.1` or `30`, with all digits where these would be another one."""
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


def readable(name: str) -> str:
    """Give a name that any file takes: bytes of a file's name that are no UTF-8 are written out."""
    return name.encode(errors="backslashreplace").decode()


def join(sections: Iterable[Section]) -> str:
    """Write sections one below the other, with an empty line between them."""
    return "\n\n".join(str(section) for section in sections)


def number(value: float) -> str:
    """Write 12345678 as 12,345,678; other than integers in three significant digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def scaled(value: float, unit: str) -> str:
    """Write 1234567, "B" as 1.23 MB (decimal prefixes)."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}" if prefix else f"{value:g} {unit}"


def duration(seconds: float) -> str:
    """Write 0.0123 as 12.3 ms: three digits, in ns, us, ms or s."""
    for factor, unit in ((1e9, "ns"), (1e6, "us"), (1e3, "ms")):
        if 0 < factor * abs(seconds) < 999.5:
            return f"{factor * seconds:.3g} {unit}"
    return f"{seconds:.3g} s" if abs(seconds) < 999.5 else f"{seconds:,.0f} s"


def percent(share: float) -> str:
    """Write 0.4615 as 46.1 %."""
    return f"{100 * share:.1f} %"


def change(before: float, after: float) -> str:
    """Give the relative change in per cent, with its sign."""
    if before == after:
        return "0 %"
    if not before:
        return "new"
    return f"{100 * (after - before) / before:+.1f} %"


def count(n: int, noun: str) -> str:
    """Write 1, "node" as "1 node"; 2, "node" as "2 nodes"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def some(names: Sequence[str], most: int = 3) -> str:
    """Give the first names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
