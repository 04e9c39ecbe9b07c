"""An estimate as data, as JSON (docs/cli.md documents the keys), as CSV and as text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from bnfuse.core.text import Section, count, csv_text, duration, join, percent, scaled
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.hardware import Hardware

LONGEST = 10  # layers that the text lists


@dataclasses.dataclass(frozen=True)
class LayerEstimate:
    """One layer. `time_s` is from the end of the layer before to its own: `compute_s` and the `stall_s` that computing
    waited for memory.

    `in_bytes` and `out_bytes` were moved for its own tensors, whenever that was; `moved_bytes` crossed the bus while
    this layer ran, for whatever layer ([Tsai21], eq. 4.1). `flops` are operations as the assumptions count them.
    """

    name: str
    type: str
    phase: str
    time_s: float
    compute_s: float
    stall_s: float
    in_bytes: int
    out_bytes: int
    moved_bytes: float
    flops: float
    part: str = ""

    @property
    def average_bandwidth(self) -> float:
        """bytes/s while the layer runs."""
        return self.moved_bytes / self.time_s if self.time_s else 0.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One training iteration of a workload on a hardware: rows in order of execution, and their totals."""

    workload: str
    batch: int
    hardware: Hardware
    assumptions: Assumptions
    layers: tuple[LayerEstimate, ...]
    precision: str = "fp32"

    @functools.cached_property
    def time_s(self) -> float:
        """Seconds of the iteration."""
        return sum(layer.time_s for layer in self.layers)

    @functools.cached_property
    def compute_s(self) -> float:
        """Seconds of computing."""
        return sum(layer.compute_s for layer in self.layers)

    @functools.cached_property
    def stall_s(self) -> float:
        """Seconds of waiting for memory."""
        return sum(layer.stall_s for layer in self.layers)

    @functools.cached_property
    def traffic_in_bytes(self) -> int:
        """Bytes loaded."""
        return sum(layer.in_bytes for layer in self.layers)

    @functools.cached_property
    def traffic_out_bytes(self) -> int:
        """Bytes stored."""
        return sum(layer.out_bytes for layer in self.layers)

    @property
    def place(self) -> str:
        """The hardware, and the precision where it is not float32."""
        return self.hardware.name + ("" if self.precision == "fp32" else f", {self.precision}")

    @property
    def traffic_bytes(self) -> int:
        """Bytes moved, both ways."""
        return self.traffic_in_bytes + self.traffic_out_bytes

    @functools.cached_property
    def flops(self) -> float:
        """Operations."""
        return sum(layer.flops for layer in self.layers)

    @property
    def average_bandwidth(self) -> float:
        """bytes/s ([Tsai21], eq. 4.1)."""
        return self.traffic_bytes / self.time_s if self.time_s else 0.0

    @property
    def active_time(self) -> float:
        """The share of the time that the memory bus is busy (eq. 4.2)."""
        return self.average_bandwidth / self.hardware.bandwidth

    @property
    def compute_utilization(self) -> float:
        """The share of the peak rate that is used (eq. 4.3)."""
        return self.flops / (self.hardware.flops * self.time_s) if self.time_s else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples trained in a second (eq. 5.2)."""
        return self.batch / self.time_s if self.time_s else 0.0

    @functools.cached_property
    def by_type(self) -> dict[str, float]:
        """Seconds by type of layer, most first."""
        return self._summed(lambda layer: layer.type)

    @functools.cached_property
    def by_phase(self) -> dict[str, float]:
        """Seconds by phase, most first."""
        return self._summed(lambda layer: layer.phase)

    def _summed(self, key: Callable[[LayerEstimate], str]) -> dict[str, float]:
        sums: dict[str, float] = {}
        for layer in self.layers:
            sums[key(layer)] = sums.get(key(layer), 0.0) + layer.time_s
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def share(self, types: frozenset[str] | set[str]) -> float:
        """Give the share of the time that layers of these types take."""
        return sum(self.by_type.get(kind, 0.0) for kind in types) / self.time_s if self.time_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "workload": self.workload,
            "batch": self.batch,
            "precision": self.precision,
            "hardware": dataclasses.asdict(self.hardware),
            "assumptions": dataclasses.asdict(self.assumptions),
            "time_s": self.time_s,
            "compute_s": self.compute_s,
            "stall_s": self.stall_s,
            "traffic_in_bytes": self.traffic_in_bytes,
            "traffic_out_bytes": self.traffic_out_bytes,
            "average_bandwidth": self.average_bandwidth,
            "active_time": self.active_time,
            "compute_utilization": self.compute_utilization,
            "samples_per_s": self.samples_per_s,
            "flops": self.flops,
            "by_type": dict(self.by_type),
            "by_phase": dict(self.by_phase),
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
        }

    def to_csv(self) -> str:
        """Give the layers, one a line, with a line of column names."""
        columns = [field.name for field in dataclasses.fields(LayerEstimate)]
        return csv_text(columns, map(dataclasses.astuple, self.layers))

    def sections(self) -> list[Section]:
        """Show the totals, the time by type, and the longest layers."""
        return [self.total_section(), self.type_section(), self.layer_section()]

    def __str__(self) -> str:
        return join(self.sections())

    def total_section(self) -> Section:
        """Show the totals."""
        title = f"{self.workload}, batch {self.batch}, on {self.place}: {count(len(self.layers), 'layer')}"
        rows = [
            ("time", duration(self.time_s)),
            ("computing", duration(self.compute_s)),
            ("stalled", duration(self.stall_s)),
            ("samples a second", f"{self.samples_per_s:.4g}"),
            ("traffic in", scaled(self.traffic_in_bytes, "B")),
            ("traffic out", scaled(self.traffic_out_bytes, "B")),
            ("average bandwidth", scaled(self.average_bandwidth, "B/s")),
            ("memory active", percent(self.active_time)),
            ("compute utilization", percent(self.compute_utilization)),
        ]
        return Section.table(title, ("", ""), rows)

    def type_section(self) -> Section:
        """Show the time by type of layer."""
        rows = [(kind, duration(time), percent(time / self.time_s)) for kind, time in self.by_type.items() if time]
        return Section.table("Time by type of layer", ("type", "time", "share"), rows)

    def layer_section(self) -> Section:
        """Show the longest layers."""
        longest = sorted(self.layers, key=lambda layer: -layer.time_s)[:LONGEST]
        rows = [
            (
                layer.name,
                layer.type,
                layer.phase,
                duration(layer.time_s),
                duration(layer.stall_s),
                scaled(layer.in_bytes, "B"),
                scaled(layer.out_bytes, "B"),
            )
            for layer in longest
        ]
        columns = ("layer", "type", "phase", "time", "stalled", "in", "out")
        return Section.table(f"The longest {count(len(longest), 'layer')}", columns, rows)
