"""Pages to test: small graphs, graphs whose names attack, and a strict reader of the HTML."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import onnx_ir as ir

import bnfuse
from bnfuse.build.named import build_model

VOID = {"meta", "link", "input", "br", "wbr"}
SMALL = {"batch": 2, "image": 16, "growth": 4, "depth": 3}
HOSTILE = (
    "</script><script>window.pwned = 1</script>",
    '"><img src=x onerror="window.pwned = 1">',
    "<!--<script>",
    "'-window.pwned=1-'",
    "line\u2028break\u2029and &amp; &lt;b&gt;",
    "#node=a&side=after+%2F %",
    "javascript:window.pwned=1",
    "\u202eright to left, \u00fcml\u00e4ut, \u5c64",
)


def small() -> ir.Model:
    return ir.from_proto(build_model("densenet40", zoo=SMALL).model)


def hostile() -> ir.Model:
    """The small graph; its nodes, and the values between them, have names that try to become HTML or script."""
    model = small()
    outputs = set(model.graph.outputs)
    for i, node in enumerate(model.graph):
        node.name = f"{HOSTILE[i % len(HOSTILE)]}{i}"
        for value in node.outputs:
            if value.name and value not in outputs:
                value.name = f"{HOSTILE[(i + 1) % len(HOSTILE)]}{value.name}"
    return model


def hostile_pair() -> tuple[ir.Model, ir.Model]:
    """Before and after; even the passes' names attack."""
    before = hostile()
    after = bnfuse.rewrite(before, level="icf").model
    for i, node in enumerate(after.graph):
        if i % 3 == 0 and "bnfuse.pass" in node.metadata_props:
            node.metadata_props["bnfuse.pass"] = HOSTILE[i % len(HOSTILE)]
    return before, after


class Document(HTMLParser):
    """The elements of a page, in order: [name, attributes, text]. Raises where tags do not match."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.feed(page)
        self.close()
        assert not self.open, [self.elements[i][0] for i in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {tag}"
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.elements[self.open[-1]][0] == tag, f"</{tag}> closes <{self.elements[self.open[-1]][0]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for i in self.open:
            self.elements[i][2].append(data)

    def named(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.elements if name == tag]

    @property
    def data(self) -> dict[str, Any]:
        """What the script reads."""
        return next(json.loads(text) for attributes, text in self.named("script") if attributes.get("id") == "data")

    def tables(self) -> dict[str, dict[str, list[str]]]:
        """caption -> name of the row -> exact numbers (the `value` of each <data>)."""
        found: dict[str, dict[str, list[str]]] = {}
        row: list[str] = []
        for tag, attributes, text in self.elements:
            if tag == "caption":
                table = found.setdefault("".join(text), {})
            elif tag == "th" and attributes.get("scope") == "row":
                row = table.setdefault("".join(text), [])
            elif tag == "data":
                row.append(attributes["value"] or "")
        return found
