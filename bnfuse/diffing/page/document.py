"""The page as one file that asks for nothing: style, script and data stand in it, and its policy forbids all else.

Style and script are allowed by their digests, so that nothing that a name smuggles in could run. The data is JSON in a
script element that is no script; the script shows it as text only.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from bnfuse.core.text import count
from bnfuse.diffing.page import lists, summary
from bnfuse.diffing.page.data import data_of
from bnfuse.diffing.page.gather import Page
from bnfuse.diffing.page.markup import Markup, joined, script_json, tag

SCRIPTS = ("graph.js", "details.js", "page.js")


def render(page: Page) -> str:
    """Write the page: one file, with its style and script inside."""
    style = asset("page.css")
    script = "".join(asset(name) for name in SCRIPTS)
    title = f"{page.name_before} → {page.name_after}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content="bnfuse"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title} · bnfuse"),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        header(page),
        tag("main", *sections(page), id="main"),
        tag("script", script_json(data_of(page)), type="application/json", id="data"),
        tag("script", Markup(script)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}"


def asset(name: str) -> str:
    """Read a file of this folder."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def policy(style: str, script: str) -> str:
    """Write the content security policy: nothing but what the page itself holds."""
    return (
        f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def digest(source: str) -> str:
    """Hash a style or script as a policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def header(page: Page) -> Markup:
    """Write the head of the page: what is compared."""
    kind = f"Rewrite report, level {page.report['level']}" if page.report else "Graph diff"
    files = tag(
        "dl",
        *(tag("div", tag("dt", side), tag("dd", name)) for side, name in both(page)),
        class_="files",
    )
    skip = tag("a", "Skip to the graphs", href="#graphs", class_="skip")
    return joined(
        [
            skip,
            tag(
                "header",
                tag("p", f"bnfuse · {kind}", class_="kind"),
                tag("h1", "What the rewrite did" if page.report else "What differs"),
                files,
            ),
        ]
    )


def both(page: Page) -> tuple[tuple[str, str], tuple[str, str]]:
    """Pair the two sides with their names."""
    return ("before", page.name_before), ("after", page.name_after)


def sections(page: Page) -> list[Markup]:
    """Write the sections in their order."""
    notes = [tag("p", "The graphs are equal.", class_="banner", role="status")] if page.diff.equal else []
    if page.is_reversed:
        order = "The graph before looks like a rewrite of the graph after: to see what it did, swap the two."
        notes.append(tag("p", order, class_="banner turned", role="status"))
    found = [
        section("summary", "Summary", *notes, summary.figures(page), summary_tables(page)),
        section("graphs", "Graphs side by side", explorer()),
        section(
            "norms",
            f"BatchNorms ({len(page.norms)})",
            summary.statuses(page),
            tag("div", lists.norm_list(page), class_="norms"),
        ),
    ]
    if page.report:
        found.append(section("rewrite", "Passes and refusals", lists.report_parts(page.report)))
    found.append(section("other", "Other differences", lists.differences(page)))
    return found


def section(name: str, title: str, *inside: Markup) -> Markup:
    """Write a section with its heading."""
    return tag("section", tag("h2", title, id=f"{name}-title"), *inside, id=name, aria_labelledby=f"{name}-title")


def summary_tables(page: Page) -> Markup:
    """Write the tables of traffic and of operators."""
    changed = len({*page.diff.ops_before} | {*page.diff.ops_after})
    operators = lists.folded(f"Operators ({count(changed, 'kind')})", summary.operators(page))
    return joined(
        [
            tag("div", summary.traffic(page), summary.estimated(page.estimates), class_="tables"),
            tag(
                "p",
                tag("span", class_="key bar-before"),
                " before ",
                tag("span", class_="key bar-after"),
                " after",
                class_="note keys",
            ),
            operators,
        ]
    )


def explorer() -> Markup:
    """Tell what the script fills; without it a sentence stands here, and the lists below say the same."""
    note = "The graphs side by side need JavaScript. Every number, and what became of each BatchNorm, is listed below."
    tools = tag(
        "div",
        tag("label", "Find a node ", tag("kbd", "/"), for_="search"),
        tag(
            "input",
            id="search",
            type="search",
            autocomplete="off",
            spellcheck="false",
            placeholder="name, operator or pass",
            aria_describedby="hits",
        ),
        tag(
            "button",
            "↑",
            id="previous-hit",
            type="button",
            aria_label="Previous hit",
            title="Previous hit (Shift+Enter)",
        ),
        tag("button", "↓", id="next-hit", type="button", aria_label="Next hit", title="Next hit (Enter)"),
        tag("output", "", id="hits", for_="search", role="status"),
        tag("div", id="legend", class_="legend", role="group", aria_label="Passes: how many nodes each made"),
        class_="tools",
    )
    sides = [
        tag(
            "div",
            id=f"side-{side}",
            class_=f"side {side}",
            role="listbox",
            tabindex="0",
            aria_label=f"Nodes {side}, in order of execution",
            aria_describedby="keys",
        )
        for side in ("before", "after")
    ]
    canvas = tag(
        "div",
        tag("div", id="edges-before", class_="edges", aria_hidden="true"),
        sides[0],
        tag("div", id="links", class_="links", aria_hidden="true"),
        sides[1],
        tag("div", id="edges-after", class_="edges", aria_hidden="true"),
        id="canvas",
        class_="canvas",
    )
    graphs = tag(
        "div",
        tag("div", tag("span", id="head-before"), tag("span", id="head-after"), class_="heads"),
        tag("div", canvas, id="scroller", class_="scroller"),
        tag("div", id="minimap", class_="minimap", aria_hidden="true"),
        tag("button", id="above", type="button", class_="more above", hidden=True),
        tag("button", id="below", type="button", class_="more below", hidden=True),
        class_="graphs",
    )
    keys = tag(
        "p",
        tag("kbd", "↑"),
        tag("kbd", "↓"),
        " next node · ",
        tag("kbd", "Shift"),
        "+",
        tag("kbd", "↑"),
        tag("kbd", "↓"),
        " along an edge · ",
        tag("kbd", "←"),
        tag("kbd", "→"),
        " other graph · ",
        tag("kbd", "/"),
        " find · ",
        tag("kbd", "Enter"),
        " next hit · ",
        tag("kbd", "Esc"),
        " close",
        id="keys",
        class_="note",
    )
    details = tag("aside", id="details", class_="details", tabindex="-1", aria_label="Selected node")
    inside = tag("div", tools, tag("div", graphs, details, class_="stage"), keys, id="explorer", hidden=True)
    return joined([tag("p", note, id="no-script", class_="note"), inside])
