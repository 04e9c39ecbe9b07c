"""How the Markdown of the repository becomes the site: pages from outside docs/, and links as the repository has them.

A link of a document leads from its place in the repository. To what is a page here it is turned to that page; a file
that is none is named and not linked; one that does not exist stays, and the build says so.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "numbers.md",
}
"""Documents outside docs/: what page each is."""

FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^)\s]+)\)")
DEFINITION = re.compile(r"^(\[[^\]]+\]:\s+)(\S+)$", re.MULTILINE)
OUTSIDE = ("http:", "https:", "mailto:", "#")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page's text, and give it the blank lines that this Markdown wants."""
    here = page.file.src_uri
    source = next((name for name, uri in PAGES.items() if uri == here), f"docs/{here}")
    return outside_fences(markdown, lambda text: spaced(turned(text, source, here)))


def outside_fences(markdown: str, change: Any) -> str:
    """Change all of a text but its code blocks."""
    parts, last = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[last : fence.start()]), fence.group()]
        last = fence.end()
    return "".join([*parts, change(markdown[last:])])


def turned(text: str, source: str, here: str) -> str:
    """Turn the links in the text of a file of the repository to what page `here` needs."""

    def inline(match: re.Match[str]) -> str:
        target = address(match["target"], source, here)
        if target is None:
            return match["text"]
        return f"{match['image']}[{match['text']}]({target})"

    text = LINK.sub(inline, text)
    return DEFINITION.sub(lambda match: match[1] + (address(match[2], source, here) or match[2]), text)


def address(target: str, source: str, here: str) -> str | None:
    """Find where a link of the file `source` leads from page `here`; None: to a file that is no page."""
    if target.startswith(OUTSIDE):
        return target
    path, _, anchor = target.partition("#")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = PAGES.get(place)
    if page is None and place.startswith("docs/"):
        page = place.removeprefix("docs/")
    if page is None:
        return None if (ROOT / place).exists() else target
    link = posixpath.relpath(page, posixpath.dirname(here) or ".")
    return f"{link}#{anchor}" if anchor else link


def spaced(text: str) -> str:
    """Put a blank line before lists and tables that follow a line of text; GitHub's Markdown needs none."""
    lines: list[str] = []
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        begins = re.match(r"([-*]|\d+\.) |\|", line)
        if begins and before.strip() and not re.match(r"\s|([-*]|\d+\.) |\|", before):
            lines.append("")
        lines.append(row(line) if line.startswith("|") else line)
    return "\n".join(lines)


def row(line: str) -> str:
    """Write a table's row as this Markdown wants it: no escapes of pipes in code, and no number apart from its unit."""
    line = re.sub(r"`[^`]+`", lambda code: code.group().replace("\\|", "|"), line)
    return re.sub(r"(?<=\d) (?=(?:[munµ]?s|[kMGT]i?B|B|%)(?:/s)? *\|)", "\u00a0", line)
