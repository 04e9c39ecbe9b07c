"""The lists of the page, which read without JavaScript: BatchNorms, refusals, and what else differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from bnfuse.core.text import change, count, number, scaled
from bnfuse.diffing.halves import Place
from bnfuse.diffing.page.gather import Page
from bnfuse.diffing.page.markup import Markup, joined, table, tag, text
from bnfuse.diffing.page.norms import HALVES, PLACES, Cost, Norm, first_index
from bnfuse.diffing.page.summary import COLUMNS, NUMBERS, as_bytes, exact
from bnfuse.diffing.report import describe_changed, describe_rewired


def norm_list(page: Page) -> Markup:
    """Write a BatchNorm a line; what became of its halves opens below it."""
    if not page.norms:
        return tag("p", "The graph before has no BatchNorm.", class_="note")
    index = first_index(page.after)
    return joined(norm_details(norm, page, index) for norm in page.norms)


def norm_details(norm: Norm, page: Page, index: dict[str, int]) -> Markup:
    """Write what became of one BatchNorm."""
    before, after = norm.around_before, norm.around_after
    head = tag(
        "summary",
        tag("span", norm.fate.name, class_="name"),
        " ",
        tag("span", norm.status, class_=f"status {norm.status}"),
        " ",
        tag("span", saved(before, after), class_="note"),
    )
    own = page.before[norm.nodes[0]]
    facts = [
        ("channels", "unknown" if norm.fate.channels is None else number(norm.fate.channels)),
        *((HALVES[half], half_places(norm, half, page, index)) for half in HALVES),
        *(("not fused", reason) for reason in norm.reasons),
        ("show", node_link("before", own.key, "in the graphs side by side")),
    ]
    costs = table(
        f"Feature maps of {norm.fate.name}",
        COLUMNS[:-1],
        [
            *cost_rows("its operators alone", norm.own_before, norm.own_after),
            *cost_rows("with what is fused with it", before, after),
        ],
        NUMBERS,
    )
    listed = tag("dl", *(joined([tag("dt", name), tag("dd", value)]) for name, value in facts), class_="facts")
    return tag("details", head, listed, costs, class_="norm")


def cost_rows(name: str, old: Cost, new: Cost) -> list[Sequence[object]]:
    """Write the rows of sweeps and bytes."""
    return [
        (f"{name}, sweeps", exact(old.sweeps, number), exact(new.sweeps, number), change(old.sweeps, new.sweeps)),
        (f"{name}, bytes", exact(old.bytes, as_bytes), exact(new.bytes, as_bytes), change(old.bytes, new.bytes)),
    ]


def saved(before: Cost, after: Cost) -> str:
    """Write 18 sweeps, 77 MB less; what grew is said apart."""
    less = before - after
    parts = [(less.sweeps, count(abs(less.sweeps), "sweep")), (less.bytes, as_bytes(abs(less.bytes)))]
    shown = (
        ", ".join(text for amount, text in parts if sign * amount > 0) + word
        for sign, word in ((1, " less"), (-1, " more"))
        if any(sign * amount > 0 for amount, _ in parts)
    )
    return "; ".join(shown) or "nothing saved"


def half_places(norm: Norm, half: str, page: Page, index: dict[str, int]) -> Markup:
    """Write where a half is done, by the way in which it is done there."""
    found: tuple[Place, ...] = getattr(norm.fate, half)
    if not found:
        return tag("span", "in the BatchNorm" if norm.fate.whole else "nowhere", class_="note")
    parts = []
    for where, shown in PLACES.items():
        links = [place_link(place, page, index) for place in found if place.where == where]
        if len(links) == 1:
            parts.append(tag("div", f"{shown} ", links[0]))
        elif links:
            parts.append(tag("div", f"{shown} {len(links)} nodes:", tag("ul", *(tag("li", link) for link in links))))
    return joined(parts)


def place_link(place: Place, page: Page, index: dict[str, int]) -> Markup:
    """Write where a half is, as a link to the node where that is shown."""
    return node_link("after", page.after[index[place.node]].key) if place.node in index else text(place.node)


def node_link(side: str, key: str, shown: str | None = None) -> Markup:
    """Write a link to a node of a side."""
    return tag("a", shown or key, href=f"#node={quote(key, safe='/', errors='replace')}&side={side}")


def report_parts(report: dict[str, Any]) -> Markup:
    """Tell what a rewrite's report says: passes, refusals, removed and sampled BatchNorms. Times are left out: the page
    of one rewrite is the same each time."""
    passes = [(p["name"], number(p["changed"]), number(len(p["refused"]))) for p in report["passes"]]
    parts = [table("Passes, in the order in which they ran", ("pass", "changed", "refused"), passes, numbers=(1, 2))]
    unfused = [(e["node"], e["half"], e["reason"]) for e in report["unfused"]]
    title = f"Halves that are not fused ({len(unfused)})"
    if unfused:
        parts.append(folded(title, table(title, ("norm", "half", "reason"), unfused), is_open=len(unfused) <= 20))
    else:
        parts.append(tag("p", "No half of a BatchNorm is left unfused.", class_="note"))
    refused = list(dict.fromkeys((r["node"], p["name"], r["reason"]) for p in report["passes"] for r in p["refused"]))
    if refused:
        title = f"Refusals, pass by pass ({len(refused)})"
        parts.append(folded(title, table(title, ("node", "pass", "reason"), refused)))
    if report["removed"]:
        gone = [(e["node"], number(e["index"]), "stay" if e["kept_affine"] else "go too") for e in report["removed"]]
        parts.append(table("Removed BatchNorms", ("BatchNorm", "number", "scale and bias"), gone, numbers=(1,)))
    if report["sampled"]:
        taken = [(e["node"], e["spec"], number(e["elements"]), f"{e['ratio']:.4f}") for e in report["sampled"]]
        title = f"Sampled BatchNorms ({len(taken)})"
        columns = ("BatchNorm", "spec", "elements a channel", "of all")
        parts.append(folded(title, table(title, columns, taken, numbers=(2, 3))))
    if (sent := report["exchanged"])["moments"]:
        named = (("statistics", "moments", "moment_bytes"), ("sums of their gradients", "terms", "term_bytes"))
        rows = [(name, number(sent[many]), scaled(sent[size], "B")) for name, many, size in named]
        parts.append(table("Exchanged between ranks", ("what", "exchanges", "a rank gives"), rows, numbers=(1, 2)))
    return joined(parts)


def differences(page: Page) -> Markup:
    """Tell what is not fusion: renamed nodes, other attributes, other inputs, and what the graph takes and gives."""
    diff = page.diff
    lists = {
        "Renamed nodes": [f"{n.before} → {n.after}" for n in diff.renamed],
        "Changed attributes": [describe_changed(n) for n in diff.changed],
        "Matched nodes with other inputs": [describe_rewired(n) for n in diff.rewired],
    }
    for kind, names in (("inputs", diff.inputs), ("outputs", diff.outputs), ("initializers", diff.initializers)):
        for verb in ("added", "removed", "changed"):
            lists[f"Graph {kind} {verb}"] = list(getattr(names, verb))
    found = [folded(f"{title} ({len(lines)})", items(lines)) for title, lines in lists.items() if lines]
    return joined(found) if found else tag("p", "None.", class_="note")


def folded(title: str, inside: Markup, *, is_open: bool = False) -> Markup:
    """Write what unfolds under a title."""
    return tag("details", tag("summary", title), inside, open=is_open)


def items(lines: Iterable[str]) -> Markup:
    """Write a list of lines."""
    return tag("ul", *(tag("li", line) for line in lines), class_="lines")
