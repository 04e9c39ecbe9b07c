"""HTML from Python: every text and every attribute is escaped, because names come from files of others."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

VOID = ("meta", "link", "input", "br", "wbr")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already."""


def text(value: object) -> Markup:
    """Give a text that shows as it is; what no document may contain shows as a box."""
    return value if isinstance(value, Markup) else Markup(html.escape(CONTROL.sub("�", str(value)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Write an element: tag("a", "x", href="#y", class_="z"). None leaves an attribute out, True gives it without a
    value."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    opening = f"<{name}{written}>"
    return Markup(opening if name in VOID else f"{opening}{joined(children)}</{name}>")


def joined(children: Iterable[object]) -> Markup:
    """Join pieces; text is escaped, markup stays."""
    return Markup("".join(text(child) for child in children))


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()
) -> Markup:
    """Give a table whose first column names its rows; the columns `numbers` are flushed right."""

    def side(i: int) -> str | None:
        return "number" if i in numbers else None

    head = [tag("th", column, scope="col", class_=side(i)) if column else tag("td") for i, column in enumerate(columns)]
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(tag("td", cell, class_=side(i)) for i, cell in enumerate(row[1:], start=1)),
        )
        for row in rows
    ]
    inside = tag("table", tag("caption", caption), tag("thead", tag("tr", *head)), tag("tbody", *body))
    return tag("div", inside, class_="table", tabindex="0", role="region", aria_label=caption)


def script_json(value: Any) -> Markup:
    """Write JSON that may stand in a script element: no "<", ">" or "&", nothing that ends a line in JavaScript."""
    written = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
