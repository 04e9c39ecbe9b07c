"""NVIDIA's driver as Python sees it: the bindings, and whether there is a driver and a GPU behind them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from bnfuse.core.errors import BnfuseError

REMEDY = "install bnfuse[cuda]"


@functools.cache
def bindings() -> Any:
    """cuda.bindings.driver."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise BnfuseError(f"running on a GPU needs the package cuda-bindings ({error}): {REMEDY}") from None


def start(cu: Any) -> None:
    """Initialise the driver and see that there is a GPU."""
    (error,) = cu.cuInit(0)
    if int(error) == 0:
        return
    if error.name == "CUDA_ERROR_NO_DEVICE":
        raise BnfuseError("there is no NVIDIA GPU here: compile for cpu, or run the exported step on a GPU machine")
    raise BnfuseError(
        f"NVIDIA's driver does not start ({error.name}): update it, or restart the machine after an update"
    )


def unusable(error: RuntimeError) -> BnfuseError:
    """Make the error of bindings that raise when the driver's library, or a function in it, is not found."""
    what = (str(error).splitlines() or ["unknown"])[0]
    if "dlopen" in what or "load" in what.lower():
        return BnfuseError(
            f"there is no NVIDIA driver here ({what}): compile for cpu, or run the exported step on a GPU machine"
        )
    return BnfuseError(f"NVIDIA's driver is too old for this cuda-bindings ({what}): update the driver")
