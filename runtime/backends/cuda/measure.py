"""Times of the candidates of a problem on the GPU, for tuning (runtime/codegen/tuning.py). Needs their code, no
compiler.

A candidate is launched several times by one CUDA graph, its stages one after the other, and the graph is timed between
two events: what launching costs the host is not in it. All candidates work on the same buffers, so that what of a
problem fits the GPU's cache is in there for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cuda.driver import Arguments, Call, Driver, Handle, Stream, open_driver
from bnfuse.runtime.backends.turns import shortest_times
from bnfuse.runtime.kernels.cuda import container
from bnfuse.runtime.kernels.cuda.container import BUFFER, Code
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.program import program as p

LAUNCHES = 10  # of a candidate in its graph
BLOCK = 1 << 16  # random numbers that a buffer repeats
FLOATS = ("float32", "bfloat16", "float16")


def fastest_times(kernels: Sequence[Kernel], codes: Sequence[bytes]) -> list[float]:
    """Seconds of the fastest launch of each kernel, all its stages, on the GPU of this thread."""
    unpacked = [container.unpack(code, kernel.name) for kernel, code in zip(kernels, codes, strict=True)]
    return times_of([kernel.params for kernel in kernels], unpacked, open_driver())


def times_of(parameters: Sequence[Sequence[Param]], codes: Sequence[Code], driver: Driver) -> list[float]:
    """Time codes, each with the buffers that it takes: those of one name are one, as large as the largest."""
    with driver.active(), contextlib.ExitStack() as held:
        stream = driver.new_stream()
        let_go(held, driver.destroy_stream, stream)
        addresses = fill_buffers(driver, widest(parameters), stream, held)
        graphs = [graph_of(driver, code, addresses, held) for code in codes]
        events = driver.new_event(timing=True), driver.new_event(timing=True)
        for event in events:
            let_go(held, driver.destroy_event, event)
        for graph in graphs:  # the first run of each brings its code to the GPU
            driver.launch_graph(graph, stream)
        driver.synchronize(stream)
        return shortest_times([timer(driver, graph, events, stream) for graph in graphs])


def timer(driver: Driver, graph: Handle, events: tuple[Handle, Handle], stream: Stream) -> Callable[[], float]:
    """Make a function that runs a graph and gives the seconds of one of its launches."""
    start, end = events

    def run() -> float:
        driver.record(start, stream)
        driver.launch_graph(graph, stream)
        driver.record(end, stream)
        driver.wait_for(end)
        return driver.seconds(start, end) / LAUNCHES

    return run


def widest(parameters: Iterable[Iterable[Param]]) -> list[Param]:
    """Each parameter once, the largest of its name: candidates differ in their scratch memory."""
    found: dict[str, Param] = {}
    for param in (param for params in parameters for param in params):
        if param.name not in found or param.elements > found[param.name].elements:
            found[param.name] = param
    return list(found.values())


def fill_buffers(driver: Driver, params: Sequence[Param], stream: Stream, held: contextlib.ExitStack) -> dict[str, int]:
    """Addresses by name: random floats where something is read, zeros elsewhere."""
    some = np.random.default_rng(0).standard_normal(BLOCK, np.float32)
    blocks = {dtype: some.astype(dtype) for dtype in FLOATS}  # kept until the copies are done
    alone = np.zeros(p.HEADER, np.uint64)
    alone[p.STOP] = 1
    addresses = {}
    for param in params:
        size = param.elements * np.dtype(param.dtype).itemsize
        address = addresses[param.name] = driver.allocate(size, f"{param.name} of a kernel to be measured")
        let_go(held, driver.free, address)
        if param.dtype in FLOATS and param.access != "out":
            repeat(driver, blocks[param.dtype], address, size, stream)
        elif is_header(param):
            driver.copy_in(address, alone.ctypes.data, size, stream)
        elif size:
            driver.zero(address, size, stream)
    driver.synchronize(stream)
    return addresses


def is_header(param: Param) -> bool:
    """Tell whether a parameter is the header of an exchange between ranks. Here is one alone: it has given up, and so
    waits for nobody."""
    return param.dtype == "uint64" and param.access == "in"


def repeat(driver: Driver, block: np.ndarray, address: int, size: int, stream: Stream) -> None:
    """Fill memory of the device with copies of a block: the first from the host, then what is there already."""
    done = min(block.nbytes, size)
    driver.copy_in(address, block.ctypes.data, done, stream)
    while done < size:
        step = min(done, size - done)
        driver.copy(address + done, address, step, stream)
        done += step


def graph_of(driver: Driver, code: Code, addresses: dict[str, int], held: contextlib.ExitStack) -> Handle:
    """Make an executable graph of some launches, each stage behind the one before."""
    module = driver.load(code.cubin, code.arch, code.stages[0].symbol)
    let_go(held, driver.unload, module)
    calls = calls_of(driver, module, code, addresses)
    graph = driver.new_graph()
    let_go(held, driver.destroy_graph, graph)
    after: list[Handle] = []
    for call in calls * LAUNCHES:
        after = [driver.add_kernel(graph, after, call)]
    executable = driver.instantiate(graph)
    let_go(held, driver.destroy_executable, executable)
    return executable


def calls_of(driver: Driver, module: Handle, code: Code, addresses: dict[str, int]) -> list[Call]:
    """List the stages with their arguments. Maps begin at their buffers' beginnings, scalars are zero."""
    kinds = dict(code.parameters)
    calls = []
    for stage in code.stages:
        arguments = Arguments([kinds[name] for name in stage.arguments])
        for index, name in enumerate(stage.arguments):
            arguments.set(index, addresses[name] if kinds[name] == BUFFER else 0)
        function = driver.function(module, stage.symbol, stage.shared)
        calls.append(Call(function, stage.grid, stage.threads, stage.shared, arguments))
    return calls


def let_go(held: contextlib.ExitStack, release: Callable[[Any], None], what: Any) -> None:
    """Release something in the end. Where the GPU has failed that fails too, and must not hide the first error."""

    def quietly() -> None:
        with contextlib.suppress(BnfuseError):
            release(what)

    held.callback(quietly)
