"""GFLOP/s of the forward convolution kernels on the shapes of DenseNet-121 and ResNet-50, next to torch channels_last.

Every algorithm that can do a shape has its column, that of the rule first; FLOPs are those of the direct one for all.

    python benchmarks/conv_kernels.py [--batch 16] [--threads 2] [--repeats 9] [--only PATTERN] [--cpu-time]
        [--precision bf16]

Ours run with prologue (a*x + b, ReLU) and statistics; torch runs the plain convolution alone. The candidates alternate
in one process; minimum and median are printed. On a machine that is busy with other things, wall time says little:
--cpu-time measures the processor time of one thread. With bf16 maps lie in 16 bits, weights of torch too. Needs the
extra `bench` (torch).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import tvm

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.memory import as_bits
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu.conv_forward import algorithms, conv_forward
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.targets.arch import CPU_PRECISIONS
from bnfuse.runtime.targets.target import CpuTarget

FUSED = "NormalizeReluConvStatistics"
Shape = tuple[str, str, int, int, int, int, int, int]  # name, op, size, cin, cout, window, stride, groups

SHAPES: list[Shape] = [
    *(("1x1", FUSED, size, cin, 128, 1, 1, 1) for size, cins in
      ((56, (64, 160, 224)), (28, (128, 288, 480)), (14, (256, 640, 992)), (7, (512, 768, 992))) for cin in cins),
    *(("3x3", FUSED, size, 128, 32, 3, 1, 1) for size in (56, 28, 14, 7)),
    ("transition", FUSED, 56, 256, 128, 1, 1, 1),
    ("transition", FUSED, 28, 512, 256, 1, 1, 1),
    ("transition", FUSED, 14, 1024, 512, 1, 1, 1),
    ("stem", "ConvStatistics", 224, 3, 64, 7, 2, 1),
    ("resnet", FUSED, 56, 64, 64, 3, 1, 1),
    ("resnet", FUSED, 28, 128, 128, 3, 1, 1),
    ("resnet", FUSED, 28, 128, 128, 3, 2, 1),
    ("resnet", FUSED, 14, 256, 256, 3, 1, 1),
    ("resnet", FUSED, 7, 512, 512, 3, 1, 1),
    ("resnet", FUSED, 7, 512, 2048, 1, 1, 1),
    ("downsample", FUSED, 56, 256, 512, 1, 2, 1),
    ("depthwise", FUSED, 56, 144, 144, 3, 1, 144),
    ("depthwise", FUSED, 28, 192, 192, 3, 2, 192),
    ("depthwise", FUSED, 14, 384, 384, 3, 1, 384),
    ("depthwise", FUSED, 56, 144, 144, 5, 1, 144),
    ("depthwise", FUSED, 56, 144, 144, 5, 2, 144),
    ("grouped", FUSED, 28, 128, 128, 3, 1, 32),
]  # fmt: skip


def problem(shape: Shape, batch: int, dtype: str) -> Problem:
    _, op, size, cin, cout, window, stride, groups = shape
    pad = window // 2
    out = (size + 2 * pad - window) // stride + 1
    maps = (("x", MapType(batch, size, size, cin, cin, dtype)), ("y", MapType(batch, out, out, cout, cout, dtype)))
    attributes = (
        ("dilations", (1, 1)),
        ("group", groups),
        ("kernel_shape", (window, window)),
        ("pads", (pad,) * 4),
        ("strides", (stride, stride)),
    )
    return Problem(op, maps, attributes, (cout, cin // groups, window, window))


def ours(p: Problem, target: CpuTarget, algorithm: str) -> Callable[[], None]:
    kernel = conv_forward(p, target, algorithm)
    function = execute.compile_kernel(kernel)
    rng = np.random.default_rng(0)
    tensors = []
    for param in kernel.params:
        array = execute.aligned(param.elements, param.dtype)
        array[...] = rng.standard_normal(param.elements, np.float32)
        tensors.append(tvm.runtime.from_dlpack(as_bits(array)))
    offsets = [0 for param in kernel.params if param.is_map]
    return lambda: function(*tensors, *offsets)


def theirs(p: Problem) -> Callable[[], None]:
    x = p.map("x")
    dtype = getattr(torch, x.dtype)
    images = torch.randn(x.n, x.c, x.h, x.w, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(*p.weight, dtype=dtype).contiguous(memory_format=torch.channels_last)
    stride, pads, groups = p.attribute("strides"), p.attribute("pads")[:2], p.attribute("group")
    return lambda: torch.nn.functional.conv2d(images, weight, None, stride, pads, 1, groups)


def alternate(candidates: list[Callable[[], None]], repeats: int, clock: Callable[[], float]) -> Iterator[list[float]]:
    """Seconds of every run of each candidate, their runs interleaved."""
    times: list[list[float]] = [[] for _ in candidates]
    for repeat in range(repeats + 1):
        for candidate, seconds in zip(candidates, times, strict=True):
            start = clock()
            candidate()
            if repeat:
                seconds.append(clock() - start)
    yield from times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="a regular expression for the line's name")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread")
    parser.add_argument("--precision", default="fp32", choices=CPU_PRECISIONS)
    arguments = parser.parse_args()
    threads = 1 if arguments.cpu_time else arguments.threads
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    target = resolve("cpu", threads, arguments.precision)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    print(f"{target}; load {os.getloadavg()[0]:.1f}; GFLOP/s from the minimum (median)")
    for shape in SHAPES:
        name, _, size, cin, cout, window, stride, groups = shape
        label = f"{name} {size}x{size} {cin}->{cout} {window}x{window}/{stride} g{groups}"
        if not re.search(arguments.only, label):
            continue
        p = problem(shape, arguments.batch, target.map_dtype)
        flops = 2 * p.map("y").pixels * np.prod(p.weight) / 1e9
        candidates = {name: ours(p, target, name) for name in algorithms(p, target)} | {"torch": theirs(p)}
        times = alternate(list(candidates.values()), arguments.repeats, clock)
        rates = [
            f"{name} {flops / min(seconds):6.1f} ({flops / statistics.median(seconds):6.1f})"
            for name, seconds in zip(candidates, times, strict=True)
        ]
        print(f"{label:40} {'   '.join(rates)}", flush=True)


if __name__ == "__main__":
    main()
