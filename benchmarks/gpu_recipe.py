"""Recipes on a GPU beside a CPU: label smoothing, class weights, mixed images, and a run that is interrupted.

    python benchmarks/gpu_recipe.py [--precision fp32] [--epochs 6]
    python benchmarks/gpu_recipe.py --compile-only sm_90     # fills the cache of kernels, and needs no GPU

It trains a small network on the embedded digits with all of them: on the CPU, on the GPU, and on the GPU once more with
an interruption, which must end bit by bit where the unbroken run does. The losses of the first epochs of CPU and GPU
part by rounding alone. The exit status says whether all is well.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

import bnfuse
from bnfuse.build import build
from bnfuse.core.tensor_files import read_safetensors
from bnfuse.data import load_data
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_forward
from bnfuse.training import train_step, with_soft_labels

LABELS = {"label_smoothing": 0.1, "class_weights": "balanced", "mixup": 0.2, "cutmix": 1.0}
RATES = {"schedule": "cosine", "min_lr": 1e-3, "warm_up": 1.0, "warm_up_lr": 0.01}
ASKED = {**LABELS, **RATES, "augment": "pad-crop:1", "seed": 1}
CLOSE = 1e-3  # of losses of the first epoch, relative, in fp32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--compile-only", metavar="ARCHITECTURE", help="fill the cache of kernels, and run nothing")
    args = parser.parse_args()
    forward = build_forward("densenet40", depth=3, batch=32, image=8, channels=1, classes=10)
    graph = with_soft_labels(open_graph(bnfuse.rewrite(build(forward, file="densenet40").model)))
    data = load_data("digits").normalised()

    def step(target: str) -> bnfuse.runtime.Step:
        precision = args.precision if target.startswith("cuda") else None
        return bnfuse.compile(graph, target=target, precision=precision, optimizer=bnfuse.SGD(lr=0.1, momentum=0.9))

    if args.compile_only:
        step(f"cuda:{args.compile_only}")
        return 0
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        runs = {}
        for target in ("cpu", "cuda"):
            runs[target] = train_step(step(target), data, epochs=args.epochs, save_to=place / target, **ASKED)
            losses = ", ".join(f"{epoch.loss:.5f}" for epoch in runs[target].epochs)
            print(f"{target}: losses {losses}; {runs[target].accuracy:.4f} right")
        for epochs in (1, args.epochs):  # a cosine needs its end, so the interruption is one
            try:
                train_step(
                    broken(step("cuda")) if epochs == 1 else step("cuda"),
                    data,
                    epochs=args.epochs,
                    save_to=place / "again",
                    resume="auto",
                    checkpoint_every=7,
                    **ASKED,
                )
            except KeyboardInterrupt:
                print("cuda: interrupted")
        whole, again = (read_safetensors(place / run / "last.safetensors")[0] for run in ("cuda", "again"))
    same = all(np.array_equal(whole[key], again[key]) for key in whole)
    first = [runs[target].epochs[0].loss for target in ("cpu", "cuda")]
    apart = abs(first[0] - first[1]) / first[0]
    close = apart < CLOSE or args.precision != "fp32"
    learnt = min(run.accuracy for run in runs.values()) > 0.9
    print(
        f"interrupted and unbroken the same bits: {same}; first epoch's losses {apart:.1e} apart; both learn: {learnt}"
    )
    return 0 if same and close and learnt else 1


def broken(step: bnfuse.runtime.Step) -> bnfuse.runtime.Step:
    """Make a step that is interrupted at its 20th call."""
    call, calls = type(step).__call__, []

    class Broken(type(step)):  # type: ignore[misc]
        def __call__(self, *inputs):
            calls.append(0)
            if len(calls) == 20:
                raise KeyboardInterrupt
            return call(self, *inputs)

    step.__class__ = Broken
    return step


if __name__ == "__main__":
    sys.exit(main())
