"""Predicted beside measured: what the memory model (bnfuse/estimating) says of each launch, and how far off it is.

The machine is measured in the same run (limits.py), and nothing is fitted to the network. Two predictions are made:
from the launches of the compiled step, which are compared one by one, and from the rewritten graph alone, which is
what `bnfuse estimate train.onnx --hardware host` has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bnfuse.benchmarking.profiles import Profile, milliseconds
from bnfuse.core.text import Section, scaled
from bnfuse.estimating import probe
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.launches import launch_workload
from bnfuse.estimating.training import training_workload
from bnfuse.estimating.workload import Workload, in_precision
from bnfuse.graph.training_graph import open_graph
from bnfuse.measuring.limits import Limits


@dataclasses.dataclass(frozen=True)
class LevelEstimate:
    """Seconds: of a whole step and of its kernels as measured, of the launches and of the graph as predicted.

    `median`, `low` and `high` are of predicted to measured times of the profile's rows, weighted by the measured time:
    half of the time, a tenth and nine tenths of it are spent in kernels below them.
    """

    name: str
    step_s: float
    kernels_s: float
    launches_s: float
    graph_s: float
    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Estimates:
    """What the memory model predicted of each level, beside what was measured."""

    hardware: Hardware
    levels: tuple[LevelEstimate, ...]

    def speedups(self, level: LevelEstimate) -> dict[str, float]:
        """Tell how many times as fast as the first level: measured, and by both predictions."""
        first = self.levels[0]
        return {key: getattr(first, key) / getattr(level, key) for key in ("step_s", "launches_s", "graph_s")}

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "hardware": dataclasses.asdict(self.hardware),
            "assumptions": dataclasses.asdict(probe.ASSUMPTIONS),
            "levels": [{**dataclasses.asdict(e), "speedups": self.speedups(e)} for e in self.levels],
        }

    def sections(self) -> list[Section]:
        """Show the machine, then predicted and measured times of each level."""
        h = self.hardware
        inside = f", {scaled(h.cache_bandwidth, 'B/s')} within" if h.cache_bandwidth else ""
        machine = f"{scaled(h.flops, 'FLOP/s')}, memory {scaled(h.bandwidth, 'B/s')}, cache {h.cache >> 20} MiB{inside}"
        columns = ("level", "step", "kernels", "predicted", "to measured", "median", "10 to 90 %", "from the graph")
        rows = [
            (
                e.name,
                *(milliseconds(seconds) for seconds in (e.step_s, e.kernels_s, e.launches_s)),
                f"{e.launches_s / e.kernels_s:.2f}x",
                f"{e.median:.2f}x",
                f"{e.low:.2f}x to {e.high:.2f}x",
                milliseconds(e.graph_s),
            )
            for e in self.levels
        ]
        sections = [Section.table(f"Estimates: {machine}", columns, rows)]
        if len(self.levels) > 1:
            sections.append(self._ratios())
        return sections

    def _ratios(self) -> Section:
        rows = []
        for level in self.levels:
            measured, *predicted = self.speedups(level).values()
            off = [f"{100 * (p / measured - 1):+.1f} %" for p in predicted]
            cells = (f"{measured:.2f}x", f"{predicted[0]:.2f}x", off[0], f"{predicted[1]:.2f}x", off[1])
            rows.append((level.name, *cells))
        columns = ("level", "measured", "predicted", "off by", "from the graph", "off by")
        return Section.table(f"So many times as fast as {self.levels[0].name}", columns, rows)


def hardware_of(limits: Limits, threads: int) -> Hardware:
    """Describe this machine by the limits that a profile has measured with working sets."""
    return probe.measured(limits).hardware(probe.about(probe.describe(threads)))


def predicted_launches(step: Any, limits: Limits, threads: int) -> list[float]:
    """Predict the seconds of each launch of a compiled step, in the order of its profile."""
    workload = launch_workload(step.program, "step")
    found = estimate(workload, hardware_of(limits, threads), probe.ASSUMPTIONS)
    return [layer.time_s for layer in found.layers]


def workload_of(rewritten: Any, precision: str = "fp32") -> Workload:
    """Make the workload of what `rewrite` returned, with the update that a benchmark's steps have: SGD with
    momentum."""
    return in_precision(training_workload(open_graph(rewritten), optimizer="momentum"), precision)


def compare(
    profiles: Sequence[Profile], steps: Mapping[str, float], workloads: Mapping[str, Workload], hardware: Hardware
) -> Estimates:
    """Compare what was predicted; `steps` are the seconds of a step by the candidate's name, `workloads` those of its
    graph."""
    return Estimates(hardware, tuple(level_of(p, steps[p.name], workloads[p.name], hardware) for p in profiles))


def level_of(profile: Profile, step_s: float, workload: Workload, hardware: Hardware) -> LevelEstimate:
    """Compare what one level took, launch by launch and as a step, with what was predicted."""
    total = profile.total
    ratios = [(row.predicted_s / row.seconds, row.seconds) for row in profile.rows if row.predicted_s and row.seconds]
    return LevelEstimate(
        profile.name,
        step_s,
        total.seconds,
        total.predicted_s or 0.0,
        estimate(workload, hardware, probe.ASSUMPTIONS).time_s,
        *(quantile(ratios, share) for share in (0.5, 0.1, 0.9)),
    )


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Give the smallest value that this share of the weight is at or below, of (value, weight)."""
    total, so_far = sum(weight for _, weight in weighted), 0.0
    for value, weight in sorted(weighted):
        so_far += weight
        if so_far >= share * total:
            return value
    return float("nan")
