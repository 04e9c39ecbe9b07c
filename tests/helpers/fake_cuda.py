"""A stand-in for cuda.bindings.driver: device memory is memory of the host, device kernels are Python functions.

What is enqueued runs at once; a graph runs its nodes in a random one of the orders that its edges allow: an edge
that is missing shows. Kernels are looked up by their symbol: `fake.kernels[symbol] = FakeKernel(types, call)`, where
`call(*values)` gets addresses for buffers. `fake.log` has the names of all calls, `fake.launched` the symbols that ran.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as real

from bnfuse.runtime.backends.cuda import driver as own
from bnfuse.runtime.kernels.cuda import container

OK = real.CUresult.CUDA_SUCCESS
NOT_CAPTURED = {  # while a stream is captured, by one thread and with torch's default mode
    *("cuMemAlloc", "cuMemAllocHost", "cuMemFree", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuLaunchKernel"),
    *(
        "cuStreamSynchronize",
        "cuStreamQuery",
        "cuEventSynchronize",
        "cuEventQuery",
        "cuEventRecord",
        "cuStreamWaitEvent",
    ),
    "cuGraphLaunch",
}


@dataclasses.dataclass(frozen=True)
class FakeKernel:
    types: tuple[str, ...]
    call: Callable[..., None]


@dataclasses.dataclass
class Node:
    after: list[int]
    run: Callable[[], None]
    symbol: str  # "copy" for a copy
    values: tuple[Any, ...]
    early: list[int] = dataclasses.field(default_factory=list)  # of `after`, the kernels that it waits for itself


class FakeCuda:
    """The functions of the bindings that `Driver` calls. `fail[name]` is the error that a function answers with."""

    CUDA_KERNEL_NODE_PARAMS = real.CUDA_KERNEL_NODE_PARAMS
    CUDA_MEMCPY3D = real.CUDA_MEMCPY3D
    CUdevice_attribute = real.CUdevice_attribute
    CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = real.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
    CUgraphDependencyType = real.CUgraphDependencyType
    CUgraphEdgeData = real.CUgraphEdgeData
    CUevent_flags = real.CUevent_flags
    CUfunction_attribute = real.CUfunction_attribute
    CUmemorytype = real.CUmemorytype
    CUipcMemHandle = real.CUipcMemHandle
    CUstream_flags = real.CUstream_flags
    CUstreamCaptureMode = real.CUstreamCaptureMode
    CUstreamUpdateCaptureDependencies_flags = real.CUstreamUpdateCaptureDependencies_flags

    def __init__(self, arch: str = "sm_90", memory: int = 1 << 30, seed: int = 0, gpus: int = 1) -> None:
        self.gpus = gpus
        self.major, self.minor = int(arch[3:-1]), int(arch[-1])
        self.memory, self.rng = memory, random.Random(seed)
        self.kernels: dict[str, FakeKernel] = {}
        self.served: dict[tuple[bytes, str], FakeKernel] = {}  # by cubin too: names of kernels are not unique
        self.modules: dict[int, bytes] = {}
        self.fail: dict[str, Any] = {}
        self.log: list[str] = []
        self.launched: list[str] = []
        self.updates: list[str] = []  # symbols of nodes that got new arguments
        self.waits: list[tuple[int, int]] = []  # stream, and the stream that it waits for
        self.blocks: dict[int, Any] = {}  # device memory by address
        self.host_blocks: dict[int, Any] = {}
        self.functions: dict[int, tuple[str, FakeKernel]] = {}
        self.shared: dict[str, int] = {}
        self.graphs: dict[int, list[Node]] = {}
        self.executables: dict[int, list[Node]] = {}
        self.events: dict[int, int] = {}
        self.captures: dict[int, tuple[int, list[int]]] = {}  # by stream: its graph, and what the next node waits for
        self.contexts: list[int] = []
        self._handles = itertools.count(0x1000)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> Any:
            self.log.append(name)
            if self.captures and name in NOT_CAPTURED:
                return (real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
            return (self.fail[name],) if name in self.fail else found(*arguments)

        return call

    # -- for tests ---------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        return sum(ctypes.sizeof(block) for block in self.blocks.values())

    def count(self, name: str) -> int:
        return Counter(self.log)[name]

    def serve(self, codes: Iterable[bytes], make: Callable[[int, int], Callable[..., None]]) -> None:
        """The device kernels of compiled kernels. `make` gives the function of a stage, both by index."""
        for kernel, code in enumerate(codes):
            found = container.unpack(code, str(kernel))
            types = dict(found.parameters)
            for index, stage in enumerate(found.stages):
                kinds = tuple(types[argument] for argument in stage.arguments)
                self.served[found.cubin, stage.symbol] = FakeKernel(kinds, make(kernel, index))

    def begin_capture(self, stream: int) -> int:
        """As torch does around what it captures. Gives the graph."""
        graph = next(self._handles)
        self.graphs[graph] = []
        self.captures[stream] = graph, []
        return graph

    def end_capture(self, stream: int) -> Callable[[], None]:
        """Give what replays the graph."""
        graph, is_joined = self._end(stream)
        assert is_joined, "what is captured next would not wait for all of it"
        nodes = list(self.graphs[graph])
        return lambda: self._run(nodes)

    def _end(self, stream: int) -> tuple[int, bool]:
        """The graph, and whether the stream would wait for all of it."""
        graph, last = self.captures.pop(stream)
        nodes = self.graphs[graph]
        ends = set(range(len(nodes))) - {before for node in nodes for before in node.after}
        return graph, ends == set(last)

    def enqueue(self, stream: int, run: Callable[[], None], symbol: str) -> None:
        """As a library does that launches kernels of its own: now, or as a node of the graph that is captured."""
        self._check_context()

        def launch() -> None:
            self.launched.append(symbol)
            run()

        if stream not in self.captures:
            assert not self.captures, "while a stream is captured, nothing runs on another one"
            launch()
            return
        graph, after = self.captures[stream]
        node = self._add(graph, Node(list(after), launch, symbol, ()), len(after))
        self.captures[stream] = graph, [node]

    # -- the bindings ------------------------------------------------------------------------------------------

    def cuInit(self, flags: int) -> Any:
        return (OK,)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return OK, ordinal

    def cuDeviceGetCount(self) -> Any:
        return OK, self.gpus

    def cuDeviceGetUuid(self, device: int) -> Any:
        return OK, types.SimpleNamespace(bytes=bytes([device]) * 16)

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.contexts[-1:] = [context]
        return (OK,)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return OK, 7 + device

    def cuDeviceGetName(self, size: int, device: int) -> Any:
        return OK, b"Fake GPU\0\0"

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> Any:
        names = {"MAJOR": self.major, "MINOR": self.minor, "MULTIPROCESSOR_COUNT": 132, "OPTIN": 232448}
        return OK, next(value for end, value in names.items() if attribute.name.endswith(end))

    def cuCtxGetCurrent(self) -> Any:
        return OK, self.contexts[-1] if self.contexts else 0

    def cuCtxGetDevice(self) -> Any:
        return OK, self.contexts[-1] - 7

    def cuCtxPushCurrent(self, context: int) -> Any:
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> Any:
        return OK, self.contexts.pop()

    def cuMemAlloc(self, size: int) -> Any:
        if self.used + size > self.memory:
            return (real.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        address = self._allocate(self.blocks, size)
        ctypes.memset(address, 0xFF, size)  # NaNs: nothing may be read that was not written
        return OK, address

    def _allocate(self, blocks: dict[int, Any], size: int) -> int:
        raw = (ctypes.c_uint8 * (size + 256))()
        address = -(-ctypes.addressof(raw) // 256) * 256
        block = (ctypes.c_uint8 * size).from_buffer(raw, address - ctypes.addressof(raw))
        blocks[address] = block
        return address

    def cuMemGetInfo(self) -> Any:
        return OK, self.memory - self.used, self.memory

    def cuMemFree(self, address: int) -> Any:
        del self.blocks[address]
        return (OK,)

    def cuIpcGetMemHandle(self, address: int) -> Any:
        self._check_context()
        handle = real.CUipcMemHandle()
        ctypes.memmove(int(handle.getPtr()), address.to_bytes(64, "little"), 64)
        return OK, handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> Any:
        assert flags == real.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return OK, int.from_bytes(ctypes.string_at(int(handle.getPtr()), 64), "little")

    def cuMemAllocHost(self, size: int) -> Any:
        return OK, self._allocate(self.host_blocks, size)

    def cuMemFreeHost(self, address: int) -> Any:
        del self.host_blocks[address]
        return (OK,)

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> Any:
        self._check_context()
        ctypes.memset(address, value, size)
        return (OK,)

    def _copy(self, target: int, source: int, size: int, stream: int) -> Any:
        self._check_context()
        ctypes.memmove(target, source, size)
        return (OK,)

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = _copy

    def _check_context(self) -> None:
        assert self.contexts, "no context is current"

    def cuStreamCreate(self, flags: int) -> Any:
        return OK, next(self._handles)

    def cuCtxGetStreamPriorityRange(self) -> Any:
        return OK, 0, -5

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        assert priority == -5
        return OK, next(self._handles)

    def cuStreamQuery(self, stream: int) -> Any:
        return (OK,)

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> Any:
        assert mode == real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.begin_capture(stream)
        return (OK,)

    def cuStreamEndCapture(self, stream: int) -> Any:
        graph, is_joined = self._end(stream)
        return (OK, graph) if is_joined else (real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED,)

    def cuStreamDestroy(self, stream: int) -> Any:
        return (OK,)

    def cuStreamSynchronize(self, stream: int) -> Any:
        self._check_context()
        return (OK,)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:
        self.waits.append((stream, self.events[event]))
        return (OK,)

    def cuStreamIsCapturing(self, stream: int) -> Any:
        return OK, int(stream in self.captures)

    def cuStreamGetCaptureInfo(self, stream: int) -> Any:
        graph, nodes = self.captures[stream]
        return OK, 1, 1, graph, list(nodes), [], len(nodes)

    def cuStreamUpdateCaptureDependencies(
        self, stream: int, nodes: list[int], edges: Any, count: int, flags: int
    ) -> Any:
        assert len(nodes) == count and flags == 1 and edges is None
        self.captures[stream] = self.captures[stream][0], list(nodes)
        return (OK,)

    def cuEventCreate(self, flags: int) -> Any:
        event = next(self._handles)
        self.events[event] = -1
        return OK, event

    def cuEventDestroy(self, event: int) -> Any:
        del self.events[event]
        return (OK,)

    def cuEventRecord(self, event: int, stream: int) -> Any:
        self.events[event] = stream
        return (OK,)

    def cuEventSynchronize(self, event: int) -> Any:
        assert event in self.events
        return (OK,)

    def cuEventQuery(self, event: int) -> Any:
        return (OK,)

    def cuEventElapsedTime(self, start: int, end: int) -> Any:
        return OK, 0.5

    def cuModuleLoadData(self, cubin: bytes) -> Any:
        module = next(self._handles)
        self.modules[module] = cubin
        return OK, module

    def cuModuleUnload(self, module: int) -> Any:
        return (OK,)

    def cuModuleGetFunction(self, module: int, symbol: bytes) -> Any:
        name = symbol.decode()
        kernel = self.served.get((self.modules.get(module, b""), name)) or self.kernels.get(name)
        if kernel is None:
            return (real.CUresult.CUDA_ERROR_NOT_FOUND,)
        function = next(self._handles)
        self.functions[function] = name, kernel
        return OK, function

    def cuFuncSetAttribute(self, function: int, attribute: Any, value: int) -> Any:
        self.shared[self.functions[function][0]] = value
        return (OK,)

    def cuLaunchKernel(self, function: int, *rest: Any) -> Any:
        parameters = rest[-2]
        self._kernel(function, parameters, []).run()
        return (OK,)

    def _kernel(self, function: int, parameters: int, after: Sequence[int]) -> Node:
        """A node with its arguments as they are now."""
        self._check_context()
        symbol, kernel = self.functions[function]
        pointers = (ctypes.c_void_p * max(len(kernel.types), 1)).from_address(parameters)
        kinds = [own.CTYPES[kind] for kind in kernel.types]
        values = tuple(kind.from_address(pointers[i]).value for i, kind in enumerate(kinds))

        def run() -> None:
            self.launched.append(symbol)
            kernel.call(*values)

        return Node(list(after), run, symbol, values)

    def cuGraphCreate(self, flags: int) -> Any:
        graph = next(self._handles)
        self.graphs[graph] = []
        return OK, graph

    def cuGraphDestroy(self, graph: int) -> Any:
        del self.graphs[graph]
        return (OK,)

    def cuGraphAddKernelNode(self, graph: int, after: list[int], count: int, node: Any) -> Any:
        return OK, self._add(graph, self._kernel(int(node.func), node.kernelParams, after), count)

    def cuGraphAddMemcpyNode(self, graph: int, after: list[int], count: int, node: Any, context: int) -> Any:
        assert node.Height == node.Depth == 1
        values = int(node.dstDevice), int(node.srcDevice), int(node.WidthInBytes)
        return OK, self._add(graph, Node(list(after), lambda: self._copy(*values, 0) and None, "copy", values), count)

    def cuGraphAddDependencies(self, graph: int, sources: list[int], targets: list[int], edges: Any, count: int) -> Any:
        """Edges of kernels that wait themselves: both ends are kernels, and no edge is there twice."""
        assert len(sources) == len(targets) == len(edges) == count
        nodes = self.graphs[graph]
        for source, target, edge in zip(sources, targets, edges, strict=True):
            assert edge.from_port == self.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
            assert edge.type == self.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
            assert nodes[source].symbol != "copy" != nodes[target].symbol and source not in nodes[target].after
            nodes[target].after.append(source)
            nodes[target].early.append(source)
        return (OK,)

    def _add(self, graph: int, node: Node, count: int) -> int:
        assert len(set(node.after)) == len(node.after) == count
        self.graphs[graph].append(node)
        return len(self.graphs[graph]) - 1

    def cuGraphInstantiate(self, graph: int, flags: int) -> Any:
        executable = next(self._handles)
        self.executables[executable] = list(self.graphs[graph])
        return OK, executable

    def cuGraphExecDestroy(self, executable: int) -> Any:
        del self.executables[executable]
        return (OK,)

    def cuGraphExecKernelNodeSetParams(self, executable: int, node: int, params: Any) -> Any:
        former = self.executables[executable][node]
        self.executables[executable][node] = self._kernel(int(params.func), params.kernelParams, former.after)
        self.updates.append(former.symbol)
        return (OK,)

    def cuGraphLaunch(self, executable: int, stream: int) -> Any:
        """In a random order that the edges allow."""
        self._check_context()
        self._run(self.executables[executable])
        return (OK,)

    def _run(self, nodes: Sequence[Node]) -> None:
        waiting, done = set(range(len(nodes))), set[int]()
        while waiting:
            ready = [index for index in sorted(waiting) if done.issuperset(nodes[index].after)]
            chosen = self.rng.choice(ready)
            nodes[chosen].run()
            waiting.remove(chosen)
            done.add(chosen)


def floats(address: int, count: int, dtype: str = "float32") -> np.ndarray:
    """Elements of device memory, as a view."""
    raw: Any = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)


def install(monkeypatch: pytest.MonkeyPatch, fake: Any) -> Any:
    """Put a fake in the place of the bindings."""
    monkeypatch.setattr(own, "bindings", lambda: fake)
    own._driver.cache_clear()
    monkeypatch.setattr(own, "_driver", own.functools.cache(own._driver.__wrapped__))
    return fake
