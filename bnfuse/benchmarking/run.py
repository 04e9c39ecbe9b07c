"""The benchmark: every candidate in turns in one process, then what has to be measured in processes of its own.

    compile or build each  ->  warm up  ->  wait for an idle machine  ->  step, settle, next candidate, ...
        ->  profile ours  ->  peak memory, a process each  ->  compile times, two processes each

Candidates take turns so that whatever else the machine does hits all of them alike, and each waits until the threads of
the one before it sleep, since pools of threads spin for a while after their work.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.benchmarking import choices
from bnfuse.benchmarking.candidates import CompiledCandidate, compile_variant, make_baseline
from bnfuse.benchmarking.compiling import measured_compile
from bnfuse.benchmarking.estimates import compare, hardware_of, predicted_launches, workload_of
from bnfuse.benchmarking.memory import measured_peak
from bnfuse.benchmarking.plot import plot as draw
from bnfuse.benchmarking.profiles import Profile, profile_step
from bnfuse.benchmarking.results import Benchmark, Result
from bnfuse.core.errors import BnfuseError
from bnfuse.core.figures import require_plotting
from bnfuse.core.files import require_writable
from bnfuse.core.processors import bounded_threads, physical_cores
from bnfuse.core.progress import Progress, bar_of, quiet
from bnfuse.core.ranges import check_real, check_whole
from bnfuse.core.times import Candidate, Times, summarize
from bnfuse.estimating.probe import WORKING_SETS
from bnfuse.estimating.workload import Workload
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.io import save
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.measuring import idle
from bnfuse.measuring.limits import measured_limits
from bnfuse.measuring.machine import describe_machine
from bnfuse.passes.variants import Variant, rewrite_variant, variants


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure and how."""

    variants: tuple[Variant, ...]
    baselines: tuple[str, ...]
    repetitions: int = 9
    warm_up: int = 2
    wait: float = 60.0  # seconds of patience for an idle machine
    profile: bool = False
    estimate: bool = False  # with the profile of which it is one
    compile_time: bool = False
    tune: bool = False
    memory: bool = True
    seed: int = 0
    threads: int = 1
    target: str = "cpu"
    precision: str = "fp32"

    def __post_init__(self) -> None:
        check_whole("repetitions", self.repetitions, 1)
        check_whole("warm_up", self.warm_up)
        check_whole("seed", self.seed)
        check_real("wait", self.wait)

    @property
    def is_gpu(self) -> bool:
        """Whether the steps run on a GPU."""
        return choices.is_gpu(self.target)

    @property
    def how(self) -> dict[str, str]:
        """Options of compiling that are not the CPU's defaults."""
        found = {"target": self.target} if self.is_gpu else {}
        return found | ({"precision": self.precision} if self.is_gpu or self.precision != "fp32" else {})

    @property
    def device(self) -> str:
        """Where the steps run, as torch calls it."""
        return "cuda" if self.is_gpu else "cpu"


@dataclasses.dataclass
class Record:
    """What was found of a candidate. `apart`: its forward phase is a run of its own."""

    name: str
    file: Path
    variant: Variant | None = None
    apart: bool = False
    workload: Workload | None = None  # of its graph, where it is estimated
    times: list[Times] = dataclasses.field(default_factory=list)
    settle_s: float = 0.0


Entry = tuple[Candidate, Record]


def plan_of(
    *,
    levels: Sequence[str] = ("none", "icf"),
    samples: Sequence[str] = (),
    against: Sequence[str] = (),
    threads: int | None = None,
    target: str = "cpu",
    precision: str | None = None,
    **options: Any,
) -> Plan:
    """Read what is asked for; `options` are the other fields of Plan. Raises BnfuseError for names that are unknown and
    numbers out of range."""
    plan = Plan(
        variants(levels, samples),
        choices.baselines(against, target),
        target=target,
        precision=choices.precision(precision, target),
        threads=bounded_threads(threads) or physical_cores(),
        **options,
    )
    if not plan.variants and not plan.baselines:
        raise BnfuseError("nothing to measure: name a level or a baseline")
    if not plan.estimate:
        return plan
    if plan.is_gpu:
        raise BnfuseError("--estimate compares with this machine's processor: leave --target out")
    return dataclasses.replace(plan, profile=True)


def run_benchmark(
    graph: TrainingGraph, plan: Plan, *, plot: str | Path | None = None, progress: Progress = quiet
) -> Benchmark:
    """Measure, and draw where a picture is asked for, whose place is looked at first."""
    _ = graph.loss  # raises where there is none: nothing here computes gradients of outputs
    if plot is not None:
        require_writable(plot)
        require_plotting(plot)
    if plan.is_gpu:
        from bnfuse.benchmarking.cuda.bench import require_gpu

        require_gpu()
    with tempfile.TemporaryDirectory(prefix="bnfuse-bench-") as folder:
        found = measure(graph, plan, Path(folder), progress)
    if plot is not None:
        draw(found, plot)
    return found


def measure(graph: TrainingGraph, plan: Plan, folder: Path, progress: Progress) -> Benchmark:
    """Measure all that the plan asks for; `folder` is for the files of the candidates."""
    source = folder / "graph.onnx"
    if plan.baselines or plan.compile_time:
        save(graph.model, source)
    records, profiles, floors, machine = time_all(graph, plan, folder, source, progress)
    results = [finish(record, plan, source, progress) for record in records]
    estimates = None
    if plan.estimate and profiles:
        workloads = {record.name: record.workload for record in records if record.workload is not None}
        steps = {result.name: result.times.min_s for result in results}
        estimates = compare(profiles, steps, workloads, hardware_of(profiles[0].limits, plan.threads))
    return Benchmark(graph.name, tuple(results), machine, plan.repetitions, profiles, plan.target, floors, estimates)


