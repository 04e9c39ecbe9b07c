"""Times of the candidates of a problem on this CPU, for tuning (runtime/codegen/tuning.py)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm

from bnfuse.runtime.backends.cpu.library import Library
from bnfuse.runtime.backends.launching import launch
from bnfuse.runtime.backends.memory import BFLOAT16, aligned, as_bits
from bnfuse.runtime.backends.turns import shortest_times
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets.target import CpuTarget


def fastest_times(kernels: Sequence[Kernel], codes: Sequence[bytes]) -> list[float]:
    """Seconds of the fastest run of each kernel, in turns, on one set of buffers of random numbers.

    All take the same parameters.
    """
    target = kernels[0].target
    assert isinstance(target, CpuTarget)
    library = Library([kernel.name for kernel in kernels], codes)
    arguments = random_arguments(kernels[0])

    def timed(function: Callable[..., Any]) -> float:
        begin = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - begin

    def in_turns() -> list[float]:
        for function in library.functions:
            function(*arguments)
        return shortest_times([functools.partial(timed, function) for function in library.functions])

    return list(launch(target.threads, in_turns))


def random_arguments(kernel: Kernel) -> list[Any]:
    """Buffers of their real sizes, then offsets of zero."""
    some = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    buffers = []
    for param in kernel.params:
        buffer = aligned(param.elements * np.dtype(param.dtype).itemsize).view(param.dtype)
        if buffer.dtype in (np.float32, BFLOAT16):
            buffer[:] = np.resize(some, param.elements)
        buffers.append(tvm.runtime.from_dlpack(as_bits(buffer)))
    return [*buffers, *(0 for param in kernel.params if param.is_map)]
