"""The front door for torch: a module whose forward and backward run as a fused step, and which is else as it was.

    model = bnfuse.torch.fuse(model, images)

Needs torch and onnxscript (`pip install 'bnfuse[torch]'`). docs/torch.md
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .module import fuse
    from .reports import Report, report

__all__ = ["Report", "fuse", "report"]

_HOMES = {"fuse": "module", "report": "reports", "Report": "reports"}


def __getattr__(name: str) -> Any:
    """Import torch when something of here is first used, not when modules are listed."""
    if name not in _HOMES:
        raise AttributeError(f"module 'bnfuse.torch' has no attribute '{name}'")
    import importlib

    value = getattr(importlib.import_module(f"bnfuse.torch.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
