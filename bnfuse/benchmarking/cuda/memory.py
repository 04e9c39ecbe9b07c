"""Peak GPU memory of a step, in a process of its own for each candidate.

allocated   torch: what its allocator gave out at most; ours: the regions of both programs and the code. THIS is
            compared
reserved    torch: what its allocator took from the driver; ours: the same as allocated
driver      what the driver says is in use, less what was before the step was made: libraries' workspaces, kernels'
            code and graphs are in it, on both sides

The peak of a torch step without a graph is that of the second and third step; of a captured one it counts from the
capture on, after which its memory is fixed. cuDNN tries its algorithms before that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.baselines.names import import_torch, is_graph
from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.measuring.children import answer, ask
from bnfuse.runtime.backends.cuda.driver import Driver, open_driver

FIELDS = ("allocated_bytes", "reserved_bytes", "driver_bytes")


def measured_peak(
    file: Path, name: str, precision: str, seed: int = 0, batch: int | None = None, timeout: float | None = None
) -> dict[str, Any]:
    """Measure peak memory in a process of its own. `file` is a compiled step, or for a baseline (`name`) the training
    graph, then also for another `batch`."""
    request = {"file": str(file.resolve()), "name": name, "precision": precision, "seed": seed, "batch": batch}
    return ask("bnfuse.benchmarking.cuda.memory", request, timeout=timeout)


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure peak memory, in the child. `fits` is False where the GPU's memory does not suffice, and then there is
    nothing else."""
    file, rng = Path(asked["file"]), np.random.default_rng(asked["seed"])
    driver = open_driver()
    torch = import_torch()
    torch.zeros(1, device="cuda")  # its context and first pool
    own = file.suffix == ".bnf"
    try:
        return {"fits": True, **(of_ours(torch, driver, file, rng) if own else of_baseline(torch, driver, asked, rng))}
    except torch.cuda.OutOfMemoryError as error:
        return {"fits": False, "why": first_line(error)[:200]}
    except BnfuseError as error:
        if "memory does not suffice" not in str(error):
            raise
        return {"fits": False, "why": str(error)[:200]}


def of_ours(torch: Any, driver: Driver, file: Path, rng: np.random.Generator) -> dict[str, Any]:
    """Measure the GPU memory of a compiled step while it runs."""
    from bnfuse.benchmarking.cuda.step import CudaCandidate
    from bnfuse.runtime import load_step
    from bnfuse.training import random_feeds

    before = used(driver)
    step = load_step(file)
    candidate = CudaCandidate(file.stem, step, random_feeds(step, rng))
    seconds = [candidate.seconds(1) for _ in range(3)]
    own = step.device_bytes
    return {**dict(zip(FIELDS, (own, own, used(driver) - before), strict=True)), "step_s": min(seconds)}


def of_baseline(torch: Any, driver: Driver, asked: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Measure the GPU memory of a torch baseline while it runs."""
    from bnfuse.baselines import TorchStep
    from bnfuse.graph.feeds import draw_feeds
    from bnfuse.graph.training_graph import open_graph

    graph = open_graph(asked["file"])
    feeds = of_batch(draw_feeds(graph, rng), asked["batch"])
    before = used(driver)
    step = TorchStep(graph, asked["name"], feeds, lr=0.0, device="cuda", precision=asked["precision"])
    step.step()
    torch.cuda.synchronize()
    if not is_graph(asked["name"]):
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step.step()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), used(driver) - before
    return dict(zip(FIELDS, found, strict=True))


def of_batch(feeds: dict[str, np.ndarray], batch: int | None) -> dict[str, np.ndarray]:
    """Give the same images over and over, or fewer of them."""
    if batch is None:
        return feeds
    return {name: np.resize(array, (batch, *array.shape[1:])) for name, array in feeds.items()}


def used(driver: Driver) -> int:
    """Give the bytes of the GPU's memory that are taken, by whomever."""
    with driver.active():
        free, total = driver.memory_left()
    return total - free


if __name__ == "__main__":
    answer(measure)