def time_all(
    graph: TrainingGraph, plan: Plan, folder: Path, source: Path, progress: Progress
) -> tuple[list[Record], tuple[Profile, ...], list[dict[str, Any]], dict[str, Any]]:
    """Measure all that is measured in this process. When it returns, the memory of the candidates is free again."""
    entries = make_all(graph, plan, folder, source, progress)
    for candidate, _ in entries:
        for _ in range(plan.warm_up):
            candidate.run()
            idle.settle()
    quiet = idle.wait_for_idle(plan.wait, progress)
    before = idle.take_sample()
    alternate(entries, plan.repetitions, progress)
    during = idle.others_between(before, idle.take_sample())
    machine = describe_machine(plan.threads, plan.baselines, quiet, during)
    if plan.precision != "fp32":
        machine["precision"] = plan.precision
    floors: list[dict[str, Any]] = []
    if plan.is_gpu:
        from bnfuse.benchmarking.cuda import bench

        machine |= bench.machine_of(plan.precision)
        if plan.profile:
            progress("profiling on the GPU")
            ours = [candidate for candidate, record in entries if record.variant is not None]
            profiles, floors = bench.profiles_of(graph, ours, plan.precision, plan.repetitions)
        else:
            profiles = ()
    else:
        profiles = profile_all(entries, plan, progress) if plan.profile else ()
    return [record for _, record in entries], profiles, floors, machine


def make_all(graph: TrainingGraph, plan: Plan, folder: Path, source: Path, progress: Progress) -> list[Entry]:
    """Compile our steps and prepare the baselines."""
    feeds = draw_feeds(graph, np.random.default_rng(plan.seed))
    baselines: list[Entry] = []
    for baseline in plan.baselines:  # before ours: a baseline that is not installed is told of at once
        progress(f"preparing {baseline}")
        candidate = make_baseline(graph, baseline, feeds, plan.threads, device=plan.device, precision=plan.precision)
        apart = bool(getattr(candidate, "forward_apart", False))
        baselines.append((candidate, Record(candidate.name, source, apart=apart)))
    ours: list[Entry] = []
    for index, variant in enumerate(plan.variants):
        progress(f"rewriting and compiling at level {variant.name}")
        bar = bar_of(progress)
        step = compile_variant(graph, variant, plan.threads, bar, tune=plan.tune, **plan.how)
        file = folder / f"{index}.bnf"
        if plan.memory:
            step.export(file)
        workload = workload_of(rewrite_variant(graph, variant), plan.precision) if plan.estimate else None
        record = Record(variant.name, file, variant, workload=workload)
        ours.append((own_candidate(variant.name, step, feeds, plan), record))
    return ours + baselines


def own_candidate(name: str, step: Any, feeds: dict[str, np.ndarray], plan: Plan) -> Candidate:
    """Make a candidate of a compiled step."""
    if plan.is_gpu:
        from bnfuse.benchmarking.cuda.step import CudaCandidate

        return CudaCandidate(name, step, feeds)
    return CompiledCandidate(name, step, feeds)


def alternate(entries: Sequence[Entry], repetitions: int, progress: Progress) -> None:
    """Run each candidate once, and again, until all have `repetitions` times."""
    for turn in range(repetitions):
        for candidate, record in entries:
            record.times.append(candidate.run())
            record.settle_s = max(record.settle_s, idle.settle())
        progress(f"repetition {turn + 1} of {repetitions}")


def profile_all(entries: Sequence[Entry], plan: Plan, progress: Progress) -> tuple[Profile, ...]:
    """Profile our steps beside what the machine can do."""
    progress("measuring what the machine can do")
    idle.wait_for_idle(plan.wait, progress)
    limits = measured_limits(plan.threads, WORKING_SETS) if plan.estimate else measured_limits(plan.threads)
    found = []
    for candidate, _ in entries:
        if isinstance(candidate, CompiledCandidate):
            progress(f"profiling {candidate.name}")
            idle.wait_for_idle(plan.wait, progress)
            predicted = predicted_launches(candidate.step, limits, plan.threads) if plan.estimate else None
            found.append(
                profile_step(
                    candidate.name, candidate.step, candidate.feeds, limits, plan.repetitions, predicted=predicted
                )
            )
    return tuple(found)


def finish(record: Record, plan: Plan, source: Path, progress: Progress) -> Result:
    """Measure peak memory and compile time, and put everything together."""
    peaks: dict[str, int | None] = {"peak_bytes": None, "setup_peak_bytes": None}
    if plan.memory:
        progress(f"measuring the peak memory of {record.name}")
        peaks |= peaks_of(record, plan)
    compiling = None
    if plan.compile_time and (record.variant is not None or record.name.startswith("torch-compile")):
        progress(f"measuring the compile time of {record.name}")
        compiling = measured_compile(source, record.variant or record.name, plan.threads, plan.how)
    return Result(
        record.name,
        record.variant.level if record.variant else None,
        record.variant.pool_first if record.variant else None,
        record.variant.sample if record.variant else None,
        summarize(record.times, apart=record.apart),
        tuple(times.step for times in record.times),
        record.settle_s,
        compiling=compiling,
        **peaks,
    )


def peaks_of(record: Record, plan: Plan) -> dict[str, int | None]:
    """Measure the peak memory of a candidate, in a process of its own."""
    if plan.is_gpu:
        from bnfuse.benchmarking.cuda import bench

        return bench.peaks_of(record.file, record.name, plan.precision, plan.seed)
    return measured_peak(record.file, record.name, plan.seed, plan.threads, plan.precision)
