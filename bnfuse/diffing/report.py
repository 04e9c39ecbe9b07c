"""A difference as data, as JSON (docs/cli.md documents the keys) and as text."""

from __future__ import annotations

import dataclasses
from typing import Any

from bnfuse.analysis.bound import Bound
from bnfuse.analysis.traffic import Traffic
from bnfuse.core.text import Section, change, count, join, number, scaled, some
from bnfuse.diffing.halves import BatchNormFate, Place
from bnfuse.graph.exchanges import NOTHING, Exchanged

PHASES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Added:
    """A node that is in the graph after alone."""

    name: str
    op: str
    domain: str
    made_by: str | None  # the pass
    sources: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Removed:
    """A node that is in the graph before alone."""

    name: str
    op: str
    domain: str
    into: tuple[str, ...]  # the nodes of the graph after that were made of it


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A node that has another name, and is the same else."""

    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Changed:
    """A node with other attributes."""

    name: str
    attributes: dict[str, tuple[Any, Any]]  # name -> (before, after), None where absent


@dataclasses.dataclass(frozen=True)
class Rewired:
    """A node that reads other values."""

    name: str
    inputs: dict[int, tuple[str | None, str | None]]  # position -> (before, after)


@dataclasses.dataclass(frozen=True)
class NameChanges:
    """Graph inputs, graph outputs or initializers that came, went or changed."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def to_json(self) -> dict[str, list[str]]:
        """Give it as JSON's types."""
        return {"added": [*self.added], "removed": [*self.removed], "changed": [*self.changed]}


@dataclasses.dataclass(frozen=True)
class Diff:
    """What differs between two graphs. `str()` gives the text, `to_json()` the documented dictionary."""

    added: tuple[Added, ...]
    removed: tuple[Removed, ...]
    renamed: tuple[Renamed, ...]
    changed: tuple[Changed, ...]
    rewired: tuple[Rewired, ...]
    inputs: NameChanges
    outputs: NameChanges
    initializers: NameChanges
    ops_before: dict[str, int]
    ops_after: dict[str, int]
    batch_norms: tuple[BatchNormFate, ...]
    traffic_before: Traffic
    traffic_after: Traffic
    least: Bound | None  # bytes that the operators of `before` must move; None where they are fused already
    exchanged_before: Exchanged = NOTHING  # what a rank of a data-parallel run gives to others
    exchanged_after: Exchanged = NOTHING

    @property
    def over_least(self) -> float | None:
        """How many times the least `after` moves, views left out."""
        moved = self.traffic_after.total
        return (moved.bytes - moved.aliased_bytes) / self.least.total if self.least and self.least.total else None

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        nodes = self.added or self.removed or self.renamed or self.changed or self.rewired
        return not (nodes or self.inputs or self.outputs or self.initializers)

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "equal": self.equal,
            "added": [
                {"name": n.name, "op": n.op, "domain": n.domain, "pass": n.made_by, "sources": list(n.sources)}
                for n in self.added
            ],
            "removed": [{"name": n.name, "op": n.op, "domain": n.domain, "into": list(n.into)} for n in self.removed],
            "renamed": [dataclasses.asdict(n) for n in self.renamed],
            "changed": [
                {"name": n.name, "attributes": {k: {"before": b, "after": a} for k, (b, a) in n.attributes.items()}}
                for n in self.changed
            ],
            "rewired": [
                {"name": n.name, "inputs": [{"index": i, "before": b, "after": a} for i, (b, a) in n.inputs.items()]}
                for n in self.rewired
            ],
            "inputs": self.inputs.to_json(),
            "outputs": self.outputs.to_json(),
            "initializers": self.initializers.to_json(),
            "ops": {"before": self.ops_before, "after": self.ops_after},
            "batch_norms": [fate_json(fate) for fate in self.batch_norms],
            "feature_map_bytes": self.traffic_json("bytes"),
            "feature_map_sweeps": self.traffic_json("sweeps"),
            "aliased_bytes": self.traffic_json("aliased_bytes"),
            "aliased_sweeps": self.traffic_json("aliased_sweeps"),
            "least_bytes": dataclasses.asdict(self.least) if self.least else None,
            "exchanged": {
                "before": dataclasses.asdict(self.exchanged_before),
                "after": dataclasses.asdict(self.exchanged_after),
            },
        }

    def traffic_json(self, field: str) -> dict[str, dict[str, int]]:
        """Give one field of both traffics: before|after, forward|backward."""
        return {
            side: {phase: getattr(getattr(traffic, phase), field) for phase in PHASES}
            for side, traffic in (("before", self.traffic_before), ("after", self.traffic_after))
        }

    def sections(self) -> list[Section]:
        """Show traffic first, then the BatchNorms, then operators, then node by node."""
        if self.equal:
            return [Section.lines("the graphs are equal", [count(sum(self.ops_after.values()), "node")])]
        parts = [
            self.traffic_section(),
            self.exchange_section(),
            self.op_section(),
            *self.batch_norm_sections(),
            *self.detail_sections(),
        ]
        return [part for part in parts if part.rows]

    def __str__(self) -> str:
        return join(self.sections())

    def traffic_section(self) -> Section:
        """Show sweeps and bytes over feature maps, before and after."""
        before, after = self.traffic_before, self.traffic_after
        rows = []
        for name, old, new in (
            ("forward", before.forward, after.forward),
            ("backward", before.backward, after.backward),
            ("step", before.total, after.total),
        ):
            rows.append((f"{name}, sweeps", number(old.sweeps), number(new.sweeps), change(old.sweeps, new.sweeps)))
            rows.append(
                (f"{name}, bytes", scaled(old.bytes, "B"), scaled(new.bytes, "B"), change(old.bytes, new.bytes))
            )
        old, new = before.total, after.total
        free = "of these, views at run time"
        rows.append((f"{free}, sweeps", number(old.aliased_sweeps), number(new.aliased_sweeps), ""))
        rows.append((f"{free}, bytes", scaled(old.aliased_bytes, "B"), scaled(new.aliased_bytes, "B"), ""))
        if self.least and self.over_least:
            least = scaled(self.least.total, "B")
            rows.append(("the least for these operators", least, least, f"after: {self.over_least:.2f} times"))
        return Section.table("Feature maps read and written", ("", "before", "after", "change"), rows)

    def exchange_section(self) -> Section:
        """Show what is exchanged between ranks in a step, before and after."""
        old, new = self.exchanged_before, self.exchanged_after
        rows = [
            (name, *(f"{number(many)}, {scaled(size, 'B')}" for many, size in sides))
            for name, sides in (
                ("statistics", [(each.moments, each.moment_bytes) for each in (old, new)]),
                ("sums of their gradients", [(each.terms, each.term_bytes) for each in (old, new)]),
            )
            if any(many for many, _ in sides)
        ]
        return Section.table("Exchanged between ranks", ("", "before", "after"), rows)

    def op_section(self) -> Section:
        """Show how many nodes of each operator there are, before and after."""
        names = sorted({*self.ops_before, *self.ops_after}, key=lambda n: (-self.ops_before.get(n, 0), n))
        rows = [
            (name, number(self.ops_before.get(name, 0)), number(self.ops_after.get(name, 0)))
            for name in names
            if self.ops_before.get(name, 0) != self.ops_after.get(name, 0)
        ]
        rows.append(("all", number(sum(self.ops_before.values())), number(sum(self.ops_after.values()))))
        return Section.table("Operators whose number changed", ("operator", "before", "after"), rows)

    def batch_norm_sections(self) -> list[Section]:
        """Show where the halves of the BatchNorms are."""
        split = [fate for fate in self.batch_norms if not fate.whole]
        rows = [
            (
                fate.name,
                "-" if fate.channels is None else str(fate.channels),
                places(fate.statistics),
                places(fate.normalize),
                places(fate.gradient_reduce),
                places(fate.gradient_input),
            )
            for fate in split
        ]
        columns = ("BatchNorm", "channels", "statistics", "normalize", "gradient reduce", "gradient input")
        whole = [fate.name for fate in self.batch_norms if fate.whole]
        title = f"BatchNorms: {len(self.batch_norms)}, split {len(split)}, whole {len(whole)}"
        return [
            Section.table(title, columns, rows),
            Section.lines("BatchNorms still whole", whole),
        ]

    def detail_sections(self) -> list[Section]:
        """Show what differs, node by node."""
        return [
            Section.lines(f"Added ({len(self.added)})", map(describe_added, self.added)),
            Section.lines(f"Removed ({len(self.removed)})", map(describe_removed, self.removed)),
            Section.lines(f"Renamed ({len(self.renamed)})", (f"{n.before} -> {n.after}" for n in self.renamed)),
            Section.lines(f"Changed attributes ({len(self.changed)})", map(describe_changed, self.changed)),
            Section.lines(f"Rewired ({len(self.rewired)})", map(describe_rewired, self.rewired)),
            *(
                Section.lines(f"Graph {kind}", describe_names(names))
                for kind, names in (
                    ("inputs", self.inputs),
                    ("outputs", self.outputs),
                    ("initializers", self.initializers),
                )
            ),
        ]


