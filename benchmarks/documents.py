"""Documents that programs make: tables in a document, between their marks, and whole files.

    python benchmarks/documents.py       writes anew all that is quick to make (a few seconds)

Tests hold each of them against what makes it. Tables and plots that take minutes are written by scripts of their own.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pictures

from bnfuse.core.text import Section
from bnfuse.opset import pages as operators
from bnfuse.passes import pages as passes

DOCS = Path(__file__).resolve().parents[1] / "docs"
DECISION = re.compile(r'^## <a id="(d\d+)"></a>(D\d+)\. (.*)\n\*(\d{4}-\d\d-\d\d)\*$', re.MULTILINE)


def marks(script: str) -> tuple[str, str]:
    return f"<!-- begin: benchmarks/{script} -->", f"<!-- end: benchmarks/{script} -->"


def write_into(document: Path, script: str, parts: Iterable[Section]) -> None:
    """Replace what stands between the marks of a script."""
    text = document.read_text(encoding="utf-8")
    try:
        text = between(text, script, "\n\n".join(map(markdown, parts)))
    except ValueError as error:
        raise SystemExit(f"{document} {error}") from None
    document.write_text(text, encoding="utf-8")


def between(text: str, script: str, body: str) -> str:
    """The text with `body` between the marks of a script. Raises ValueError where a mark is missing."""
    begin, end = marks(script)
    if begin not in text or end not in text:
        raise ValueError(f"lacks the marks {begin} and {end}")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    return f"{before}{begin}\n\n{body}\n\n{end}{after}"


def markdown(section: Section) -> str:
    title = section.title.replace("*", "\\*")
    if not section.columns:
        return "\n".join([f"**{title}**", "", *(f"- {row[0]}" for row in section.rows)])
    rules = ["---:" if section.is_number_column(i) else "---" for i in range(len(section.columns))]
    rows = [section.columns, tuple(rules), *section.rows]
    return "\n".join([f"**{title}**", "", *(f"| {' | '.join(map(escape, row))} |" for row in rows)])


def escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*")


def decisions() -> str:
    """docs/decisions.md with its table of contents."""
    text = (DOCS / "decisions.md").read_text(encoding="utf-8")
    parts: list[str] = []
    for date, found in itertools.groupby(DECISION.findall(text), key=lambda entry: entry[3]):
        parts += [f"**{date}**", "\n".join(f"- [{number}](#{anchor}) {title}" for anchor, number, title, _ in found)]
    return between(text, "documents.py", "\n\n".join(parts))


def architecture() -> str:
    """docs/architecture.md with its tables of rooms."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    tables = [f"### {contract.container}\n\n{pictures.rooms_table(contract)}" for contract in pictures.contracts()]
    return between(text, "documents.py", "\n\n".join(tables))


GENERATED: dict[str, Callable[[], str]] = {
    "ops.md": operators.render,
    "passes.md": passes.page,
    "decisions.md": decisions,
    "architecture.md": architecture,
    "architecture.svg": pictures.architecture,
    "packages.svg": pictures.packages,
}
"""By name in docs/: what makes the file."""


def main() -> None:
    for name, make in GENERATED.items():
        (DOCS / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
