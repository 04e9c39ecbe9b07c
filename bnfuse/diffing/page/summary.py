"""The head of the page: what the two graphs read, write and take, in figures, tables and bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from bnfuse.core.text import change, duration, number, scaled
from bnfuse.diffing.page.estimates import Estimates
from bnfuse.diffing.page.gather import Page
from bnfuse.diffing.page.markup import Markup, joined, table, tag
from bnfuse.diffing.page.norms import STATUSES, Norm
from bnfuse.estimating.result import Estimate

Show = Callable[[float], str]
COLUMNS = ("", "before", "after", "change", "")
NUMBERS = (1, 2, 3)
BAR, THICK = 150, 8  # of the widest bar, and of each of its two halves
SMALL = 0.003  # of a step: types of layers below this are not listed one by one


def as_bytes(value: float) -> str:
    """Write bytes with a unit."""
    return scaled(value, "B")


def relative(old: float, new: float) -> str:
    """Give the change in per cent; what rounds to none is none."""
    shown = change(old, new)
    return "0 %" if shown in ("-0.0 %", "+0.0 %") else shown


def figures(page: Page) -> Markup:
    """Give the numbers that a reader wants first."""
    old, new = page.diff.traffic_before.total, page.diff.traffic_after.total
    parts = [
        figure("Nodes", len(page.before), len(page.after), number),
        figure("Feature-map sweeps", old.sweeps, new.sweeps, number),
        figure("Feature-map bytes", old.bytes, new.bytes, as_bytes),
        *(
            figure(f"Estimated step, {e.hardware.name}", e.before.time_s, e.after.time_s, duration)
            for e in page.estimates.found[:1]
        ),
        *norms_figure(page.norms),
    ]
    return tag("dl", *parts, class_="figures")


def norms_figure(norms: Sequence[Norm]) -> list[Markup]:
    """Tell how many BatchNorms are fused; nothing where there were none."""
    counts = Counter(norm.status for norm in norms)
    done = counts["fused"] + counts["sampled"]
    note = f"{counts['sampled']} of them read samples on their own" if counts["sampled"] else "no sweep of their own"
    return [tile("BatchNorms fused", f"{done} of {len(norms)}", note)] if norms else []


def figure(name: str, old: float, new: float, show: Show) -> Markup:
    """Write a number before and after, with its change."""
    return tile(name, joined([show(old), tag("span", " → ", class_="to"), show(new)]), relative(old, new))


def tile(name: str, value: object, note: str) -> Markup:
    """Write a number with its name and a note."""
    return tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="note"))


def traffic(page: Page) -> Markup:
    """Write sweeps and bytes of each phase; what the runtime does with views alone is listed apart."""
    first, second = page.diff.traffic_before, page.diff.traffic_after
    names = ("forward", "backward", "step")
    flows = list(zip(names, *((t.forward, t.backward, t.total) for t in (first, second)), strict=True))
    sweeps = [(name, old.sweeps, new.sweeps) for name, old, new in flows]
    sizes = [(name, old.bytes, new.bytes) for name, old, new in flows]
    _, old, new = flows[-1]
    sweeps.append(("of these, views at run time", old.aliased_sweeps, new.aliased_sweeps))
    sizes.append(("of these, views at run time", old.aliased_bytes, new.aliased_bytes))
    if page.diff.least:
        sizes.append(("the least for these operators", page.diff.least.total, page.diff.least.total))
    return joined(
        [
            compared("Feature-map sweeps", sweeps, number),
            compared("Feature-map bytes read and written", sizes, as_bytes),
        ]
    )


def operators(page: Page) -> Markup:
    """Write every operator whose number changed, most frequent first, and all together."""
    old, new = page.diff.ops_before, page.diff.ops_after
    names = sorted({*old, *new}, key=lambda name: (-max(old.get(name, 0), new.get(name, 0)), name))
    rows = [(spaced(name), old.get(name, 0), new.get(name, 0)) for name in names if old.get(name) != new.get(name)]
    same = sum(count for name, count in old.items() if new.get(name) == count)
    return compared(
        "Operators",
        [
            ("all nodes", len(page.before), len(page.after)),
            *rows,
            *([("unchanged in number", same, same)] if same else []),
        ],
        number,
        skip=1,
    )


def estimated(estimates: Estimates) -> Markup:
    """Give the time of a step on named hardware, by the memory model; or why there is none."""
    parts = []
    for found in estimates.found:
        old, new = found.before, found.after
        rows = [("step", old.time_s, new.time_s), ("of this, waiting for memory", old.stall_s, new.stall_s)]
        caption = f"Estimated time on {found.hardware.about}"
        parts.append(compared(caption, [*rows, *by_type(old, new)], duration))
    if estimates.why_not:
        parts.append(tag("p", f"No estimate of time: {estimates.why_not}", class_="note"))
    return joined(parts)


def by_type(old: Estimate, new: Estimate) -> list[tuple[str, float, float]]:
    """Write seconds by type of layer; types that take next to nothing on both sides are summed up."""
    types = [(name, old.by_type.get(name, 0.0), new.by_type.get(name, 0.0)) for name in {**old.by_type, **new.by_type}]
    large = [row for row in types if max(row[1:]) >= SMALL * old.time_s]
    rest = [row[1:] for row in types if row not in large]
    return [*large, ("all others", sum(b for b, _ in rest), sum(a for _, a in rest))] if rest else large


def statuses(page: Page) -> Markup:
    """Write how many BatchNorms came to what."""
    if not page.norms:
        return Markup()
    counts = Counter(norm.status for norm in page.norms)
    rows = [(status, exact(counts[status], number), about) for status, about in STATUSES.items() if counts[status]]
    refused = sum(bool(norm.reasons) for norm in page.norms)
    if refused:
        rows.append(("refused", exact(refused, number), "of these, a pass said why a half is left alone: below"))
    rows.append(("all", exact(len(page.norms), number), ""))
    listed = table("BatchNorms", ("", "count", "meaning"), rows, numbers=(1,))
    untold = not page.report and any(norm.status in ("split", "whole") for norm in page.norms)
    hint = "Why a half is not fused stands in the page that bnfuse rewrite --report FILE.html writes."
    return joined([listed, tag("p", hint, class_="note")] if untold else [listed])


def compared(caption: str, rows: Iterable[tuple[object, float, float]], show: Show, skip: int = 0) -> Markup:
    """Write before, after, change and bars. The first `skip` rows have no bar, and the scale is that of the others."""
    rows = list(rows)
    most = max((value for row in rows[skip:] for value in row[1:]), default=0)
    cells: list[Sequence[object]] = [
        (
            name,
            exact(old, show),
            exact(new, show),
            relative(old, new),
            bar(old, new, most) if i >= skip else "",
        )
        for i, (name, old, new) in enumerate(rows)
    ]
    return table(caption, COLUMNS, cells, NUMBERS)


def exact(value: float, show: Show) -> Markup:
    """Tell what is shown, with the exact number for whoever reads the file."""
    return tag("data", show(value), value=repr(value) if isinstance(value, float) else value)


def bar(old: float, new: float, most: float) -> Markup:
    """Draw before above after. The numbers beside it say the same, so it is not read out."""

    def rect(y: int, value: float, name: str) -> Markup:
        width = round(BAR * value / most, 1) if most else 0
        return tag("rect", x=0, y=y, width=width, height=THICK, class_=name)

    both = (rect(0, old, "bar-before"), rect(THICK + 1, new, "bar-after"))
    return tag("svg", *both, class_="bar", viewBox=f"0 0 {BAR} {2 * THICK + 1}", aria_hidden="true", focusable="false")


def spaced(op: str) -> Markup:
    """Give a long operator name with places where a line may break: between its steps."""
    parts: list[str] = []
    for i, letter in enumerate(op):
        if i and letter.isupper() and not op[i - 1].isupper():
            parts.append("\0")
        parts.append(letter)
    return joined(
        piece for i, word in enumerate("".join(parts).split("\0")) for piece in ((tag("wbr"), word) if i else (word,))
    )
