"""Steps of several ranks: how long they are, what of their communication is seen, and a trace. Beside torch's DDP.

CPUs, ranks by MPI (or by torchrun: gloo), compiled as it goes:

    mpirun -n 2 python benchmarks/parallel.py --out results                     # resnet20:32, densenet40:32
    mpirun -n 4 python benchmarks/parallel.py --out results --case resnet20:8 --sync --against ddp,ddp-sync

GPUs, compiled where none is needed, run where neither TVM nor a compiler is:

    python benchmarks/parallel.py --compile-only --folder F --ranks 2 --sync    # for cuda:sm_90; --case, --level, ...
    torchrun --standalone --nproc-per-node 2 benchmarks/parallel.py --target cuda --folder F --out results --trace
    python benchmarks/parallel.py --show results --plots results                # tables, the fit, pictures of traces

torch.compile takes a minute a network and batch. It is done for all of them at once, into torch's cache, by

    for c in $(python benchmarks/parallel.py --list); do
        torchrun --standalone --nproc-per-node 2 benchmarks/parallel.py --target cuda --folder F --prepare --case $c &
    done; wait

(4 minutes for the four cases on 32 cores.) The run stops after `--limit` seconds, at the next candidate.

For each case and way there are three steps, in turns with all others: of rank 0 while the others wait (`one`), of all
ranks without an exchange (`apart`), and together. Efficiency is one/together, exposed communication together - apart;
a step of several ranks takes as long as on the slowest. Everything is a JSON line in OUT/parallel.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import parallel_torch
import parallel_trace
from gpu_pack import unpack
from parallel_cases import ON_CPUS, ON_GPUS, Case, Way, case_of, compile_only, compiled, file_of, training_model, ways
from parallel_sums import SIZES, in_a_graph, on_the_host
from parallel_worlds import Recorder, Single, noting

from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.parallel import launched, open_world
from bnfuse.runtime.program import program as p

PATIENCE = 600.0  # seconds that ranks wait for one that compiles
ON_GPU_AGAINST = ("torch-cl", "torch-compile", "ddp", "ddp-compile", "ddp-sync")
ON_CPU_AGAINST = ("torch-cl", "ddp", "ddp-sync")


class Candidate(Protocol):
    name: str

    def seconds(self, steps: int) -> float: ...


class OutOfTime(Exception):
    """The run's time is over."""


