"""A densenet121 training step beside torch's, in one process, taking turns.

    python benchmarks/against_torch.py [--batch 16] [--image 224] [--repetitions 9] [--compile]

Prints minimum and median seconds of a whole step (forward, backward, SGD with momentum) and the ratio to the first
candidate. Waits for an idle machine, and says how busy it was. Needs torch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from torch_densenet import DenseNet121

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.models import build_forward

Run = Callable[[], object]


def torch_run(args: argparse.Namespace, layout: torch.memory_format, compiled: bool) -> Run:
    net = DenseNet121().to(memory_format=layout)
    step = torch.compile(net) if compiled else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(args.batch, 3, args.image, args.image).to(memory_format=layout)
    labels = torch.randint(0, 1000, (args.batch,))

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(step(x), labels).backward()
        optimizer.step()

    return run


def own_run(args: argparse.Namespace, level: str) -> Run:
    forward = build_forward("densenet121", batch=args.batch, image=args.image)
    model = bnfuse.rewrite(ir.from_proto(build_training_graph(forward)), level=level).model
    step = bnfuse.compile(model, optimizer=bnfuse.SGD(lr=0.1, momentum=0.9), threads=args.threads)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((args.batch, 3, args.image, args.image), dtype=np.float32)
    labels = rng.integers(0, 1000, args.batch)
    return lambda: step(x, labels)


def wait_for_idle(limit: float, patience: float = 300) -> float:
    """Wait until the load average is below the limit; gives the load."""
    start = time.monotonic()
    while (load := os.getloadavg()[0]) > limit and time.monotonic() - start < patience:
        time.sleep(5)
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="torch.compile too (needs a C++ compiler)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    runs = {
        "torch channels_last": torch_run(args, torch.channels_last, False),
        "torch eager": torch_run(args, torch.contiguous_format, False),
        "bnfuse none": own_run(args, "none"),
        "bnfuse icf": own_run(args, "icf"),
    }
    if args.compile:
        runs["torch.compile"] = torch_run(args, torch.channels_last, True)
    for run in runs.values():
        run()
        run()
    print(
        f"load before: {wait_for_idle(0.7):.2f}; torch {torch.__version__}, {args.threads} threads, batch {args.batch}"
    )
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repetitions):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    first = min(next(iter(times.values())))
    for name, found in times.items():
        print(f"{name:20} min {min(found):.3f} s  median {statistics.median(found):.3f} s  {first / min(found):.2f}x")


if __name__ == "__main__":
    main()
