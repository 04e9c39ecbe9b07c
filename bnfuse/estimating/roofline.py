"""How often layers reuse data, and what they attain at that ([Tsai21], chapter 3 and section 5.2).

reuse frequency     operations for each byte of a layer's tensors, whatever the cache (eqs. 3.3, 3.4)
modified roofline   what a layer attains at its reuse frequency (eq. 5.1)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from bnfuse.core.text import Section, csv_text, number
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.estimate import operations
from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.workload import Layer, Workload


@dataclasses.dataclass(frozen=True)
class Point:
    """A layer in the modified roofline: FLOP for each byte, and the FLOP/s it attains."""

    name: str
    type: str
    phase: str
    reuse_frequency: float
    attainable: float
    compute_bound: bool
    dense: bool  # a type-I layer


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The layers of a workload under the roof of a hardware."""

    workload: str
    hardware: Hardware
    points: tuple[Point, ...]

    @property
    def ridge_point(self) -> float:
        """FLOP/byte from which on computing is the bound."""
        return self.hardware.ridge_point

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "workload": self.workload,
            "hardware": dataclasses.asdict(self.hardware),
            "ridge_point": self.ridge_point,
            "layers": [dataclasses.asdict(point) for point in self.points],
        }

    def to_csv(self) -> str:
        """Give a layer a line."""
        return csv_text((field.name for field in dataclasses.fields(Point)), map(dataclasses.astuple, self.points))

    def sections(self) -> list[Section]:
        """Show by type of layer how many are bound by computing, and the range of their reuse frequencies."""
        rows = []
        for kind in sorted({point.type for point in self.points}):
            points = [point for point in self.points if point.type == kind]
            found = [point.reuse_frequency for point in points]
            bound = sum(point.compute_bound for point in points)
            rows.append((kind, number(len(points)), number(bound), f"{min(found):.3g}", f"{max(found):.3g}"))
        title = f"{self.workload}: FLOP for each byte of its layers; ridge point {self.ridge_point:.3g}"
        return [Section.table(title, ("type", "layers", "compute-bound", "least", "most"), rows)]


def roofline(workload: Workload, hardware: Hardware, assumptions: Assumptions | None = None) -> Roofline:
    """Tell how often each layer reuses a byte, and what it attains at that."""
    points = []
    for layer in workload.layers:
        frequency = layer_reuse_frequency(workload, layer, assumptions)
        points.append(
            Point(
                layer.name,
                layer.type,
                layer.phase,
                frequency,
                attainable_performance(frequency, hardware),
                frequency >= hardware.ridge_point,
                layer.is_dense,
            )
        )
    return Roofline(workload.name, hardware, tuple(points))


def attainable_performance(frequency: float, hardware: Hardware) -> float:
    """Give the FLOP/s that can be attained (eq. 5.1)."""
    return min(frequency * hardware.bandwidth, hardware.flops)


def layer_reuse_frequency(workload: Workload, layer: Layer, assumptions: Assumptions | None = None) -> float:
    """Count the operations of the layer for each byte of all its tensors (eq. 3.4)."""
    touched = touched_bytes(workload, layer)
    return operations(layer, assumptions or Assumptions()) / touched if touched else 0.0


def tensor_reuse_frequency(
    workload: Workload, layer: Layer, tensor: int, assumptions: Assumptions | None = None
) -> float:
    """Count the operations of the layer that use this tensor, for each byte of it (eq. 3.3).

    A backward dense layer of two products, dx = f(dy, w) and dw = f(dy, x), uses dy in both and each of the others in
    one.
    """
    sizes = {access.tensor: access.bytes for access in layer.accesses}
    if tensor not in sizes:
        raise KeyError(f"layer '{layer.name}' does not use tensor {workload.tensors[tensor].name}")
    share = 1 / products(workload, layer) if layer.is_dense and not is_incoming(workload, layer, tensor) else 1
    return share * operations(layer, assumptions or Assumptions()) / sizes[tensor] if sizes[tensor] else 0.0


def products(workload: Workload, layer: Layer) -> int:
    """Count the products of a dense layer: forward one, backward one for each gradient that is no vector."""
    kinds = [workload.tensors[access.tensor].kind for access in layer.writes]
    return max(1, sum(kind in ("map_gradient", "weight_gradient") for kind in kinds))


def is_incoming(workload: Workload, layer: Layer, tensor: int) -> bool:
    """Tell whether a tensor is a gradient of a map that the layer reads, and does not write."""
    read = any(access.tensor == tensor for access in layer.reads)
    written = any(access.tensor == tensor for access in layer.writes)
    return read and not written and workload.tensors[tensor].kind == "map_gradient"


def touched_bytes(workload: Workload, layer: Layer) -> int:
    """Count the bytes of the tensors of a layer, each once."""
    sums: Counter[int] = Counter()
    for access in layer.accesses:
        sums[access.tensor] = max(sums[access.tensor], access.bytes)
    return sum(min(count, workload.tensors[tensor].bytes) for tensor, count in sums.items())
