"""Sums between ranks by themselves, by size: what the fit of bandwidth and latency rests on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

SIZES = [1 << k for k in range(10, 27, 2)]  # bytes: 1 KiB to 64 MiB
IN_A_ROW, REPETITIONS, LEFT_OUT = 10, 7, 2  # the first repetitions are not counted


def in_a_graph(world: Any, sizes: list[int]) -> dict[int, float]:
    """Seconds of a sum on GPUs, of several behind each other in one CUDA graph: as a step has them, the host aside."""
    from bnfuse.parallel.nccl import Piece
    from bnfuse.runtime.backends.cuda.calls import WIRE, Task
    from bnfuse.runtime.backends.cuda.driver import open_driver
    from bnfuse.runtime.backends.cuda.graph import Graph

    driver, found = open_driver(world.device), {}
    with driver.active():
        stream, side = driver.new_stream(), driver.new_urgent_stream()
        address = driver.allocate(max(sizes), "what is summed")
        driver.zero(address, max(sizes), stream)
        start, end = driver.new_event(timing=True), driver.new_event(timing=True)
        for size in sizes:
            piece = Piece(address, size // 4)
            one = Task("backward", ((WIRE,),), exchange=lambda on, held=piece: world.enqueue_sums([held], on))
            graph, times = Graph(driver, [one] * IN_A_ROW, side), []
            for _ in range(REPETITIONS):
                driver.record(start, stream)
                graph.launch(stream)
                driver.record(end, stream)
                driver.wait_for(end)
                times.append(driver.seconds(start, end) / IN_A_ROW)
            found[size] = min(times[LEFT_OUT:])
        driver.synchronize(stream)
        driver.free(address)
    return found


def on_the_host(world: Any, sizes: list[int]) -> dict[int, float]:
    """Seconds of a sum of arrays of the host, each from when all ranks are there."""
    found = {}
    for size in sizes:
        array, times = np.zeros(size // 4, dtype=np.float32), []
        for _ in range(REPETITIONS):
            world.gather(b"")
            start = time.perf_counter()
            world.sum(array)
            times.append(time.perf_counter() - start)
        found[size] = min(times)
    return found
