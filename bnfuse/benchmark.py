"""How long a step takes and how much memory, at several levels and in onnxruntime.

Candidates take turns in one process, so that whatever else the machine does hits all of them alike. Peak memory is
measured in a fresh process for each candidate, over two steps, compilation left out. A step of ours has the update of
the parameters in it; onnxruntime's ends with the gradients.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from bnfuse.errors import BnfuseError
from bnfuse.oracle import Arrays, OrtGraph
from bnfuse.text import Section, change, join, scaled
from bnfuse.training import random_feeds
from bnfuse.training_graph import TrainingGraph, open_graph
from bnfuse.verification import draw_feeds

PEERS = ("ort",)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one step, and of its forward phase. The rest is backward, and for our steps the update."""

    step: float
    forward: float


class Candidate(Protocol):
    name: str

    def run(self) -> Times:
        """One training step."""


@dataclasses.dataclass(frozen=True)
class Result:
    name: str
    min_s: float
    median_s: float
    forward_min_s: float
    backward_min_s: float
    peak_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Benchmark:
    model: str
    results: tuple[Result, ...]
    machine: dict[str, Any]
    repetitions: int

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "repetitions": self.repetitions,
            "results": [dataclasses.asdict(result) for result in self.results],
            "machine": self.machine,
        }

    def sections(self) -> list[Section]:
        slowest = self.results[0].min_s
        rows = [
            (
                r.name,
                f"{1000 * r.min_s:.1f} ms",
                f"{1000 * r.median_s:.1f} ms",
                f"{1000 * r.forward_min_s:.1f} ms",
                f"{1000 * r.backward_min_s:.1f} ms",
                scaled(r.peak_bytes, "B") if r.peak_bytes is not None else "-",
                change(slowest, r.min_s),
            )
            for r in self.results
        ]
        columns = ("candidate", "min", "median", "forward min", "backward min", "peak memory", "min against first")
        machine = [f"{key}: {value}" for key, value in self.machine.items()]
        title = f"A training step of {self.model}, {self.repetitions} repetitions"
        return [Section.table(title, columns, rows), Section.lines("Machine", machine)]

    def __str__(self) -> str:
        return join(self.sections())


class CompiledCandidate:
    """A compiled step on one batch."""

    def __init__(self, name: str, step: Any, feeds: Arrays) -> None:
        self.name, self.step = name, step
        self.feeds = [feeds[key] for key in step.inputs]

    def run(self) -> Times:
        start = time.perf_counter()
        self.step(*self.feeds)
        return Times(time.perf_counter() - start, self.step.times["forward"])


class OrtCandidate:
    """onnxruntime on the file as it is: its forward part alone, then the whole graph.

    The parts are two sessions, because onnxruntime runs every node, whatever outputs are asked for. The new running
    statistics are among the outputs, so it leaves those it is fed as they are.
    """

    def __init__(self, graph: TrainingGraph, feeds: Arrays, threads: int | None) -> None:
        self.name = "ort"
        self.feeds = {**graph.state(), **feeds}
        roles = graph.roles
        outputs = [roles.loss, *roles.running.values()]
        forward = forward_part(graph.model, outputs)
        self.forward = OrtGraph(forward, name=graph.name, threads=threads, optimize=True).session
        self.whole = OrtGraph(graph.model, name=graph.name, threads=threads, optimize=True).session
        self.forward_feeds = {value.name: self.feeds[value.name] for value in self.forward.get_inputs()}
        self.outputs = [*outputs, *roles.gradients.values()]

    def run(self) -> Times:
        start = time.perf_counter()
        self.forward.run(None, self.forward_feeds)
        middle = time.perf_counter()
        self.whole.run(self.outputs, self.feeds)
        return Times(time.perf_counter() - middle, middle - start)


def forward_part(model: ir.Model, outputs: Sequence[str]) -> ir.Model:
    """A copy of the graph with these outputs alone and what they need."""
    part = model.clone()
    part.graph.outputs[:] = [value for value in part.graph.outputs if value.name in outputs]
    needed: set[ir.Node] = set()
    pending = [value.producer() for value in part.graph.outputs]
    while pending:
        node = pending.pop()
        if node is not None and node not in needed:
            needed.add(node)
            pending += [value.producer() for value in node.inputs if value is not None]
    part.graph.remove([node for node in part.graph if node not in needed], safe=True)
    return part


