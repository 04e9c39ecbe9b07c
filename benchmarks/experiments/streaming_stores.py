"""Do stores past the caches pay for the large y of a dense convolution, which the next launch reads?

    python benchmarks/experiments/streaming_stores.py [--batch 16] [--repeats 15]

The 1x1 and the 3x3 convolution of DenseNet's first block (y is 56 x 56 x 128), its stem and pooling (112 x 112 x 64):
the first kernel with stores as usual and past the caches, alone and with the launch that reads y, on two threads. The
caches are swept before each run, which is not timed. The finding: docs/decisions.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu import stream, tir
from bnfuse.runtime.kernels.cpu.conv_forward import ConvNest, Part, conv_forward
from bnfuse.runtime.kernels.cpu.nest import MicroTile, Place, cut
from bnfuse.runtime.kernels.cpu.pool import pool_forward
from bnfuse.runtime.kernels.cpu.tiles import choose_tiles, conv_shape, flatten
from bnfuse.runtime.kernels.cpu.tir import Buffer, span
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Problem
from bnfuse.runtime.targets.target import CpuTarget

SWEPT = 256 << 20  # bytes between two runs


class StreamingNest(ConvNest):
    """The product's nest without its prefetches of y, and with stores past the caches."""

    def prefetch_output(self, place: Place, part: Part, micro: MicroTile) -> None:
        pass

    def work(self, thread: Any) -> None:
        super().work(thread)
        stream.fence()

    def finish(self, place: Place, part: Part, micro: MicroTile, accumulators: Buffer) -> None:
        for start, lanes in cut(self.width, self.lanes):
            channel = part.block * self.width + start
            values = [accumulators[span(p * self.width + start, lanes)] for p in range(micro.pixels)]
            for pixel, value in zip(place.output_pixels(micro, self.shape), values, strict=True):
                stream.stream(self.y.buffer, self.y.at(pixel, channel), value, lanes)
            self.partials.add(place.thread, channel, values, lanes)


def streaming(p: Problem, target: CpuTarget) -> Kernel:
    """The kernel of a convolution with statistics, without bias, of whole vectors of output channels."""
    usual, shape = conv_forward(p, target, "direct"), flatten(conv_shape(p))

    def build() -> Any:
        with tir.function(usual.name, usual.params) as arguments, stream.streaming(target.lanes):
            StreamingNest(p, target, arguments, shape, choose_tiles(shape, target)).emit()
        return arguments.result

    return dataclasses.replace(usual, build=build)


def conv(op: str, x: MapType, cout: int, window: int, stride: int, out: int) -> Problem:
    attributes = (
        ("dilations", (1, 1)), ("group", 1), ("kernel_shape", (window,) * 2), ("pads", (window // 2,) * 4),
        ("strides", (stride,) * 2),
    )  # fmt: skip
    y = MapType(x.n, out, out, cout, cout)
    return Problem(op, (("x", x), ("y", y)), attributes, (cout, x.c, window, window))


def max_pool(x: MapType) -> Problem:
    y = MapType(x.n, x.h // 2, x.w // 2, x.c, x.c)
    attributes = (
        ("ceil_mode", 0), ("dilations", (1, 1)), ("kernel_shape", (3, 3)), ("pads", (1,) * 4), ("strides", (2, 2)),
    )  # fmt: skip
    return Problem("NormalizeReluMaxPool", (("x", x), ("y", y), ("indices", y)), attributes)


def bound(kernel: Kernel, given: dict[str, np.ndarray]) -> Callable[[], Any]:
    """A call of a kernel on `given` arrays; the others are drawn."""
    rng = np.random.default_rng(0)
    tensors = []
    for param in kernel.params:
        array = given.get(param.name)
        if array is None:
            array = execute.aligned(param.elements, param.dtype)
            if param.access == "in":
                array[...] = rng.standard_normal(param.elements, np.float32)
        tensors.append(tvm.runtime.from_dlpack(array))
    function, offsets = execute.compile_kernel(kernel), [0 for param in kernel.params if param.is_map]
    return lambda: function(*tensors, *offsets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    target, n = resolve("cpu", 2), arguments.batch
    if target.lanes not in stream.X86_LANES:
        parser.exit(1, "stores past the caches are made for x86 with AVX2 or AVX-512 only\n")
    middle, wide = MapType(n, 56, 56, 128, 128), MapType(n, 112, 112, 64, 64)
    fused = "NormalizeReluConvStatistics"
    pairs = {
        "1x1 128 -> 128 at 56x56, then 3x3": (conv(fused, middle, 128, 1, 1, 56), conv(fused, middle, 32, 3, 1, 56)),
        "stem 7x7/2 3 -> 64 at 112x112, then pooling":
            (conv("ConvStatistics", MapType(n, 224, 224, 3, 3), 64, 7, 2, 112), max_pool(wide)),
    }  # fmt: skip
    scratch = np.zeros(SWEPT // 4, np.float32)
    for label, (first, second) in pairs.items():
        y = execute.aligned(first.map("y").elements)
        reads = bound((pool_forward if not second.weight else conv_forward)(second, target), {"x": y})
        ways = {"usual": conv_forward(first, target, "direct"), "streamed": streaming(first, target)}
        writes = {way: bound(kernel, {"y": y}) for way, kernel in ways.items()}
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        results = {}
        for _ in range(arguments.repeats):
            for way, write in writes.items():
                scratch += 1
                start = time.perf_counter()
                write()
                middle_time = time.perf_counter()
                reads()
                times[way].append((middle_time - start, time.perf_counter() - start))
                results[way] = float(y[:: 1 << 10].sum())
        assert len(set(results.values())) == 1, f"the kernels do not agree: {results}"
        print(f"{label}: {y.nbytes / 1e6:.0f} MB, ms (median)")
        for way, found in times.items():
            alone, both = ([1e3 * run[i] for run in found] for i in (0, 1))
            print(
                f"    {way:9} alone {min(alone):6.2f} ({statistics.median(alone):6.2f})"
                f"   with its reader {min(both):6.2f} ({statistics.median(both):6.2f})"
            )


if __name__ == "__main__":
    main()
