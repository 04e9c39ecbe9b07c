"""What can be asked for, and the import of torch."""

from __future__ import annotations

from typing import Any

from bnfuse.core.errors import BnfuseError

PEERS = ("torch", "torch-cl", "torch-compile")
GRAPH = "+graph"  # the whole step as one CUDA graph
CUDA_PEERS = (*PEERS, *(peer + GRAPH for peer in PEERS))
DEVICES = ("cpu", "cuda")


def peers_of(device: str) -> tuple[str, ...]:
    return CUDA_PEERS if device == "cuda" else PEERS


def is_graph(peer: str) -> bool:
    return peer.endswith(GRAPH)


def without_graph(peer: str) -> str:
    return peer.removesuffix(GRAPH)


def import_torch() -> Any:
    try:
        import torch
        import torch.fx
    except ImportError:
        raise BnfuseError("torch is not installed: pip install 'bnfuse[bench]'") from None
    return torch
