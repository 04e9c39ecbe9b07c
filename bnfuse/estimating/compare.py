"""Several estimates beside one another: the levels of one graph on one hardware."""

from __future__ import annotations

import dataclasses
from typing import Any

from bnfuse.core.text import Section, csv_text, duration, join, percent, scaled
from bnfuse.estimating.result import Estimate, LayerEstimate


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Estimates by name, in the order that they were asked for. The first is what the others are compared with."""

    name: str
    estimates: tuple[Estimate, ...]

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types: the keys of the first estimate that others have too are under `results`, one for
        each."""
        first = self.estimates[0]
        return {
            "name": self.name,
            "hardware": dataclasses.asdict(first.hardware),
            "precision": first.precision,
            "results": [{"level": x.workload, "ratio": x.time_s / first.time_s, **x.to_json()} for x in self.estimates],
        }

    def to_csv(self) -> str:
        """Give the layers of all, one a line, with the level in front."""
        columns = [field.name for field in dataclasses.fields(LayerEstimate)]
        rows = ((each.workload, *dataclasses.astuple(row)) for each in self.estimates for row in each.layers)
        return csv_text(["level", *columns], rows)

    def sections(self) -> list[Section]:
        """Show time, traffic and ratio of each, then the time by type."""
        first = self.estimates[0]
        rows = [
            (
                each.workload,
                duration(each.time_s),
                f"{each.time_s / first.time_s:.3f}",
                duration(each.by_phase.get("forward", 0.0)),
                duration(each.by_phase.get("backward", 0.0)),
                percent(each.stall_s / each.time_s if each.time_s else 0.0),
                scaled(each.traffic_in_bytes, "B"),
                scaled(each.traffic_out_bytes, "B"),
                percent(each.compute_utilization),
            )
            for each in self.estimates
        ]
        columns = ("level", "time", "ratio", "forward", "backward", "stalled", "in", "out", "compute utilization")
        title = f"{self.name}, batch {first.batch}, on {first.place}"
        return [Section.table(title, columns, rows), self.type_section()]

    def type_section(self) -> Section:
        """Show the time by type of layer."""
        types = list(dict.fromkeys(kind for each in self.estimates for kind, time in each.by_type.items() if time))
        rows = [(kind, *(duration(each.by_type.get(kind, 0.0)) for each in self.estimates)) for kind in types]
        return Section.table("Time by type of layer", ("type", *(each.workload for each in self.estimates)), rows)

    def __str__(self) -> str:
        return join(self.sections())
