"""How much of the shorter of both, computing and moving, a plain 1x1 convolution hides behind the other.

    time = compute + move - hidden * min(compute, move)

`compute` is the FLOPs at the rate of a wide 1x1 convolution, `move` the bytes at that of a chain of copies between
buffers of the same size, and the convolution runs in such a chain itself: each reads what the one before wrote, and
writes where nothing has been for long (runtime/codegen/limits.py). The memory model's choice for a host rests on it
(estimating/probe.py). Two threads.
"""

from __future__ import annotations

import numpy as np
import tvm

from bnfuse.runtime.backends.cpu.library import Library
from bnfuse.runtime.backends.cpu.measure import random_arguments
from bnfuse.runtime.backends.launching import launch
from bnfuse.runtime.backends.memory import aligned
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen.build import objects
from bnfuse.runtime.codegen.cache import Cache, default_folder
from bnfuse.runtime.codegen.limits import CHAIN, CHAIN_RUNS, chain_rates, gemm_rates, shortest
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.kernels.registry import CONV_FORWARD
from bnfuse.runtime.kernels.request import Request

THREADS, BATCH = 2, 16
SHAPES = ((56, 16), (56, 32), (56, 64), (28, 128), (28, 256))  # side of the map, channels in and out
ATTRIBUTES = (("dilations", (1, 1)), ("group", 1), ("kernel_shape", (1, 1)), ("pads", (0,) * 4), ("strides", (1, 1)))


def seconds(side: int, channels: int) -> float:
    """Of one convolution in a chain."""
    map_ = MapType(BATCH, side, side, channels, channels)
    problem = Problem("Conv", (("x", map_), ("y", map_)), ATTRIBUTES, (channels, channels, 1, 1))
    request = Request(CONV_FORWARD, (problem, resolve("cpu", THREADS)))
    kernel = request.kernel()
    convolve = Library([kernel.name], objects([request], Cache(default_folder()))).functions[0]
    arguments = random_arguments(kernel)
    x, y = (next(i for i, param in enumerate(kernel.params) if param.name == name) for name in ("x", "y"))
    size = BATCH * side * side * channels
    count = CHAIN // (4 * size)
    memory = aligned(4 * count * size).view("float32")
    memory[:] = 1.0
    buffers = [tvm.runtime.from_dlpack(part) for part in np.split(memory, count)]

    def run() -> None:
        for index in range(count):
            arguments[x], arguments[y] = buffers[index], buffers[(index + 1) % count]
            convolve(*arguments)

    return launch(THREADS, lambda: shortest(run, CHAIN_RUNS)) / count


def main() -> None:
    flops = gemm_rates(THREADS)["bnfuse convolution"]
    print(f"1x1 convolution {flops / 1e9:.0f} GFLOP/s")
    for side, channels in SHAPES:
        pixels = BATCH * side * side
        (bandwidth,) = chain_rates(THREADS, [4 * pixels * channels])
        compute, move = 2 * pixels * channels**2 / flops, 8 * pixels * channels / bandwidth
        took = seconds(side, channels)
        hidden = (compute + move - took) / min(compute, move)
        print(
            f"{channels:3} channels at {side}x{side}: {1e3 * took:.2f} ms, compute {1e3 * compute:.2f}, "
            f"move {1e3 * move:.2f} at {bandwidth / 1e9:.1f} GB/s, hidden {hidden:.2f}"
        )


if __name__ == "__main__":
    main()
