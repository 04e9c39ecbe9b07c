"""What the machine could do at best, measured with our own kernels: the limits that a profile compares with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm

from bnfuse.runtime.backends.cpu.backend import CpuBackend
from bnfuse.runtime.backends.cpu.library import Library
from bnfuse.runtime.backends.cpu.measure import random_arguments
from bnfuse.runtime.backends.launching import launch
from bnfuse.runtime.backends.memory import aligned
from bnfuse.runtime.codegen.build import objects
from bnfuse.runtime.codegen.cache import Cache, default_folder
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.dense import GemmProblem
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.kernels.request import Request
from bnfuse.runtime.lowering.work import work_of
from bnfuse.runtime.targets.target import CpuTarget

RUNS = 7
CHAIN_RUNS = 3
CHAIN = 512 << 20  # bytes of all buffers of a chain: more than most caches hold


def gemm_rates(threads: int) -> dict[str, float]:
    """FLOP/s of our matrix product and of our plain 1x1 convolution, both of sizes at which they do best."""
    target = CpuBackend().resolve(threads=threads)
    x = MapType(16, 28, 28, 512, 512)
    attributes = (
        ("dilations", (1, 1)),
        ("group", 1),
        ("kernel_shape", (1, 1)),
        ("pads", (0,) * 4),
        ("strides", (1, 1)),
    )
    conv = Problem("Conv", (("x", x), ("y", x)), attributes, (512, 512, 1, 1))
    requests = {
        "bnfuse gemm": Request(registry.GEMM, (GemmProblem(1536, 1536, 1536), target)),
        "bnfuse convolution": Request(registry.CONV_FORWARD, (conv, target)),
    }
    return {name: rate(request, target, "flops") for name, request in requests.items()}


def copy_rate(threads: int, elements: int = 1 << 26) -> float:
    """Bytes a second, read and written, of a copy between arrays of 256 MiB: more than most caches hold."""
    target = CpuBackend().resolve(threads=threads)
    return rate(Request(registry.COPY, (elements, target, "float32")), target, "bytes")


def chain_rates(threads: int, sizes: Sequence[int]) -> list[float]:
    """Bytes a second of a chain of copies between buffers of so many bytes, for each size.

    As in a chain of layers, each copy reads what the one before wrote, and writes where nothing has been for long. A
    cache that is large enough saves the reading; what is written it has to fetch first, and to write out some time.
    """
    target = CpuBackend().resolve(threads=threads)
    memory = aligned(CHAIN).view("float32")
    memory[:] = 1.0
    requests = [Request(registry.COPY, (size // 4, target, "float32")) for size in sizes]
    codes = objects(requests, Cache(default_folder()))
    library = Library([request.kernel().name for request in requests], codes)
    found = []
    for size, copy in zip(sizes, library.functions, strict=True):
        count = CHAIN // size
        buffers = [tvm.runtime.from_dlpack(part) for part in np.split(memory[: count * size // 4], count)]
        pairs = list(zip(buffers, [*buffers[1:], buffers[0]], strict=True))

        def run(copy: Callable[..., object] = copy, pairs: list[tuple[Any, Any]] = pairs) -> None:
            for source, result in pairs:
                copy(source, result)

        found.append(2 * size * count / launch(threads, functools.partial(shortest, run, CHAIN_RUNS)))
    return found


def rate(request: Request, target: CpuTarget, of: str) -> float:
    """FLOPs or bytes of one launch by the shortest of some runs."""
    kernel = request.kernel()
    library = Library([kernel.name], objects([request], Cache(default_folder())))
    arguments = random_arguments(kernel)
    seconds: float = launch(target.threads, lambda: shortest(lambda: library.functions[0](*arguments)))
    return float(getattr(work_of(kernel), of)) / seconds


def shortest(run: Callable[[], object], runs: int = RUNS) -> float:
    """Seconds, after a first run that does not count."""
    run()
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)
