"""One point: a network of the zoo with its settings -> sizes, work, traffic, time before and after fusion."""

from __future__ import annotations

import dataclasses
from typing import Any

from bnfuse.analysis.traffic import graph_traffic
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.layerwise import forward_workload
from bnfuse.estimating.source import built
from bnfuse.estimating.training import training_workload
from bnfuse.exploring.axes import Settings
from bnfuse.graph.training_graph import open_graph
from bnfuse.inspecting.network import inspect_network
from bnfuse.models import build_graph, entry_of
from bnfuse.passes import rewrite


@dataclasses.dataclass(frozen=True)
class Point:
    """A network by its `changes` from the base. What is not known is None; `error` says why nothing is.

    `flops_forward`, `flops` (backward too) and `output_bytes` are of a batch. `sweeps` and `moved_bytes` are those of a
    step over feature maps, as `bnfuse inspect` counts them. `norm_share` is the part of `moved_bytes` that is there for
    BatchNorms alone, `norm_time_share` their part of `time_before_s`. A network of shapes only is never fused.
    """

    changes: Settings
    settings: Settings
    batch: int | None = None
    parameters: int | None = None
    model_bytes: int | None = None
    flops_forward: int | None = None
    flops: int | None = None
    output_bytes: int | None = None
    sweeps: int | None = None
    sweeps_after: int | None = None
    moved_bytes: int | None = None
    moved_bytes_after: int | None = None
    norm_share: float | None = None
    norm_time_share: float | None = None
    time_before_s: float | None = None
    time_s: float | None = None
    accuracy: float | None = None
    error: str | None = None
    pareto: bool = False

    @property
    def speedup(self) -> float | None:
        """How many times as fast the step is after fusion; None where nothing was estimated."""
        return self.time_before_s / self.time_s if self.time_before_s and self.time_s else None

    @property
    def samples_per_s(self) -> float | None:
        """Images trained in a second, after fusion."""
        return self.batch / self.time_s if self.batch and self.time_s else None

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {**dataclasses.asdict(self), "speedup": self.speedup, "samples_per_s": self.samples_per_s}


@dataclasses.dataclass(frozen=True)
class Measure:
    """What is asked of every point. Without hardware there are counts alone."""

    level: str = "icf"
    hardware: Hardware | None = None
    assumptions: Assumptions = dataclasses.field(default_factory=Assumptions)


def measured(network: str, changes: Settings, settings: Settings, measure: Measure) -> Point:
    """Count from shapes alone, then, where there is hardware to estimate on, the training graph and its rewrite."""
    graph = build_graph(network, **settings)
    found = inspect_network(graph)
    total = found.total
    point = Point(
        changes,
        settings,
        batch=found.batch,
        parameters=total["parameters"],
        model_bytes=total["parameter_bytes"],
        flops_forward=total["flops_forward"],
        flops=total["flops_forward"] + total["flops_backward"],
        output_bytes=total["output_bytes"],
        sweeps=total["sweeps_forward"] + total["sweeps_backward"],
        moved_bytes=total["moved_bytes_forward"] + total["moved_bytes_backward"],
        norm_share=found.batch_norm_share["bytes"],
    )
    if measure.hardware is None:
        return point
    if entry_of(network).shape_only:
        time = estimate(forward_workload(graph), measure.hardware, measure.assumptions).time_s
        return dataclasses.replace(point, time_before_s=time)
    return with_times(point, network, measure, measure.hardware)


def with_times(point: Point, network: str, measure: Measure, hardware: Hardware) -> Point:
    """Estimate the point's step before and after fusion."""
    before = built(network, point.settings)
    rewritten = rewrite(before.model, level=measure.level, signature=before.signature)
    after = open_graph(rewritten.model, name=network)
    traffic, reduced = graph_traffic(before).total, graph_traffic(after).total
    slow = estimate(training_workload(before), hardware, measure.assumptions)
    fast = estimate(training_workload(after), hardware, measure.assumptions)
    return dataclasses.replace(
        point,
        sweeps=traffic.sweeps,
        sweeps_after=reduced.sweeps,
        moved_bytes=traffic.bytes,
        moved_bytes_after=reduced.bytes,
        norm_time_share=slow.share({"BatchNorm"}),
        time_before_s=slow.time_s,
        time_s=fast.time_s,
    )