class OnCpu:
    """Our step on this rank's batch."""

    def __init__(self, name: str, step: Any, feeds: list[np.ndarray]) -> None:
        self.name, self.step, self.feeds = name, step, feeds
        step.lr = 0.0
        step(*feeds)

    def seconds(self, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            self.step(*self.feeds)
        return (time.perf_counter() - start) / steps


@dataclasses.dataclass
class Run:
    """One run on this rank: where it is, what it is told, and what it found."""

    args: argparse.Namespace
    world: Any
    place: Path
    end: float

    @property
    def is_gpu(self) -> bool:
        return bool(self.args.target != "cpu")

    def log(self, what: str, **data: Any) -> None:
        if self.world.rank == 0:
            line = {
                "what": what,
                "at": round(time.time(), 1),
                "ranks": self.world.size,
                "world": self.world.name,
                **data,
            }
            with (self.args.out / "parallel.jsonl").open("a") as file:
                file.write(json.dumps(line, default=float) + "\n")
            shown = {key: value for key, value in data.items() if not isinstance(value, list)}
            print(what, json.dumps(shown, default=short), flush=True)

    def barrier(self) -> None:
        self.world.gather(b"")

    def check(self, need: float) -> None:
        """Raises on all ranks where less than `need` seconds are left on rank 0."""
        if not json.loads(self.world.broadcast(json.dumps(self.end - time.monotonic() > need).encode())):
            raise OutOfTime

    def made(self, name: str, make: Callable[[], Any]) -> Any:
        """Make a candidate on all ranks, or none: what one of them lacks is a line."""
        start, found, error = time.monotonic(), None, ""
        try:
            found = make()
        except Exception as raised:  # whatever a framework or its compiler raises: the others go on
            error = first_line(raised) or type(raised).__name__
        said = [text.decode() for text in self.world.gather(error.encode())]
        if any(said):
            self.log("cannot be made", candidate=name, error=next(text for text in said if text))
            return None
        self.log("made", candidate=name, seconds=round(time.monotonic() - start, 1))
        return found

    def step_of(self, model: Any, case: Case, way: Way, world: Any) -> Any:
        if not self.is_gpu:
            return compiled(model, case, way, "cpu", self.args, world)
        from bnfuse.runtime import load_step

        path = unpack(self.args.folder / file_of(case, way, self.args.precision), self.place)
        return load_step(path, world=world)

    def ours(self, model: Any, case: Case, way: Way, feeds: dict[str, np.ndarray], world: Any) -> Any:
        step = self.step_of(model, case, way, world)
        if self.is_gpu:
            from bnfuse.benchmarking.cuda.step import CudaCandidate

            candidate = CudaCandidate(way.name, step, feeds)
            candidate.seconds(3)
            return candidate
        return OnCpu(way.name, step, [feeds[name] for name in step.inputs])


def short(value: Any) -> Any:
    return float(value)


def measure(run: Run, case: Case) -> None:
    """All candidates of a case in turns."""
    from bnfuse.graph.feeds import draw_feeds
    from bnfuse.graph.training_graph import open_graph

    run.check(30)
    args, world = run.args, run.world
    model = None if run.is_gpu else training_model(case)
    source = unpack(args.folder / f"{case.name}.train", run.place) if run.is_gpu else model
    graph = open_graph(source, name=case.name)
    feeds = draw_feeds(graph, np.random.default_rng(world.rank))
    device = "cuda" if run.is_gpu else "cpu"
    together: dict[str, Any] = {}
    alone: dict[str, Any] = {}
    for way in ways(args.level, args.bucket, world.size, gpus=run.is_gpu, sync=args.sync, wire=args.wire):
        own = world if way.ranks > 1 else None
        if (found := run.made(way.name, lambda w=way, o=own: run.ours(model, case, w, feeds, o))) is not None:
            (together if way.ranks > 1 else alone)[way.name] = found
    for name in args.against:
        if name.startswith("ddp") and world.size == 1:
            continue
        run.check(30)
        make = lambda n=name: parallel_torch.TorchParallel(graph, n, feeds, device, args.precision)  # noqa: E731
        if (found := run.made(name, make)) is not None:
            (together if name.startswith("ddp") else alone)[name] = found
    times = taken(run, alone, together)
    about = {"case": case.name, "precision": args.precision, "batch": case.batch}
    for (kind, name), seconds in times.items():
        samples = case.batch * (1 if kind == "one" else world.size)
        run.log(
            "step",
            **about,
            candidate=name,
            kind=kind,
            min_s=min(seconds),
            median_s=statistics.median(seconds),
            images_per_s=samples / statistics.median(seconds),
            steps_s=seconds,
        )
    for name in together:
        if (base := base_of(name)) in alone:
            run.log("scaling", **about, candidate=name, **compared(times, base, name))
    for name, candidate in together.items():
        if hasattr(candidate, "step") and p.MAPPED not in candidate.step.program.regions:  # all it sends is a launch
            run.log("schedule", **about, candidate=name, **schedule_line(candidate, f"{case.name} {name}"))
    del alone, together
    forget(run)


def base_of(name: str) -> str:
    """The name of the step without exchanges that one of several ranks is compared with."""
    if name.startswith("ddp"):
        return parallel_torch.alone_of(name)
    return f"{name.partition('+')[0]} alone"


def taken(run: Run, alone: dict[str, Any], together: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Seconds of a step by kind and candidate: of the slowest rank, repetition by repetition."""
    steps = run.args.steps or (10 if run.is_gpu else 3)
    turns = [("one", name, one) for name, one in alone.items()]
    if run.world.size > 1:
        turns += [("apart", name, one) for name, one in alone.items()]
        turns += [("together", name, one) for name, one in together.items()]
    own: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind, name, _ in turns}
    for _ in range(run.args.repetitions):
        for kind, name, candidate in turns:
            run.barrier()
            runs = kind != "one" or run.world.rank == 0
            own[kind, name].append(candidate.seconds(steps) if runs else 0.0)
    every = [json.loads(data) for data in run.world.gather(json.dumps(list(own.values())).encode())]
    return {
        key: [max(values) for values in zip(*(rank[i] for rank in every), strict=True)] for i, key in enumerate(own)
    }


def compared(times: dict[tuple[str, str], list[float]], base: str, name: str) -> dict[str, float]:
    """Efficiency and exposed communication, by the shortest and by the middle step."""
    found: dict[str, float] = {}
    for how, of in (("min", min), ("median", statistics.median)):
        one, apart, both = (of(times[key]) for key in (("one", base), ("apart", base), ("together", name)))
        found |= {f"efficiency_{how}": one / both, f"exposed_{how}_s": both - apart, f"exposed_{how}": both / apart - 1}
    return found


def schedule_line(candidate: Any, name: str, repetitions: int = 3) -> dict[str, Any]:
    """The step as bnfuse/estimating/parallel/schedule.py has it. Every rank runs it."""
    from bnfuse.estimating.parallel.schedule import schedule_of

    runs = [candidate.step.profile(*candidate.feeds) for _ in range(repetitions)]
    seconds = [min(row.seconds for row in rows) for rows in zip(*runs, strict=True)]
    found = schedule_of(candidate.step.program, seconds, name)
    return {
        "seconds": list(found.seconds),
        "exchanges": [dataclasses.astuple(each) for each in found.exchanges],
        "update": found.update,
        "bytes": found.bytes,
        "messages": len(found.exchanges),
    }


def forget(run: Run) -> None:
    gc.collect()
    if run.is_gpu:
        import torch

        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def trace(run: Run, case: Case) -> None:
    """One step of ours with its exchanges, and on GPUs of DDP, each as a trace of rank 0."""
    from bnfuse.graph.feeds import draw_feeds
    from bnfuse.graph.training_graph import open_graph

    run.check(20)
    world, args = run.world, run.args
    model = None if run.is_gpu else training_model(case)
    graph = open_graph(unpack(args.folder / f"{case.name}.train", run.place) if run.is_gpu else model, name=case.name)
    feeds = draw_feeds(graph, np.random.default_rng(world.rank))
    level = args.level[-1]
    for way in [Way(level, ranks=world.size), *([Way(level, sync=True, ranks=world.size)] if args.sync else [])]:
        path = run.place / "trace.json"
        if run.is_gpu:
            candidate = run.ours(model, case, way, feeds, world)
            events = parallel_trace.recorded(lambda c=candidate: c.step(*c.feeds), path)  # type: ignore[misc]
        else:
            noted = Recorder(world)
            candidate = run.ours(model, case, way, feeds, noted)
            launches = noting(candidate.step)
            candidate.seconds(1)
            noted.spans.clear()
            launches.clear()
            start = time.perf_counter()
            candidate.seconds(1)
            spans = [[(name, a - start, (b or a) - start) for name, a, b in of] for of in (launches, noted.spans)]
            events = parallel_trace.of_spans(*spans, path)
        keep_trace(run, events, path, case, way.name)
    if run.is_gpu and "ddp-compile" in args.against:
        torch_step = parallel_torch.TorchParallel(graph, "ddp-compile", feeds, "cuda", args.precision)
        path = run.place / "trace.json"
        keep_trace(run, parallel_trace.recorded(lambda: torch_step.seconds(1), path), path, case, "ddp-compile")


def keep_trace(run: Run, events: list[Any], path: Path, case: Case, name: str) -> None:
    """On rank 0 the trace of the last step as a file beside the results, and how much of its exchanges is hidden."""
    if run.world.rank == 0:
        shown = parallel_trace.last_step(events)
        seconds, beside = parallel_trace.hidden(shown)
        kept = run.args.out / f"trace-{case.name}-{name.replace('+', '-')}-{run.world.size}.json"
        parallel_trace.write(shown, kept)
        about = {"kernels": len(shown), "exchanges_s": seconds, "hidden_s": beside, "file": kept.name}
        run.log("trace", case=case.name, candidate=name, **about)
        with contextlib.suppress(BnfuseError):
            parallel_trace.draw(shown, kept.with_suffix(".png"), f"{case.name} {name}, {run.world.size} ranks")


def prepare(args: argparse.Namespace) -> None:
    """torch.compile's work for these cases into its cache; ranks by torchrun alone."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")  # others do the same beside
    import torch

    from bnfuse.graph.feeds import draw_feeds
    from bnfuse.graph.training_graph import open_graph

    rank = int(os.environ.get("RANK", "0"))
    torch.cuda.set_device(local_rank())
    parallel_torch.begin("cuda")
    with tempfile.TemporaryDirectory(prefix="bnfuse-parallel-") as place:
        for case in args.cases:
            graph = open_graph(unpack(args.folder / f"{case.name}.train", Path(place)), name=case.name)
            feeds = draw_feeds(graph, np.random.default_rng(rank))
            for name in (name for name in args.against if "compile" in name):
                start = time.monotonic()
                parallel_torch.TorchParallel(graph, name, feeds, "cuda", args.precision)
                if rank == 0:
                    print(f"{case.name} {name}: {time.monotonic() - start:.0f} s", flush=True)
    torch.distributed.destroy_process_group()


def sums(run: Run) -> None:
    """A sum between the ranks by itself, by size: what the network gives at best."""
    if run.world.size == 1:
        return
    if not run.is_gpu and any(name.startswith("ddp") for name in run.args.against):
        for size, seconds in parallel_torch.all_reduces("cpu", SIZES, 5).items():
            run.log("all-reduce", engine="gloo", bytes=size, seconds=seconds)
    taken_by = in_a_graph if run.is_gpu else on_the_host
    for size, seconds in taken_by(run.world, SIZES).items():
        run.log("all-reduce", engine=run.world.name, bytes=size, seconds=seconds)


def main() -> None:
    args = arguments()
    if args.list:
        print("\n".join(args.case))
    elif args.show is not None:
        from parallel_show import show

        show(args.show, args.plots)
    elif args.compile_only:
        compile_only(args)
    elif args.prepare:
        prepare(args)
    else:
        run_all(args)


def run_all(args: argparse.Namespace) -> None:
    is_gpu = args.target != "cpu"
    uses_torch = is_gpu or bool(args.against)
    if uses_torch:
        import torch

        torch.set_num_threads(args.threads)
        if is_gpu:
            torch.cuda.set_device(local_rank())
            torch.zeros(1, device="cuda")  # its context is this thread's now, which the world takes
            if args.trace:
                parallel_trace.warm_up()
        if parallel_torch.by_torchrun():
            parallel_torch.begin("cuda" if is_gpu else "cpu")
    world: Any = open_world(target=args.target, limit=PATIENCE) or Single()
    if uses_torch and world.size > 1 and not parallel_torch.by_torchrun():
        parallel_torch.begin("cuda" if is_gpu else "cpu", world)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bnfuse-parallel-") as place:
        run = Run(args, world, Path(place), time.monotonic() + args.limit)
        run.log("machine", **machine(args))
        try:
            sums(run)
            for case in args.cases:
                measure(run, case)
                if args.trace and world.size > 1 and case is args.cases[0]:
                    trace(run, case)
                    forget(run)
        except OutOfTime:
            run.log("out of time", limit_s=args.limit)
        run.barrier()
    if uses_torch and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def local_rank() -> int:
    found = launched()
    return found.local_rank if found is not None else 0


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What it ran on."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "threads": args.threads, "target": args.target}
    if args.target != "cpu":
        import torch

        found |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--case", action="append", metavar="NETWORK:BATCH", help="repeatable; the batch is a rank's")
    parser.add_argument("--level", action="append", help="repeatable; icf by default")
    parser.add_argument("--sync", action="store_true", help="SyncBN beside it")
    parser.add_argument("--wire", action="store_true", help="gradients as bfloat16 between the GPUs beside it")
    parser.add_argument("--bucket", default="", help="MB of gradients in a message: 1,4,16")
    parser.add_argument("--precision", help="bf16 on GPUs, fp32 on CPUs")
    parser.add_argument("--against", help="of torch, see parallel_torch.py; 'none' for none of them")
    parser.add_argument("--threads", type=int, default=1, help="of a rank, on CPUs")
    parser.add_argument("--steps", type=int, help="in a row")
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--limit", type=float, default=450, help="seconds, after which nothing new is begun")
    parser.add_argument("--out", type=Path, default=Path("parallel-results"))
    parser.add_argument("--folder", type=Path, default=Path("parallel-files"), help="of steps for GPUs")
    parser.add_argument("--trace", action="store_true", help="of the first case")
    parser.add_argument("--compile-only", action="store_true", help="the steps that a run on GPUs needs")
    parser.add_argument("--ranks", type=int, default=2, help="that they are compiled for")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--prepare", action="store_true", help="torch.compile's cache alone")
    parser.add_argument("--list", action="store_true", help="the cases of a run on GPUs")
    parser.add_argument("--show", type=Path, metavar="OUT", help="what is in a folder of results")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="pictures of --show")
    args = parser.parse_args(given)
    on_gpus = args.target != "cpu" or args.compile_only or args.prepare or args.list
    args.case = args.case or list(ON_GPUS if on_gpus else ON_CPUS)
    args.cases = [case_of(text) for text in args.case]
    args.level = args.level or ["icf"]
    args.bucket = [float(size) for size in args.bucket.split(",") if size]
    args.precision = args.precision or ("bf16" if on_gpus else "fp32")
    if args.against is None:
        args.against = list(ON_GPU_AGAINST if on_gpus else ())
    else:
        args.against = [name for name in args.against.split(",") if name and name != "none"]
    known = {*parallel_torch.NAMES, *(f"{name}+graph" for name in parallel_torch.NAMES)}
    if unknown := [name for name in args.against if name not in known]:
        parser.error(f"--against {unknown[0]}: it is one of {', '.join(sorted(known))}")
    return args


if __name__ == "__main__":
    main()
