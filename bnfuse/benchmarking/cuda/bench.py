"""The parts of run.py that a GPU does otherwise: what the machine is, peaks, profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnfuse.benchmarking.cuda import cudnn
from bnfuse.benchmarking.cuda.card import describe_card
from bnfuse.benchmarking.cuda.limits import measured_limits
from bnfuse.benchmarking.cuda.memory import measured_peak
from bnfuse.benchmarking.profiles import Profile, profile_step
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.runtime.backends.cuda.driver import open_driver


def require_gpu() -> None:
    """Check before any work that there is a GPU, and that torch reaches it: candidates need both."""
    from bnfuse.baselines.cuda import set_precision
    from bnfuse.baselines.names import import_torch

    open_driver()
    set_precision(import_torch(), "fp32")


def peaks_of(file: Path, name: str, precision: str, seed: int) -> dict[str, int | None]:
    """Measure peak memory, as Result has it; None where it does not fit beside what else is on the GPU."""
    found = measured_peak(file, name, precision, seed)
    return {
        "peak_bytes": found.get("allocated_bytes"),
        "setup_peak_bytes": None,
        "reserved_bytes": found.get("reserved_bytes"),
        "driver_bytes": found.get("driver_bytes"),
    }


def machine_of(precision: str) -> dict[str, Any]:
    """Describe the GPU, and what is computed in."""
    return {"precision": precision, **describe_card()}


def profiles_of(
    graph: TrainingGraph, candidates: list[Any], precision: str, repetitions: int
) -> tuple[tuple[Profile, ...], list[dict[str, Any]]]:
    """Profile ours, each launch between two events; and the convolutions alone by cuDNN, beside the last of ours."""
    limits = measured_limits(precision)
    found = []
    for candidate in candidates:
        seconds = min(candidate.run().step for _ in range(repetitions))
        found.append(profile_step(candidate.name, candidate.step, candidate.feeds, limits, repetitions, seconds))
    rows = found[-1].to_json()["rows"] if found else []
    return tuple(found), cudnn.beside(cudnn.measured_floors(graph, precision), rows)
