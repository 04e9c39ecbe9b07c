"""Loading TVM, which loads torch where that is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from bnfuse.core.errors import BnfuseError, first_line


def import_tvm() -> Any:
    """TVM. Raises BnfuseError where it does not load, and says so where that is for a torch that is there but does not
    work: nothing here needs torch, but TVM asks it for its types."""
    try:
        return importlib.import_module("tvm")
    except Exception as error:
        if fault := torch_fault():
            raise BnfuseError(
                f"torch is installed but does not work ({fault}), and TVM loads it where it is found: install it again "
                "or remove it; bnfuse itself does not need it"
            ) from error
        raise BnfuseError(f"TVM does not load ({first_line(error)}): install bnfuse again") from error


def torch_fault() -> str | None:
    """Say what is wrong with an installed torch; None where nothing is, or where there is none."""
    try:
        torch = importlib.import_module("torch")
        return None if hasattr(torch, "Tensor") and hasattr(torch, "int8") else f"{place(torch)} lacks torch.Tensor"
    except ModuleNotFoundError as error:
        return None if error.name == "torch" else first_line(error)
    except Exception as error:
        return first_line(error)


def place(module: Any) -> str:
    """Say where a module lies."""
    return str(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "its folder"))