def fate_json(fate: BatchNormFate) -> dict[str, Any]:
    """Give what became of a BatchNorm as JSON's types."""
    halves = ("statistics", "normalize", "gradient_reduce", "gradient_input")
    return {
        "name": fate.name,
        "channels": fate.channels,
        "whole": fate.whole,
        "fused": fate.fused,
        **{half: [dataclasses.asdict(place) for place in getattr(fate, half)] for half in halves},
    }


def places(found: tuple[Place, ...]) -> str:
    """Write one place by name, several as a count: the JSON has them all."""
    if not found:
        return "none"
    return str(found[0]) if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"


def describe_added(node: Added) -> str:
    """Write an added node in a line."""
    made_of = f" from {some(node.sources)}" if node.sources else ""
    made_by = f" [{node.made_by}]" if node.made_by else ""
    return f"{node.name} ({node.op}){made_of}{made_by}"


def describe_removed(node: Removed) -> str:
    """Write a removed node in a line."""
    return f"{node.name} ({node.op})" + (f" into {some(node.into)}" if node.into else "")


def describe_changed(node: Changed) -> str:
    """Write a changed node in a line."""
    return f"{node.name}: " + ", ".join(f"{name} {old} -> {new}" for name, (old, new) in node.attributes.items())


def describe_rewired(node: Rewired) -> str:
    """Write a rewired node in a line."""
    return f"{node.name}: " + ", ".join(f"input {i} {old} -> {new}" for i, (old, new) in node.inputs.items())


def describe_names(names: NameChanges) -> list[str]:
    """Write a line for each name that differs."""
    return [f"{verb} {name}" for verb in ("added", "removed", "changed") for name in getattr(names, verb)]
