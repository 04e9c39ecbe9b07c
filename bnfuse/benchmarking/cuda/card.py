"""What a benchmark on a GPU ran on."""

from __future__ import annotations

from typing import Any

from bnfuse.baselines.names import import_torch
from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cuda.driver import open_driver


def describe_card() -> dict[str, Any]:
    """Name, architecture, memory, and the versions of the driver's interface and of torch's libraries."""
    driver = open_driver()
    with driver.active():
        free, total = driver.memory_left()
    found: dict[str, Any] = {
        "gpu": driver.name,
        "architecture": driver.architecture,
        "multiprocessors": driver.multiprocessors,
        "gpu_memory_bytes": total,
        "gpu_memory_free_bytes": free,
        "driver_cuda": version(driver.cu.cuDriverGetVersion()),
    }
    try:
        torch = import_torch()
    except BnfuseError:
        return found
    return {
        **found,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def version(answer: tuple[Any, int]) -> str:
    """Write a version: (error, 13010) is 13.1."""
    error, number = answer
    return "unknown" if int(error) else f"{number // 1000}.{number % 1000 // 10}"
