"""Updates with a recipe in them, on a GPU: the same as on a CPU, and what they cost. Run on the machine with the GPU.

    python benchmarks/gpu_updates.py                     # every optimiser with everything, beside the CPU's step
    python benchmarks/gpu_updates.py --time densenet121  # seconds of a step, with more and more of a recipe

Both sides take the same batches; what a few updates change in parameters, statistics and averages is compared, as
||a - b||/||b|| of all of them together. At fp16 a gradient that overflows must leave all as it was.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping

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
    given = parser.parse_args()
    if given.time:
        time_steps(given.time, given.batch, given.precision)
    elif not compare():
        raise SystemExit(1)


def compare() -> bool:
    """Compare steps on the GPU with the CPU's."""
    model = bnfuse.rewrite(build_model("densenet40", zoo={"depth": 3, "batch": 8, "image": 8, "channels": 1}).model)
    good = True
    for name, make in OPTIMIZERS.items():
        for clip, options in CLIPS.items():
            cpu = bnfuse.compile(model, optimizer=make(**EVERYTHING, **options))
            wanted = after(cpu)
            for precision, tolerance in TOLERANCES.items():
                step = bnfuse.compile(model, "cuda", make(**EVERYTHING, **options), precision=precision)
                error = max(distance(a, b) for a, b in zip(after(step), wanted, strict=True))
                norm = abs(step.gradient_norm / cpu.gradient_norm - 1) if clip == "norm" else 0.0
                right = error < tolerance and norm < 10 * tolerance
                good &= right
                print(f"{name:10} {clip:6} {precision}  {error:.1e}  norm {norm:.1e}  {'' if right else 'WRONG'}")
    good &= skips(model)
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
    step = bnfuse.compile(model, "cuda", AdamW(1e-3, clip_norm=1.0, ema=0.9), precision="fp16")
    after_one = [np.zeros((8, 1, 8, 8), np.float32), np.zeros(8, np.int64)]
    step(*after_one)
    before = step.state_dict()
    step.loss_scale = 1e30
    step(*after_one)
    names = step.program.signature["trainable"]
    right = step.skipped and all(np.array_equal(step.state_dict()[name], before[name]) for name in names)
    print(f"fp16 skips what overflows: {right}")
    return right


def time_steps(network: str, batch: int, precision: str) -> None:
    """Print seconds of a step, and of its update, with more and more of a recipe."""
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
        step = bnfuse.compile(model, "cuda", AdamW(1e-3, **options), precision=precision)
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