def run_benchmark(
    graph: TrainingGraph,
    *,
    levels: Sequence[str],
    against: Sequence[str] = (),
    repetitions: int = 9,
    warm_up: int = 2,
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Benchmark:
    unknown = [peer for peer in against if peer not in PEERS]
    if unknown:
        raise BnfuseError(f"cannot measure against '{unknown[0]}': there is {', '.join(PEERS)}")
    feeds = draw_feeds(graph, np.random.default_rng(seed))
    with tempfile.TemporaryDirectory(prefix="bnfuse-bench-") as folder:
        candidates: list[Candidate] = []
        files: list[Path] = []
        for level in levels:
            progress(f"rewriting and compiling at level {level}")
            step = compiled_at(graph, level, threads, getattr(progress, "bar", None))
            files.append(Path(folder) / f"{level}.bnf")
            step.export(files[-1])
            candidates.append(CompiledCandidate(level, step, feeds))
        if "ort" in against:
            files.append(Path(folder) / "ort.onnx")
            save_graph(graph, files[-1])
            candidates.append(OrtCandidate(graph, feeds, threads))
        times = alternate(candidates, repetitions, warm_up, progress)
        machine = describe_machine(threads)
        del candidates
        progress("measuring peak memory, a process each")
        peaks = [measured_peak(file, seed, threads) for file in files]
    results = [
        summarize(name, runs, peak, measured_apart=name in PEERS)
        for (name, runs), peak in zip(times.items(), peaks, strict=True)
    ]
    return Benchmark(graph.name, tuple(results), machine, repetitions)


def compiled_at(
    graph: TrainingGraph, level: str, threads: int | None, bar: Callable[[int, int, str], None] | None = None
) -> Any:
    from bnfuse import passes, runtime

    rewritten = passes.rewrite(graph.model, level=level)
    optimizer = runtime.SGD(lr=0.01, momentum=0.9)
    return runtime.compile_step(rewritten.model, optimizer=optimizer, threads=threads, progress=bar)


def save_graph(graph: TrainingGraph, path: Path) -> None:
    from bnfuse.io import save

    save(graph.model, path)


def alternate(
    candidates: Sequence[Candidate], repetitions: int, warm_up: int, progress: Callable[[str], None]
) -> dict[str, list[Times]]:
    """The times of each candidate, taken in turns."""
    for candidate in candidates:
        for _ in range(warm_up):
            candidate.run()
    times: dict[str, list[Times]] = {candidate.name: [] for candidate in candidates}
    for turn in range(repetitions):
        for candidate in candidates:
            times[candidate.name].append(candidate.run())
        progress(f"repetition {turn + 1} of {repetitions}")
    return times


def summarize(name: str, times: Sequence[Times], peak: int | None, *, measured_apart: bool) -> Result:
    """`measured_apart`: forward was a run of its own, not a part of the step, so only minima can be subtracted."""
    steps = [t.step for t in times]
    if measured_apart:
        backward = max(0.0, min(steps) - min(t.forward for t in times))
    else:
        backward = min(t.step - t.forward for t in times)
    return Result(
        name,
        min_s=min(steps),
        median_s=statistics.median(steps),
        forward_min_s=min(t.forward for t in times),
        backward_min_s=backward,
        peak_bytes=peak,
    )


def describe_machine(threads: int | None) -> dict[str, Any]:
    from bnfuse.runtime.targets import host_cpu, physical_cores

    return {
        "cpu": host_cpu(),
        "cores": physical_cores(),
        "threads": threads or physical_cores(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def measured_peak(file: Path, seed: int, threads: int | None) -> int | None:
    """The peak resident memory of two steps in a process of its own, None where the system does not tell."""
    request = json.dumps({"file": str(file), "seed": seed, "threads": threads})
    child = subprocess.run([sys.executable, "-m", "bnfuse.benchmark", request], capture_output=True, text=True)
    if child.returncode:
        raise BnfuseError(f"measuring the memory of {file.name} failed: {child.stderr.strip().splitlines()[-1:]}")
    return json.loads(child.stdout.splitlines()[-1])


def peak_of_two_steps(file: Path, seed: int, threads: int | None) -> int | None:
    """In the child: load, forget the peak so far, run."""
    rng = np.random.default_rng(seed)
    if file.suffix == ".bnf":
        from bnfuse.runtime import load_step

        step = load_step(file, threads=threads)
        candidate: Candidate = CompiledCandidate(file.stem, step, random_feeds(step, rng))
    else:
        graph = open_graph(file)
        candidate = OrtCandidate(graph, draw_feeds(graph, rng), threads)
    reset_peak()
    candidate.run()
    candidate.run()
    return peak_memory()


def reset_peak() -> None:
    """Linux forgets the peak so far; elsewhere it stays in the figure."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int | None:
    """Peak resident bytes of this process."""
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
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would import it, and its memory would count as ours
    asked = json.loads(sys.argv[1])
    print(json.dumps(peak_of_two_steps(Path(asked["file"]), asked["seed"], asked["threads"])))
