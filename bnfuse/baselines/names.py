"""What can be asked for, and the import of torch."""

from __future__ import annotations

from typing import Any

from bnfuse.core.errors import BnfuseError

BASELINES = ("torch", "torch-cl", "torch-compile")
GRAPH = "+graph"  # the whole step as one CUDA graph
CUDA_BASELINES = (*BASELINES, *(baseline + GRAPH for baseline in BASELINES))


def baselines_of(device: str) -> tuple[str, ...]:
    """List the torch baselines of a device."""
    return CUDA_BASELINES if device == "cuda" else BASELINES


def is_graph(baseline: str) -> bool:
    """Tell whether a baseline replays a CUDA graph."""
    return baseline.endswith(GRAPH)


def without_graph(baseline: str) -> str:
    """Give the baseline's name without +graph."""
    return baseline.removesuffix(GRAPH)


def import_torch() -> Any:
    """Import torch. Raises BnfuseError where it is not installed."""
    try:
        import torch
        import torch.fx
    except ImportError:
        raise BnfuseError("torch is not installed: pip install 'bnfuse[bench]'") from None
    return torch
