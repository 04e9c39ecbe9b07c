"""Loading TVM, without torch, which its interface would load where it is installed: half of the start, for nothing."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from bnfuse.core.errors import BnfuseError, first_line


def import_tvm() -> Any:
    """TVM. Raises BnfuseError where it does not load, and says so where that is for a torch that is loaded but does not
    work: nothing here needs torch, but TVM asks one that is there for its types."""
    try:
        with without_torch():
            return importlib.import_module("tvm")
    except Exception as error:
        if fault := torch_fault():
            raise BnfuseError(
                f"torch is loaded but does not work ({fault}), and TVM takes one that is loaded: install it again or "
                "remove it; bnfuse itself does not need it"
            ) from error
        raise BnfuseError(f"TVM does not load ({first_line(error)}): install bnfuse again") from error


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Hide torch from what is imported meanwhile, unless it is loaded already. Later imports find it."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it is an ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]


def torch_fault() -> str | None:
    """Say what is wrong with a torch that is loaded; None where nothing is, or where none is."""
    torch = sys.modules.get("torch")
    if torch is None or (hasattr(torch, "Tensor") and hasattr(torch, "int8")):
        return None
    return f"{place(torch)} lacks torch.Tensor"


def place(module: Any) -> str:
    """Say where a module lies."""
    return str(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "its folder"))
