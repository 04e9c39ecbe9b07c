"""What could a backward kernel save that reads a DenseNet's concatenated map once for two layers? An estimate.

    bnfuse build densenet121 --batch 16 -o train.onnx && bnfuse rewrite train.onnx -o fused.onnx
    python benchmarks/experiments/shared_reads.py fused.onnx [--repeats 9]

The kernel in question computes the gradients of one layer's 1x1 convolution and, of the same tile of the map x, the
next layer's 1x1 convolution over again, whose result forward would then not keep. From a profile (each launch's
shortest time) and the machine's measured limits:

    saved at most   x read once less, at the rate of a copy; no more than the launch takes beyond its FLOPs at the
                    machine's best rate
    added           the FLOPs of forward's 1x1 convolution, at that best rate; y is written once less and once more
    memory          every y but one leaves the set of maps that live from forward into backward

The finding: docs/decisions.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from bnfuse.measuring.limits import Limits, measured_limits
from bnfuse.runtime import compile_step
from bnfuse.runtime.program.program import Work

FLOAT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Launch:
    """A 1x1 convolution of a step."""

    phase: str
    seconds: float
    work: Work

    @property
    def sizes(self) -> list[int]:
        """n, h, w, channels of x."""
        return [int(size) for size in self.work.shape.split(" ")[0].split("x")]

    @property
    def x_bytes(self) -> int:
        return FLOAT_BYTES * math.prod(self.sizes)

    @property
    def y_bytes(self) -> int:
        return self.x_bytes // self.sizes[3] * int(self.work.shape.split(" -> ")[1].split(",")[0])

    def saved(self, limits: Limits) -> float:
        beyond = max(0.0, self.seconds - self.work.flops / limits.flops_per_s)
        return min(self.x_bytes / limits.bytes_per_s, beyond)


def profile(file: str, repeats: int) -> tuple[list[Launch], float]:
    """The 1x1 convolutions, and the seconds of all launches."""
    step = compile_step(file, threads=2)
    rng = np.random.default_rng(0)
    types = [step.program.inputs[name] for name in step.inputs]
    data = [
        rng.standard_normal(t.shape).astype(t.dtype) if "float" in t.dtype else np.zeros(t.shape, t.dtype)
        for t in types
    ]
    runs = [step.profile(*data) for _ in range(repeats + 1)][1:]
    shortest = [min(same, key=lambda line: line.seconds) for same in zip(*runs, strict=True)]
    ones = [Launch(line.phase, line.seconds, line.work) for line in shortest if line.work and "1x1" in line.work.kind]
    return ones, sum(line.seconds for line in shortest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a rewritten training graph of a DenseNet")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    launches, total = profile(arguments.file, arguments.repeats)
    limits = measured_limits(2)
    print(
        f"limits: {limits.flops_per_s / 1e9:.0f} GFLOP/s, {limits.bytes_per_s / 1e9:.1f} GB/s;"
        f" all launches {total * 1e3:.0f} ms"
    )
    print("1x1 convolutions   launches      ms   GFLOP/s   GB/s   x, GB   saved at most, ms")
    for size in sorted({launch.sizes[1] for launch in launches}, reverse=True):
        for phase in ("forward", "backward"):
            row(
                f"{size}x{size} {phase}",
                [one for one in launches if (one.sizes[1], one.phase) == (size, phase)],
                limits,
            )
    backward = [one for one in launches if one.phase == "backward"]
    forward = [one for one in launches if one.phase == "forward"]
    row("backward", backward, limits)
    added = sum(one.work.flops for one in forward) / limits.flops_per_s
    print(
        f"added by computing y over again: {added * 1e3:.0f} ms ({added * limits.flops_per_s / 1e9:.1f} GFLOP);"
        f" y in all: {sum(one.y_bytes for one in forward) / 1e6:.0f} MB"
    )


def row(label: str, launches: Iterable[Launch], limits: Limits) -> None:
    launches = list(launches)
    seconds = sum(one.seconds for one in launches)
    flops, moved = (sum(getattr(one.work, name) for one in launches) for name in ("flops", "bytes"))
    print(
        f"{label:18} {len(launches):8} {seconds * 1e3:7.1f} {flops / seconds / 1e9:9.0f} {moved / seconds / 1e9:6.1f}"
        f" {sum(one.x_bytes for one in launches) / 1e9:7.2f} {sum(one.saved(limits) for one in launches) * 1e3:19.1f}"
    )


if __name__ == "__main__":
    main()
