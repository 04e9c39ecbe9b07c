"""Tables that a script writes into a document, between its marks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bnfuse.core.text import Section


def marks(script: str) -> tuple[str, str]:
    return f"<!-- begin: benchmarks/{script} -->", f"<!-- end: benchmarks/{script} -->"


def write_into(document: Path, script: str, parts: Iterable[Section]) -> None:
    """Replace what stands between the marks of a script."""
    text = document.read_text(encoding="utf-8")
    begin, end = marks(script)
    if begin not in text or end not in text:
        raise SystemExit(f"{document} lacks the marks {begin} and {end}")
    body = "\n\n".join(map(markdown, parts))
    before, after = text.partition(begin)[0], text.partition(end)[2]
    document.write_text(f"{before}{begin}\n\n{body}\n\n{end}{after}", encoding="utf-8")


def markdown(section: Section) -> str:
    if not section.columns:
        return "\n".join([f"**{section.title}**", "", *(f"- {row[0]}" for row in section.rows)])
    rules = ["---:" if section.is_number_column(i) else "---" for i in range(len(section.columns))]
    rows = [section.columns, tuple(rules), *section.rows]
    return "\n".join([f"**{section.title}**", "", *(f"| {' | '.join(map(escape, row))} |" for row in rows)])


def escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*")
