"""Peak memory of a step, in a process of its own for each candidate.

    import  ->  baselines: open the file, draw the batch  ->  BASELINE  ->  make the step, run it once  ->  run it twice

What counts is the high-water mark of resident memory above the baseline: what a step needs besides the interpreter, the
libraries, and a baseline's file and batch, which stay in memory to the end. `peak_bytes` is that of the last two steps
(whatever making the step took and gave back is left out, for all alike), `setup_peak_bytes` that from the baseline on.
Of ours the compiled kernels' code, the parameters and the batch count; compiling is done before, in another process.
torch.compile compiles here, so that its setup has the compiler in it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.core.heap import release_heap
from bnfuse.core.times import Candidate
from bnfuse.measuring.children import answer, ask


def measured_peak(file: Path, name: str, seed: int, threads: int, precision: str = "fp32") -> dict[str, int | None]:
    """Measure peak memory in a process of its own. `file` is a compiled step, or for a baseline (`name`) the training
    graph, whose step computes in this precision."""
    request = {"file": str(file.resolve()), "name": name, "seed": seed, "threads": threads, "precision": precision}
    return ask("bnfuse.benchmarking.memory", request)


def measure(asked: dict[str, Any]) -> dict[str, int | None]:
    """Measure peak memory, in the child. None where the system does not tell."""
    file, rng = Path(asked["file"]), np.random.default_rng(asked["seed"])
    if file.suffix == ".bnf":
        make = prepare_own(file, asked["name"], rng, asked["threads"])
    else:
        make = prepare_baseline(file, asked["name"], rng, asked["threads"], asked["precision"])
    reset_peak()
    before = peak_memory()
    candidate = make()
    candidate.run()
    setup = peak_memory()
    reset_peak()
    candidate.run()
    candidate.run()
    peak = peak_memory()
    if before is None or setup is None or peak is None:
        return {"peak_bytes": None, "setup_peak_bytes": None}
    return {"peak_bytes": peak - before, "setup_peak_bytes": max(setup, peak) - before}


def prepare_own(file: Path, name: str, rng: np.random.Generator, threads: int) -> Callable[[], Candidate]:
    """Import what a compiled step needs. Gives what loads the step from its file and makes a candidate of it."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would import it, and its memory would be ours
    importlib.import_module("bnfuse.runtime.backends.cpu.runner")  # TVM's libraries are none of the step's
    from bnfuse.benchmarking.candidates import CompiledCandidate
    from bnfuse.runtime import load_step
    from bnfuse.training import random_feeds

    def make() -> Candidate:
        step = load_step(file, threads=threads)
        candidate = CompiledCandidate(name, step, random_feeds(step, rng))
        release_heap()  # what drawing took, twice the batch: a baseline's is drawn before
        return candidate

    return make


def prepare_baseline(
    file: Path, name: str, rng: np.random.Generator, threads: int, precision: str
) -> Callable[[], Candidate]:
    """Import what a baseline needs, and open its graph. Gives what makes the candidate."""
    from bnfuse.benchmarking.candidates import make_baseline
    from bnfuse.graph.feeds import draw_feeds
    from bnfuse.graph.training_graph import open_graph

    if name == "ort":
        from bnfuse.ort.library import onnxruntime

        onnxruntime()
    else:
        from bnfuse.baselines.names import import_torch

        import_torch()
    graph = open_graph(file)
    feeds = draw_feeds(graph, rng)
    return lambda: make_baseline(graph, name, feeds, threads, timed=False, precision=precision)


def reset_peak() -> None:
    """Let Linux forget the peak so far; elsewhere it stays in the figure."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int | None:
    """Give the peak resident bytes of this process."""
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    answer(measure)
