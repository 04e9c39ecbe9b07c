"""Steps of two GPUs: the same as one GPU's on both batches, the same bits each time, and what the end of a rank does.

Compiled where no GPU is needed, run where neither TVM nor a compiler is:

    python benchmarks/gpu_parallel.py build --folder F
    torchrun --standalone --nproc-per-node 2 benchmarks/gpu_parallel.py run --folder F --out results

equal     20 steps of two ranks and of one on both batches, float32, each begun at the ranks' state: losses, and what
          the step changes, as ||a - b||/||b||. `local`: statistics of each rank's images; one GPU takes one batch after
          the other and updates by both. `sync`: SyncBN; one GPU takes a batch of twice the size. `sync-nccl`: the same
          where NCCL carries what kernels could exchange by themselves
repeat    the same steps again, as graphs and launch by launch: the same bits, on both ranks the same parameters
bf16      the same steps with gradients as bfloat16 on the wire: how far they are from float32's
step      seconds of a step, and of its exchanges by themselves
sum       seconds of sums of 1 KiB to 64 MiB alone, in a graph
lost      rank 1 stops (SIGSTOP) in the middle of steps: rank 0 says so within the limit

Everything is a JSON line in OUT/gpu_parallel.jsonl; the last line says whether all was right, as does the exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from parallel_sums import SIZES, in_a_graph
from parallel_worlds import Planned

from bnfuse.core.errors import BnfuseError, LostRankError
from bnfuse.runtime.program import program as p

NETWORKS = {"densenet40": {"growth": 12, "depth": 1}, "resnet20": {}}
WAYS = ("local", "sync", "sync-nccl")
EACH, IMAGE, CLASSES, STEPS = 16, 32, 10, 20
LR, MOMENTUM = 0.05, 0.9
TOLERANCE = 1e-4  # of each loss, and of what a usual step changes: where a ReLU flips, one may differ by more
HALF_TOLERANCE = 2e-2  # of what 20 steps change
BUCKET = 16 << 10  # bytes
HALVES = slice(0, EACH), slice(EACH, 2 * EACH)
LIMIT = 15.0  # seconds, of the part `lost`


# -- where there is no GPU -------------------------------------------------------------------------------------------


def build(folder: Path, arch: str, names: list[str], ways: list[str]) -> None:
    """Write a step of one GPU and steps of two GPUs, for each network and way."""
    import bnfuse
    from bnfuse.build import build_training_graph
    from bnfuse.models import build_forward
    from bnfuse.runtime import SGD, compile_step

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        settings = {"classes": CLASSES, **NETWORKS[name]}
        models = {
            ranks: build_training_graph(build_forward(name, batch=EACH * (3 - ranks), image=IMAGE, **settings))
            for ranks in (1, 2)
        }
        for way in ways:
            for ranks, wire in ((2, "fp32"), (1, "fp32"), (2, "bf16")):
                path = folder / file_of(name, way, ranks, wire)
                if path.exists():
                    continue
                options = {"sync": True} if way != "local" and ranks == 2 else {}
                model = bnfuse.rewrite(models[1 if way != "local" and ranks == 1 else 2], level="icf", **options).model
                accumulate = 2 if way == "local" and ranks == 1 else 1
                step = compile_step(
                    model,
                    target=f"cuda:{arch}",
                    precision="fp32",
                    optimizer=SGD(lr=LR, momentum=MOMENTUM, accumulate=accumulate),
                    world=Planned(ranks, maps=way == "sync") if ranks > 1 else None,
                    evaluates=False,
                    bucket=BUCKET,
                    wire=wire,
                )
                step.export(path)
                exchanges = sum(launch.exchanges for launch in step.program.launches)
                print(f"{path.name}: {path.stat().st_size / 2**20:.2f} MiB, {exchanges} exchanges", flush=True)


def file_of(name: str, way: str, ranks: int, wire: str) -> str:
    way = way if ranks > 1 else way.removesuffix("-nccl")  # of one GPU there is nothing to carry
    return f"{name}-{way}-{ranks}{'' if wire == 'fp32' else '-' + wire}.bnf"


# -- where the GPUs are ------------------------------------------------------------------------------------------------


class Run:
    """This rank of the run, and what it has found."""

    def __init__(self, folder: Path, out: Path, limit: float) -> None:
        from bnfuse.parallel import open_world

        self.folder, self.out = folder, out
        self.world: Any = open_world(target="cuda", limit=limit)
        if self.world is None or self.world.size != 2:
            raise SystemExit("start two ranks: torchrun --standalone --nproc-per-node 2 ...")
        self.good = True

    def log(self, what: str, *, right: bool = True, **data: Any) -> None:
        """A line of rank 0; it is `right` where all ranks say so."""
        right = all(text == b"1" for text in self.world.gather(b"1" if right else b"0"))
        self.good &= right
        if self.world.rank == 0:
            line = json.dumps({"what": what, "right": right, **data}, default=float)
            with (self.out / "gpu_parallel.jsonl").open("a") as file:
                file.write(line + "\n")
            print(line, "" if right else "  WRONG", flush=True)

    def step(self, name: str, way: str, ranks: int, wire: str = "fp32") -> Any:
        """A step of both ranks; of one, rank 0's alone."""
        from bnfuse.runtime import load_step

        path = self.folder / file_of(name, way, ranks, wire)
        return load_step(path, world=self.world if ranks > 1 else None)

    def batches(self, steps: int = STEPS) -> list[tuple[np.ndarray, np.ndarray]]:
        """Images and labels of both ranks, the same on both."""
        rng = np.random.default_rng(7)
        return [
            (
                rng.standard_normal((2 * EACH, 3, IMAGE, IMAGE)).astype(np.float32),
                rng.integers(0, CLASSES, 2 * EACH),
            )
            for _ in range(steps)
        ]

    def mine(self, array: np.ndarray) -> np.ndarray:
        return array[self.world.rank * EACH :][:EACH]


