"""What the functions have in common: keywords of opening, and GPUs that have to be here."""

from __future__ import annotations

from typing import Any

Source = Any
OPENING = ("checkpoint", "data_input", "labels_input")


def parted(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide keywords: those for opening a file that others wrote, as `load` takes them, and all others."""
    opening = {name: value for name, value in given.items() if name in OPENING}
    return opening, {name: value for name, value in given.items() if name not in OPENING}


def require_gpu(target: str | None, precision: str | None) -> None:
    """Refuse at once a GPU that is not here, where a graph is to run on one, for compiling takes minutes."""
    if target is None or target.partition(":")[0] != "cuda":
        return
    from bnfuse.runtime.backends.cuda.backend import CudaBackend
    from bnfuse.runtime.backends.cuda.driver import open_driver

    machine = CudaBackend().resolve(target.partition(":")[2], precision=precision)
    open_driver().check_architecture(machine.architecture)
