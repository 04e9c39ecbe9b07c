"""Updates with a recipe in them, on a GPU: the same as on a CPU, and what they cost. Run on the machine with the GPU.

    python benchmarks/gpu_updates.py                     # every optimiser with everything, beside the CPU's step
    python benchmarks/gpu_updates.py --time densenet121  # seconds of a step, with more and more of a recipe

With --compile-only ARCHITECTURE (sm_90) either one only fills the cache of kernels ($BNFUSE_CACHE), which needs no GPU:
the machine with the GPU finds them there, and compiles no more than the CPU's.

Both sides take the same batches; what a few updates change in parameters, statistics and averages is compared, as
||a - b||/||b|| of all of them together. At fp16 a gradient that overflows must leave all as it was.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import bnfuse
from bnfuse.build.named import build_model
from bnfuse.runtime import EMA, SGD, Adam, AdamW, Group, Lion, RMSprop, Step

GROUPS = (Group("*weight*", lr=0.5), Group("*bias*", weight_decay=0.0))
EVERYTHING = {"groups": GROUPS, "layer_decay": 0.9, "accumulate": 2, "ema": EMA(0.9, warm_up=True)}
OPTIMIZERS = {
    "sgd": lambda **more: SGD(0.01, 0.9, True, 1e-3, **more),
    "adamw": lambda **more: AdamW(1e-3, weight_decay=0.05, **more),
    "adam": lambda **more: Adam(1e-3, weight_decay=1e-3, **more),
    "rmsprop": lambda **more: RMSprop(1e-3, momentum=0.9, **more),
    "rmsproptf": lambda **more: RMSprop(1e-3, 0.9, 1e-3, 0.9, True, **more),
    "lion": lambda **more: Lion(1e-4, weight_decay=0.1, **more),
}
CLIPS = {"norm": {"clip_norm": 0.5}, "value": {"clip_value": 0.01}}
TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 5e-2}


def main() -> None:
    """Read the command line; compare, or time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", metavar="NETWORK", help="time steps of a network of the zoo")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--precision", default="bf16", help="of what is timed")
    parser.add_argument("--compile-only", metavar="ARCHITECTURE", help="fill the cache of kernels, and run nothing")
    given = parser.parse_args()
    target = f"cuda:{given.compile_only}" if given.compile_only else "cuda"
    if given.time:
        time_steps(given.time, given.batch, given.precision, target, run=not given.compile_only)
    elif given.compile_only:
        for _, _, precision, make in cases():
            bnfuse.compile(small(), target, make(), precision=precision)
    elif not compare():
        raise SystemExit(1)


def small() -> object:
    """The network whose updates are compared."""
    return bnfuse.rewrite(build_model("densenet40", zoo={"depth": 3, "batch": 8, "image": 8, "channels": 1}).model)


def cases() -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
    """Name of an optimiser, how it clips, a precision, and what makes it with everything."""
    for name, make in OPTIMIZERS.items():
        for clip, options in CLIPS.items():
            for precision in TOLERANCES:
                yield name, clip, precision, functools.partial(make, **EVERYTHING, **options)
    yield "adamw", "skips", "fp16", skipping


def skipping() -> AdamW:
    """The optimiser that is given a gradient that is not finite."""
    return AdamW(1e-3, clip_norm=1.0, ema=0.9)


def compare() -> bool:
    """Compare steps on the GPU with the CPU's."""
    model, good = small(), True
    known: dict[tuple[str, str], tuple[Step, list[Mapping[str, np.ndarray]]]] = {}
    for name, clip, precision, make in cases():
        if clip == "skips":
            good &= skips(model)
            continue
        if (name, clip) not in known:
            cpu = bnfuse.compile(model, optimizer=make())
            known[name, clip] = cpu, after(cpu)
        (cpu, wanted), tolerance = known[name, clip], TOLERANCES[precision]
        step = bnfuse.compile(model, "cuda", make(), precision=precision)
        error = max(distance(a, b) for a, b in zip(after(step), wanted, strict=True))
        norm = abs(step.gradient_norm / cpu.gradient_norm - 1) if clip == "norm" else 0.0
        right = error < tolerance and norm < 10 * tolerance
        good &= right
        print(f"{name:10} {clip:6} {precision}  {error:.1e}  norm {norm:.1e}  {'' if right else 'WRONG'}", flush=True)
    return good


def after(step: Step, calls: int = 7) -> list[Mapping[str, np.ndarray]]:
    """What a step changes in some calls, and what its average changes: one is left over and flushed."""
    rng, before = np.random.default_rng(0), step.state_dict()
    for _ in range(calls):
        step(rng.standard_normal((8, 1, 8, 8), dtype=np.float32), rng.integers(0, 10, 8))
    assert step.flush()
    return [
        {name: value - before[name] for name, value in state.items()}
        for state in (step.state_dict(), step.state_dict(ema=True))
    ]


def distance(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> float:
    """||a - b|| / ||b|| of all tensors together."""
    a, b = (np.concatenate([state[name].ravel().astype(np.float64) for name in wanted]) for state in (found, wanted))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def skips(model: object) -> bool:
    """Tell whether a gradient that is not finite leaves parameters, moments and added gradients of fp16 to go on."""
    step = bnfuse.compile(model, "cuda", skipping(), precision="fp16")
    after_one = [np.zeros((8, 1, 8, 8), np.float32), np.zeros(8, np.int64)]
    step(*after_one)
    before = step.state_dict()
    step.loss_scale = 1e30
    step(*after_one)
    names = step.program.signature["trainable"]
    right = step.skipped and all(np.array_equal(step.state_dict()[name], before[name]) for name in names)
    print(f"fp16 skips what overflows: {right}")
    return right


def time_steps(network: str, batch: int, precision: str, target: str, *, run: bool) -> None:
    """Print seconds of a step, and of its update, with more and more of a recipe; or compile alone."""
    model = bnfuse.rewrite(build_model(network, zoo={"batch": batch}).model)
    recipes = {
        "plain": {},
        "groups": {"groups": (Group("*", lr=0.5),)},
        "clip value": {"clip_value": 1.0},
        "clip norm": {"clip_norm": 1.0},
        "ema": {"ema": 0.9998},
        "accumulate 4": {"accumulate": 4},
        "everything": {"groups": (Group("*", lr=0.5),), "clip_norm": 1.0, "ema": 0.9998, "accumulate": 4},
    }
    for name, options in recipes.items():
        step = bnfuse.compile(model, target, AdamW(1e-3, **options), precision=precision)
        if not run:
            continue
        rng = np.random.default_rng(0)
        shapes = [step.program.inputs[given].shape for given in step.inputs]
        feeds = [rng.standard_normal(shapes[0], dtype=np.float32), rng.integers(0, 10, shapes[1])]
        times = []
        for _ in range(24):
            step.synchronize()
            begun = time.perf_counter()
            step(*feeds)
            step.synchronize()
            times.append(time.perf_counter() - begun)
        update = sum(one.seconds for one in step.profile(*feeds) if one.phase in ("accumulate", "update"))
        step_ms = statistics.median(times[4:]) * 1e3
        print(f"{name:14} {step_ms:8.3f} ms a step, kernels of the update {update * 1e6:6.0f} us")


if __name__ == "__main__":
    main()
