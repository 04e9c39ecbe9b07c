"""Docstrings as Markdown: what stands in columns (names, then what they mean) is kept as it stands."""

from __future__ import annotations

import re
from typing import Any

import griffe

COLUMNS = re.compile(r"\S.*?\S? {2,}\S")


class Columns(griffe.Extension):
    """Indents the paragraphs of a docstring that are set in columns, so that they are shown as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Lay out the docstring of an object that griffe has read."""
        if obj.docstring:
            obj.docstring.value = laid_out(obj.docstring.value)


def laid_out(text: str) -> str:
    """Make code blocks of the columns in a text."""
    return "\n\n".join(map(_paragraph, text.split("\n\n")))


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    columns = [line for line in lines if COLUMNS.match(line)]
    if len(columns) < 2 or lines[0].startswith(" "):
        return text
    return "\n".join(f"    {line}" for line in lines)
