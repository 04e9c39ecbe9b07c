"""What can be asked for, and the import of torch."""

from __future__ import annotations

from typing import Any

from bnfuse.errors import BnfuseError

PEERS = ("torch", "torch-cl", "torch-compile")


def import_torch() -> Any:
    try:
        import torch
        import torch.fx
    except ImportError:
        raise BnfuseError("torch is not installed: pip install 'bnfuse[bench]'") from None
    return torch