def one_step(run: Run, step: Any, way: str, images: np.ndarray, labels: np.ndarray) -> float:
    """A step of both ranks on their halves, or of one GPU on both: its loss."""
    if step.world is not None:
        return float(step(run.mine(images), run.mine(labels)))
    if way != "local":
        return float(step(images, labels))
    return float(np.mean([step(images[part], labels[part]) for part in HALVES]))


def apart(run: Run, step: Any, way: str, name: str, begin: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Of each of the ranks' steps how far its loss, and what it changes, are from those of one GPU that begins at the
    same state; on rank 1, which has no such GPU beside it, nothing."""
    from bnfuse.parallel.waiting import patience

    one = run.step(name, way, 1) if run.world.rank == 0 else None
    step.load_state_dict(begin)
    step.reset_optimizer()
    step.lr = LR
    losses, changes = [], []
    with patience(run.world, 300), tempfile.TemporaryDirectory(prefix="bnfuse-equal-") as place:
        kept = Path(place) / "state.safetensors"
        for images, labels in run.batches():
            before = step.state_dict()
            if one is not None:
                step.save(kept)
                one.load(kept)
            found = one_step(run, step, way, images, labels)
            after = step.state_dict()
            if one is not None:
                wanted = one_step(run, one, way, images, labels)
                compared = one.program.parameters if way == "local" else before
                state = one.state_dict()
                losses.append(abs(found / wanted - 1))
                changes.append(distance(after, {name: state[name] for name in compared}, before))
            run.world.gather(b"")
    return losses, changes


def trained(run: Run, step: Any, begin: dict[str, Any], way: str, *, graph: bool = True) -> tuple[list[float], Any]:
    """Losses and state after the steps, from a state on."""
    step.load_state_dict(begin)
    step.reset_optimizer()
    step.lr = LR
    losses = []
    for images, labels in run.batches():
        if graph:
            losses.append(one_step(run, step, way, images, labels))
        else:
            step.profile(run.mine(images), run.mine(labels))
    return losses, step.state_dict()


def distance(found: dict[str, Any], wanted: dict[str, Any], begin: dict[str, Any]) -> float:
    """||a - b|| / ||b - begin|| over all of the state, in float64."""

    def norm(values: Any) -> float:
        return float(np.sqrt(sum(float(np.sum(value**2)) for value in values)))

    wide = {name: (found[name].astype(np.float64), wanted[name].astype(np.float64), begin[name]) for name in wanted}
    return norm(a - b for a, b, _ in wide.values()) / norm(b - c for _, b, c in wide.values())


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(one[name].tobytes() == other[name].tobytes() for name in one)


def equal(run: Run, name: str, way: str) -> None:
    """The parts equal, repeat and bf16 of a network."""
    step = run.step(name, way, 2)
    begin = step.state_dict()
    of_loss, of_step = apart(run, step, way, name, begin)
    found = {"loss": max(of_loss), "changes": statistics.median(of_step), "worst": max(of_step)} if of_step else {}
    right = not found or (found["loss"] < TOLERANCE and found["changes"] < TOLERANCE)  # NaN is neither
    run.log("equal", right=right, network=name, way=way, mapped=is_mapped(step), **found)

    losses, found = trained(run, step, begin, way)
    again = trained(run, step, begin, way)
    one_by_one = trained(run, step, begin, way, graph=False)
    step.same_everywhere()
    bits = same_bits(found, again[1]) and losses == again[0]
    run.log("repeat", right=bits, network=name, way=way, graph="again")
    run.log("repeat", right=same_bits(found, one_by_one[1]), network=name, way=way, graph="launch by launch")

    if not (run.folder / file_of(name, way, 2, "bf16")).exists():
        return
    half = trained(run, run.step(name, way, 2, "bf16"), begin, way)
    error = distance(half[1], found, begin)
    run.log("bf16", right=0 < error < HALF_TOLERANCE, network=name, way=way, state=error, last=half[0][-1])


def is_mapped(step: Any) -> bool:
    """Whether kernels exchange by themselves what SyncBN sends."""
    return p.MAPPED in step.program.regions


def seconds_of(step: Any, parts: Any, steps: int = 50) -> float:
    """Seconds of a step, of many in a row, inputs on the GPU."""
    from bnfuse.benchmarking.cuda.step import on_device

    given = on_device(list(parts))
    for _ in range(5):
        step(*given)
    step.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step(*given)
    step.synchronize()
    return (time.perf_counter() - start) / steps


def times(run: Run, name: str, way: str) -> None:
    """Steps of both ranks and of one of them on a batch of both: for a look, `parallel.py` measures."""
    images, labels = run.batches(1)[0]
    together = run.step(name, way, 2)
    both = statistics.median(seconds_of(together, (run.mine(images), run.mine(labels))) for _ in range(3))
    run.log("step", network=name, way=way, seconds=both, batch=EACH, ranks=2)
    lines = together.profile(run.mine(images), run.mine(labels))
    exchanged = [line for line in lines if line.work is not None and line.work.kind == "exchange"]
    total = sum(line.seconds for line in exchanged)
    run.log("exchanges alone", network=name, way=way, count=len(exchanged), seconds=total)


def sums(run: Run) -> None:
    """Sums of float32 by size, in a graph."""
    for size, seconds in in_a_graph(run.world, SIZES).items():
        run.log("sum", bytes=size, seconds=seconds, gb_per_s=size / seconds / 1e9)


def lost(run: Run, name: str, way: str) -> None:
    """Rank 1 stops in the middle of steps. Rank 0 says so, and lets it go on: both end."""
    pids = [int(text) for text in run.world.gather(str(os.getpid()).encode())]
    step = run.step(name, way, 2)
    images, labels = (run.mine(array) for array in run.batches(1)[0])
    float(step(images, labels))
    run.world.gather(b"")
    if run.world.rank == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        with contextlib.suppress(BnfuseError):
            while True:
                float(step(images, labels))
        return
    begin, said = time.monotonic(), ""
    try:
        while time.monotonic() - begin < 10 * LIMIT:
            last = time.monotonic()
            float(step(images, labels))
    except LostRankError as error:
        said = str(error)
    waited = time.monotonic() - last
    os.kill(pids[1], signal.SIGCONT)
    right = bool(said) and run.world.limit <= waited < run.world.limit + 5
    run.good &= right
    print(json.dumps({"what": "lost", "right": right, "seconds": waited, "said": said}), flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["build", "run"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--network", action="append", choices=[*NETWORKS])
    parser.add_argument("--way", action="append", choices=[*WAYS])
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a rank waits for the other")
    given = parser.parse_args()
    names, ways = given.network or [*NETWORKS], given.way or [*WAYS]
    if given.do == "build":
        build(given.folder, given.arch, names, ways)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    run = Run(given.folder, given.out, given.limit)
    sums(run)
    for name in names:
        for way in ways:
            if (given.folder / file_of(name, way, 2, "fp32")).exists():
                equal(run, name, way)
                times(run, name, way)
    run.log("all but the end of a rank", right=run.good)
    lost(run, names[0], ways[0])
    if run.world.rank == 0:
        print("all was right" if run.good else "NOT ALL WAS RIGHT", flush=True)
    run.world.end("", 0 if run.good else 1)


if __name__ == "__main__":
    main()
