"""A step kernel by kernel: where its time goes, and how near each launch is to what the machine can do.

Every launch is timed in some whole steps; its shortest time counts. Launches of one operator, one shape and one phase
make a row. The floor of a launch is the longer of its FLOPs at the rate of the best matrix product and its bytes at
that of a copy (limits.py); maps that fit into a cache move faster than that.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import Section
from bnfuse.measuring import idle
from bnfuse.measuring.limits import Limits
from bnfuse.runtime.program.program import ALL_PHASES

SHOWN, ROWS = 0.97, 40  # share of the kernels' time, rows: what is beyond either is summed up in the table


@dataclasses.dataclass(frozen=True)
class Row:
    """Launches that are alike, in one step: their sums."""

    phase: str
    kind: str
    op: str
    shape: str
    launches: int
    seconds: float
    flops: int
    bytes: int
    floor_s: float
    predicted_s: float | None = None  # where the step is estimated too (estimates.py)

    @property
    def flops_per_s(self) -> float:
        """The rate of computing."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        """The rate of the memory."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class Profile:
    """`rows` from the most to the least time. `outside_s` is what a step takes besides its kernels, `others` how many
    cores other processes used meanwhile."""

    name: str
    rows: tuple[Row, ...]
    outside_s: float
    limits: Limits
    others: float | None = None

    @property
    def total(self) -> Row:
        """All launches together."""
        return merged(self.rows, phase="all", kind="all", op="", shape="")

    @property
    def phases(self) -> list[Row]:
        """A row for each phase."""
        groups = grouped(self.rows, lambda row: row.phase)
        return [
            merged(groups[phase], phase=phase, kind="all", op="", shape="") for phase in ALL_PHASES if phase in groups
        ]

    @property
    def kinds(self) -> list[Row]:
        """A row for each kind of work, the longest first."""
        groups = grouped(self.rows, lambda row: row.kind)
        return by_time(merged(rows, phase="all", kind=kind, op="", shape="") for kind, rows in groups.items())

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        seconds = self.total.seconds
        return {
            "name": self.name,
            "kernels_s": seconds,
            "outside_s": self.outside_s,
            "floor_s": self.total.floor_s,
            "flops": self.total.flops,
            "bytes": self.total.bytes,
            "launches": self.total.launches,
            "others_cpu_during": self.others,
            "limits": self.limits.to_json(),
            "rows": [row_json(row, seconds) for row in self.rows],
            "kinds": [row_json(row, seconds) for row in self.kinds],
            "phases": [row_json(row, seconds) for row in self.phases],
        }

    def sections(self) -> list[Section]:
        """Show the machine's limits, then phases, kinds and launches."""
        total, limits = self.total, self.limits
        lines = [
            (
                f"kernels {milliseconds(total.seconds)} in {total.launches:,} launches, outside them "
                f"{milliseconds(self.outside_s)} ({100 * self.outside_s / (total.seconds + self.outside_s):.1f} %)"
            ),
            f"floor {milliseconds(total.floor_s)}: the kernels take {total.seconds / total.floor_s:.2f} times as long",
            (
                f"{total.flops / 1e9:.1f} GFLOP, {total.bytes / 1e9:.2f} GB; "
                f"computing alone {milliseconds(total.flops / limits.flops_per_s)}, "
                f"moving alone {milliseconds(total.bytes / limits.bytes_per_s)}"
            ),
            f"machine {limits.flops_per_s / 1e9:.1f} GFLOP/s ({limits.library}; "
            + ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in limits.flops_by.items() if name != limits.library)
            + f"), copy {limits.bytes_per_s / 1e9:.1f} GB/s",
        ]
        if self.others is not None:
            lines.append(f"others used {self.others:.2f} cores meanwhile")
        return [
            Section.lines(f"Profile of {self.name}", lines),
            Section.table("Kernels", ("phase", "operator", "shape", *columns(total), "so far"), self._table()),
            Section.table("Kinds", ("kind", *columns(total)), [(row.kind, *numbers(row, total)) for row in self.kinds]),
            Section.table("Phases", ("phase", *columns(total)), [(r.phase, *numbers(r, total)) for r in self.phases]),
        ]

    def _table(self) -> list[tuple[str, ...]]:
        total, so_far, lines = self.total, 0.0, []
        for index, row in enumerate(self.rows):
            if (so_far > SHOWN * total.seconds or index >= ROWS) and index + 1 < len(self.rows):
                rest = merged(self.rows[index:], phase="all", kind="", op=f"{len(self.rows) - index} more", shape="")
                lines.append((rest.phase, rest.op, "", *numbers(rest, total), "100.0 %"))
                break
            so_far += row.seconds
            share = f"{100 * so_far / total.seconds:.1f} %"
            lines.append((row.phase, row.op, row.shape, *numbers(row, total), share))
        return lines


