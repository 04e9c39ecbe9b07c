"""Compile time, in fresh processes: with empty caches, then with the filled ones.

Ours is rewriting and compiling an opened training graph; torch.compile's the making of its module and its first step.
Imports and opening the file are not in it.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.measuring.children import answer, ask
from bnfuse.passes.variants import Variant

CACHES = ("BNFUSE_CACHE", "TORCHINDUCTOR_CACHE_DIR")


@dataclasses.dataclass(frozen=True)
class CompileTimes:
    """Seconds. `rewrite_s` is None for torch.compile."""

    rewrite_s: float | None
    cold_s: float
    warm_s: float


def measured_compile(
    file: Path, candidate: Variant | str, threads: int, how: dict[str, str] | None = None
) -> CompileTimes:
    """Measure compiling in processes of its own. `file` is the training graph, `candidate` one of ours or
    torch-compile; `how` has target and precision where they are not the CPU's."""
    request: dict[str, Any] = {"file": str(file.resolve()), "threads": threads, "how": how or {}}
    request |= {"baseline": candidate} if isinstance(candidate, str) else {"variant": dataclasses.astuple(candidate)}
    with tempfile.TemporaryDirectory(prefix="bnfuse-cold-") as folder:
        caches = dict.fromkeys(CACHES, folder)
        cold, warm = (ask("bnfuse.benchmarking.compiling", request, caches) for _ in range(2))
    return CompileTimes(cold["rewrite_s"], cold["compile_s"], warm["compile_s"])


def measure(asked: dict[str, Any]) -> dict[str, float | None]:
    """Measure compiling one of ours, in the child."""
    from bnfuse.graph.training_graph import open_graph

    graph = open_graph(asked["file"])
    if "baseline" in asked:
        return measure_baseline(graph, asked["baseline"], asked["threads"], asked.get("how", {}))
    import bnfuse.runtime.compile  # noqa: F401  # its import is not in the time
    from bnfuse.benchmarking.candidates import compile_rewritten
    from bnfuse.passes.variants import rewrite_variant

    variant = Variant(*asked["variant"])
    start = time.perf_counter()
    rewritten = rewrite_variant(graph, variant)
    middle = time.perf_counter()
    compile_rewritten(rewritten, asked["threads"], **asked.get("how", {}))
    return {"rewrite_s": middle - start, "compile_s": time.perf_counter() - middle}


def measure_baseline(graph: Any, baseline: str, threads: int, how: dict[str, str]) -> dict[str, float | None]:
    """Measure compiling a baseline, in the child. `how` has target and precision where they are not the CPU's."""
    from bnfuse.baselines.names import import_torch
    from bnfuse.benchmarking.candidates import make_baseline
    from bnfuse.graph.feeds import draw_feeds

    import_torch()
    feeds = draw_feeds(graph, np.random.default_rng(0))
    start = time.perf_counter()
    device, precision = "cuda" if "target" in how else "cpu", how.get("precision", "fp32")
    make_baseline(graph, baseline, feeds, threads, device=device, precision=precision).run()
    return {"rewrite_s": None, "compile_s": time.perf_counter() - start}


if __name__ == "__main__":
    answer(measure)
