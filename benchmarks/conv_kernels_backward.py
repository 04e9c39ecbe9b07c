"""GFLOP/s of the backward convolution kernels, beside torch's plain convolution in channels_last.

    python benchmarks/conv_kernels_backward.py [--batch 16] [--threads 2] [--torch] [--only NAME]
        [--precision bf16]

Ours include the BatchNorm's gradient and the activation on the way in, the mask, the sums and the accumulation on the
way out; torch's are the convolution alone. Where a layer has several algorithms, they take turns; GFLOP/s count the
multiplications of the direct one, so that the columns compare as times do. Minimum of the runs: of wall time, with
--threads 1 of processor time. With bf16 maps lie in 16 bits, torch's weights too.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import numpy as np
import tvm

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.memory import as_bits
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu.conv_backward import algorithms, conv_backward
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.targets.arch import CPU_PRECISIONS
from bnfuse.runtime.targets.target import CpuTarget

ACCUMULATING = "BatchNormGradNormalizeReluConvGradReluGradReduceAccumulate"
STORING = "BatchNormGradNormalizeReluConvGradReluGradReduce"
STEM = "BatchNormGradConvGradWeight"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A square convolution inside a network: x lies in a buffer of `stride` channels."""

    name: str
    op: str
    size: int
    cin: int
    cout: int
    kernel: int = 1
    stride: int = 1
    group: int = 1
    x_stride: int = 0
    y_stride: int = 0

    @property
    def out(self) -> int:
        return -(-self.size // self.stride)

    @property
    def halves(self) -> int:
        """How many of the two gradients are made."""
        return 1 if "ConvGradWeight" in self.op else 2

    def gflop(self, batch: int) -> float:
        macs = batch * self.out**2 * self.cout * self.cin // self.group * self.kernel**2
        return 2e-9 * macs * self.halves

    def problem(self, batch: int, dtype: str) -> Problem:
        x = MapType(batch, self.size, self.size, self.cin, self.x_stride or self.cin, dtype)
        dy = MapType(batch, self.out, self.out, self.cout, self.y_stride or self.cout, dtype)
        maps = {"dy": dy, "x": x, "grad_x": dy, "dx": x}
        if "ConvGradWeight" in self.op:
            del maps["dx"]
        pad = self.kernel // 2
        attributes = {
            "dilations": (1, 1),
            "group": self.group,
            "kernel_shape": (self.kernel, self.kernel),
            "pads": (pad,) * 4,
            "strides": (self.stride, self.stride),
        }
        weight = (self.cout, self.cin // self.group, self.kernel, self.kernel)
        return Problem(self.op, tuple(maps.items()), tuple(attributes.items()), weight)


LAYERS = (
    Layer("1x1 at 56", ACCUMULATING, 56, 96, 128, x_stride=256),
    Layer("1x1 at 28", ACCUMULATING, 28, 480, 128, x_stride=512),
    Layer("1x1 at 14", ACCUMULATING, 14, 992, 128, x_stride=1024),
    Layer("1x1 at 7", ACCUMULATING, 7, 736, 128, x_stride=1024),
    Layer("3x3 at 56", STORING, 56, 128, 32, 3, y_stride=256),
    Layer("3x3 at 28", STORING, 28, 128, 32, 3, y_stride=512),
    Layer("3x3 at 14", STORING, 14, 128, 32, 3, y_stride=1024),
    Layer("3x3 at 7", STORING, 7, 128, 32, 3, y_stride=1024),
    Layer("transition at 28", STORING, 28, 256, 128),
    Layer("transition at 7", STORING, 7, 1024, 512),
    Layer("stem", STEM, 224, 3, 64, 7, 2),
    Layer("resnet 3x3 at 56", STORING, 56, 64, 64, 3),
    Layer("resnet 3x3 at 28", STORING, 28, 128, 128, 3),
    Layer("resnet 3x3 at 14", STORING, 14, 256, 256, 3),
    Layer("resnet 3x3 at 7", STORING, 7, 512, 512, 3),
    Layer("resnet 3x3 / 2", STORING, 56, 128, 128, 3, 2),
    Layer("resnet 1x1 / 2", STORING, 56, 256, 512, 1, 2),
    Layer("grouped 3x3 at 56", STORING, 56, 128, 128, 3, 1, 32),
    Layer("grouped 3x3 at 14", STORING, 14, 512, 512, 3, 1, 32),
    Layer("depthwise 3x3 at 56", STORING, 56, 144, 144, 3, 1, 144),
    Layer("depthwise 3x3 / 2", STORING, 112, 96, 96, 3, 2, 96),
    Layer("depthwise 5x5 at 56", STORING, 56, 144, 144, 5, 1, 144),
    Layer("depthwise 5x5 / 2", STORING, 56, 144, 144, 5, 2, 144),
)


def best(calls: Sequence[Callable[[], object]], threads: int, seconds: float = 0.4) -> list[float]:
    """The shortest time of each call; they take turns, for `seconds` each."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    shortest = [float("inf")] * len(calls)
    for call in calls:
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = clock()
            call()
            shortest[i] = min(shortest[i], clock() - start)
    return shortest


def time_kernels(layer: Layer, batch: int, target: CpuTarget) -> dict[str, tuple[float, float]]:
    """By algorithm, the one of choice first: seconds of a call, and of making and compiling the kernel."""
    problem = layer.problem(batch, target.map_dtype)
    rng = np.random.default_rng(0)
    calls, compiling = {}, []
    arrays: list[np.ndarray] = []
    for algorithm in algorithms(problem, target):
        kernel = conv_backward(problem, target, algorithm)
        start = time.perf_counter()
        function = execute.compile_kernel(kernel)
        compiling.append(time.perf_counter() - start)
        if not arrays:
            arrays = [execute.aligned(p.elements, p.dtype) for p in kernel.params]
            for array in arrays:
                array[...] = rng.standard_normal(array.size, dtype=np.float32)
        tensors = [tvm.runtime.from_dlpack(as_bits(array)) for array in arrays]
        offsets = [0 for p in kernel.params if p.is_map]
        calls[algorithm] = functools.partial(function, *tensors, *offsets)
    seconds = best(list(calls.values()), target.threads)
    return dict(zip(calls, zip(seconds, compiling, strict=True), strict=True))


def time_torch(layer: Layer, batch: int, target: CpuTarget) -> float:
    import torch

    torch.set_num_threads(target.threads)
    random = functools.partial(torch.randn, dtype=getattr(torch, target.map_dtype))
    weight = random(layer.cout, layer.cin // layer.group, layer.kernel, layer.kernel)
    x = random(batch, layer.cin, layer.size, layer.size)
    dy = random(batch, layer.cout, layer.out, layer.out)
    x, dy, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy, weight))
    pad = layer.kernel // 2
    wanted = [layer.halves == 2, True, False]
    backward = torch.ops.aten.convolution_backward
    arguments = (dy, x, weight, None, [layer.stride] * 2, [pad] * 2, [1, 1], False, [0, 0], layer.group, wanted)
    return best([lambda: backward(*arguments)], target.threads)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--torch", action="store_true", help="time torch as well")
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--precision", default="fp32", choices=CPU_PRECISIONS)
    options = parser.parse_args()
    target = resolve("cpu", options.threads, options.precision)
    for layer in LAYERS:
        if options.only not in layer.name:
            continue
        gflop, line = layer.gflop(options.batch), f"{layer.name:22}"
        for name, (seconds, compiling) in time_kernels(layer, options.batch, target).items():
            rate = f"{gflop / seconds:6.1f} GFLOP/s {1e3 * seconds:7.2f} ms"
            line += f"  {name} {rate}, compiled in {compiling:.2f} s"
        if options.torch:
            line += f"  torch {gflop / time_torch(layer, options.batch, target):6.1f} GFLOP/s"
        print(line, flush=True)


if __name__ == "__main__":
    main()