NUMBERS = ("launches", "time", "GFLOP/s", "GB/s", "of floor", "share")
ESTIMATED = ("predicted", "to measured")


def columns(total: Row) -> tuple[str, ...]:
    """List the columns of a table of rows."""
    return (*NUMBERS, *(ESTIMATED if total.predicted_s is not None else ()))


def numbers(row: Row, total: Row) -> tuple[str, ...]:
    """Write the cells of a row, with its share of the total."""
    return (
        f"{row.launches}",
        milliseconds(row.seconds),
        f"{row.flops_per_s / 1e9:.1f}" if row.flops else "-",
        f"{row.bytes_per_s / 1e9:.1f}",
        f"{row.seconds / row.floor_s:.2f}x" if row.floor_s else "-",
        f"{100 * row.seconds / total.seconds:.1f} %",
        *prediction(row),
    )


def prediction(row: Row) -> tuple[str, ...]:
    """Write the cells of what was predicted; none where nothing was."""
    if row.predicted_s is None:
        return ()
    return milliseconds(row.predicted_s), f"{row.predicted_s / row.seconds:.2f}x" if row.seconds else "-"


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds."""
    return f"{1000 * seconds:.2f} ms"


def row_json(row: Row, seconds: float) -> dict[str, Any]:
    """Give a row as JSON's types, with its share of `seconds`."""
    fields = dataclasses.asdict(row)
    if row.predicted_s is None:
        del fields["predicted_s"]
    return {
        **fields,
        "flops_per_s": row.flops_per_s,
        "bytes_per_s": row.bytes_per_s,
        "share": row.seconds / seconds if seconds else 0.0,
    }


def profile_step(
    name: str,
    step: Any,
    feeds: Sequence[Any],
    limits: Limits,
    repetitions: int,
    step_s: float | None = None,
    predicted: Sequence[float] | None = None,
) -> Profile:
    """Run some whole steps, launch by launch. Running statistics and momentum go on changing, as in training.

    `step_s` are the seconds of a step that is not profiled, where those of the profiled one say nothing: on a GPU.
    `predicted` are those that each launch is estimated to take.
    """
    runs, outside = [], []
    step(*feeds)
    before = idle.take_sample()
    for _ in range(max(repetitions, 1)):
        start = time.perf_counter()
        launches = step.profile(*feeds)
        seconds = time.perf_counter() - start
        runs.append(launches)
        outside.append(seconds - sum(launch.seconds for launch in launches))
    others = idle.others_between(before, idle.take_sample())
    rows = rows_of(runs, limits, predicted)
    apart = min(outside) if step_s is None else step_s - sum(row.seconds for row in rows)
    return Profile(name, rows, apart, limits, others)


def rows_of(runs: Sequence[Sequence[Any]], limits: Limits, predicted: Sequence[float] | None = None) -> tuple[Row, ...]:
    """List the LaunchTimes of some runs of one step: the shortest time of each launch, then like launches together."""
    rows = []
    estimates = [None] * len(runs[0]) if predicted is None else predicted
    for estimate_s, (launch, *again) in zip(estimates, zip(*runs, strict=True), strict=True):
        work, seconds = launch.work, min(entry.seconds for entry in (launch, *again))
        if work is None:
            raise BnfuseError("the compiled step does not say what its kernels do: compile the model again")
        floor = limits.floor(work.flops, work.bytes)
        what = (launch.phase, work.kind, work.op, work.shape)
        rows.append(Row(*what, 1, seconds, work.flops, work.bytes, floor, estimate_s))
    groups = grouped(rows, lambda row: (row.phase, row.kind, row.op, row.shape))
    return tuple(by_time(merged(alike) for alike in groups.values()))


def grouped(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> dict[Any, list[Row]]:
    """Group rows by a key, in the order in which keys first come."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def merged(rows: Sequence[Row], **names: str) -> Row:
    """Give the sums, under the first row's names or those given."""
    fields = ("launches", "seconds", "flops", "bytes", "floor_s")
    sums: dict[str, Any] = {field: sum(getattr(row, field) for row in rows) for field in fields}
    if rows and all(row.predicted_s is not None for row in rows):
        sums["predicted_s"] = sum(row.predicted_s for row in rows if row.predicted_s is not None)
    first = {field: getattr(rows[0], field) if rows else "" for field in ("phase", "kind", "op", "shape")}
    return Row(**{**first, **names, **sums})


def by_time(rows: Iterable[Row]) -> list[Row]:
    """Sort rows, the longest first."""
    return sorted(rows, key=lambda row: -row.seconds)
