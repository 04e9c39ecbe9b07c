"""Time and traffic of one training iteration on a hardware (papers/004, chapter 4)."""

from __future__ import annotations

from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.result import Estimate, LayerEstimate
from bnfuse.estimating.workload import Layer, Workload

__all__ = ["Assumptions", "Estimate", "LayerEstimate", "estimate"]


def estimate(workload: Workload, hardware: Hardware, assumptions: Assumptions | None = None) -> Estimate:
    """A first bound: every layer moves its own tensors, behind its own computing."""
    chosen = assumptions or Assumptions()
    rows = tuple(_row(layer, hardware) for layer in workload.layers)
    return Estimate(workload.name, workload.batch, hardware, chosen, rows)


def _row(layer: Layer, hardware: Hardware) -> LayerEstimate:
    compute = layer.flops / hardware.flops
    into = sum(access.bytes * access.sweeps for access in layer.reads)
    out = sum(access.bytes for access in layer.writes)
    time = max(compute, (into + out) / hardware.bandwidth)
    return LayerEstimate(
        layer.name,
        layer.type,
        layer.phase,
        time,
        compute,
        time - compute,
        into,
        out,
        into + out,
        layer.flops,
        layer.part,
    )
