"""The calls of NVIDIA's driver that a step needs, typed, and with errors in one line.

A `Driver` stands for one GPU and its primary context, which torch and cupy use too: they see our memory and we see
theirs. Handles are what the bindings return; addresses are ints.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from bnfuse.core.errors import BnfuseError
from bnfuse.core.nvidia import REMEDY, bindings, start, unusable
from bnfuse.core.text import scaled
from bnfuse.runtime.targets import arch

FREE_SHARED = 48 << 10  # bytes of dynamic shared memory that a kernel has without asking

Handle = Any
Stream = int  # the address of a CUstream; 0 is the legacy default stream

CTYPES: dict[str, Any] = {
    "buffer": ctypes.c_uint64,
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}


class Arguments:
    """The arguments of one device kernel in memory that the driver reads from: a value a parameter, and where it is."""

    def __init__(self, types: Sequence[str]) -> None:
        self._values = [CTYPES[kind]() for kind in types]
        self._pointers = (ctypes.c_void_p * max(len(types), 1))(*(ctypes.addressof(v) for v in self._values))
        self.version = 0  # grows whenever a value changes
        self.is_late = False  # whether values change after the first ones

    def set(self, index: int, value: float) -> None:
        """One value, converted to the parameter's type."""
        slot = self._values[index]
        before = bytes(slot)
        slot.value = value if isinstance(slot, ctypes.c_float | ctypes.c_double) else int(value)
        self.version += bytes(slot) != before

    def __getitem__(self, index: int) -> Any:
        return self._values[index].value

    @property
    def address(self) -> int:
        """Give the address of the array of pointers that a launch takes."""
        return ctypes.addressof(self._pointers)


@dataclasses.dataclass(frozen=True)
class Call:
    """A device kernel with its launch and its arguments. `waits` as in its code (`container.Code`)."""

    function: Handle
    grid: tuple[int, int, int]
    threads: int
    shared: int
    arguments: Arguments
    waits: bool = False


def open_driver(ordinal: int | None = None) -> Driver:
    """Open the driver of a GPU by its number, else of the thread's current one, else of the first one.

    Raises BnfuseError where there is none. In a run of several ranks `ordinal` is the GPU that the world chose for this
    one; it is current in the thread that opened the world.
    """
    return _driver(_ordinal() if ordinal is None else ordinal)


def device_architecture() -> str | None:
    """Name the architecture of the GPU; None where there is no GPU, no driver or no package to reach it."""
    try:
        return open_driver().architecture
    except BnfuseError:
        return None


@functools.cache
def _driver(ordinal: int) -> Driver:
    return Driver(bindings(), ordinal)


def _ordinal() -> int:
    """Give the number of the current context's device."""
    cu = bindings()
    try:
        start(cu)
        error, context = cu.cuCtxGetCurrent()
        if int(error) or not int(context):
            return 0
        error, device = cu.cuCtxGetDevice()
        return 0 if int(error) else int(device)
    except RuntimeError as error:
        raise unusable(error) from None


class Driver:
    """One GPU. All methods but the constructor expect its context to be current: `with driver.active():`.

    `watch` is how the host waits where other ranks may be lost: it is called until what it is given says that the GPU
    is done, and may raise. Without it the driver waits, for ever if need be.
    """

    def __init__(self, cu: Any, ordinal: int = 0) -> None:
        self.cu, self.ordinal, self.process = cu, ordinal, os.getpid()
        self.watch: Callable[[Callable[[], bool]], None] | None = None
        self._handle = self._call("cuDeviceGet", ordinal)
        self.context = self._call("cuDevicePrimaryCtxRetain", self._handle)
        attribute = cu.CUdevice_attribute
        major = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.architecture = f"sm_{major}{minor}"
        self.multiprocessors = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.shared_limit = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        name = self._call("cuDeviceGetName", 256, self._handle)
        self.name = name.split(b"\0")[0].decode(errors="replace")

    # -- errors ------------------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the bindings and give what it returns behind its error code."""
        error, *found = self._try(name, *arguments)
        if int(error) != 0:
            self._fail(name, error)
        return found[0] if len(found) == 1 else (tuple(found) or None)

    def _try(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.cu, name)(*arguments)
        except RuntimeError as error:
            raise unusable(error) from None
        except AttributeError:
            raise BnfuseError(f"this cuda-bindings has no {name}: {REMEDY}") from None

    def _fail(self, name: str, error: Any) -> NoReturn:
        if "STREAM_CAPTURE" in error.name:
            raise BnfuseError(
                f"{name} is nothing for a stream that is captured into a CUDA graph ({error.name}): run the step on "
                "that stream before the capture, with the same kinds of inputs, and read output_views() in it"
            )
        raise BnfuseError(f"the GPU ({self.name_or_number}) fails in {name}: {error.name}")

    @property
    def name_or_number(self) -> str:
        """Name the GPU as messages do."""
        return getattr(self, "name", f"device {self.ordinal}")

    def _attribute(self, attribute: Any) -> int:
        return int(self._call("cuDeviceGetAttribute", attribute, self._handle))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Our context is the thread's; afterwards the caller's is again. Raises in a forked child: it has no CUDA."""
        if self.process != os.getpid():
            raise BnfuseError(
                "a forked process cannot use the GPU of its parent: start it with multiprocessing's method spawn, and "
                "open the step there"
            )
        self._call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    # -- memory ------------------------------------------------------------------------------------------------

    def allocate(self, size: int, what: str) -> int:
        """Allocate memory and give its address. `what` is what a message calls it."""
        error, *found = self._try("cuMemAlloc", max(size, 1))
        if int(error) == 0:
            return int(found[0])
        if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
            self._fail("cuMemAlloc", error)
        free, total = self.memory_left()
        raise BnfuseError(
            f"the GPU's memory does not suffice: {what} takes {scaled(size, 'B')}, "
            f"{scaled(free, 'B')} of {scaled(total, 'B')} are free: use a smaller batch"
        )

    def memory_left(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def free(self, address: int) -> None:
        """Free memory that `allocate` gave."""
        self._call("cuMemFree", address)

    def zero(self, address: int, size: int, stream: Stream) -> None:
        """Enqueue the zeroing of so many bytes."""
        self._call("cuMemsetD8Async", address, 0, size, stream)

    def copy_in(self, target: int, source: int, size: int, stream: Stream) -> None:
        """From the host; `source` must stay until the stream has done it."""
        self._call("cuMemcpyHtoDAsync", target, source, size, stream)

    def copy_out(self, target: int, source: int, size: int, stream: Stream) -> None:
        """To memory of the host that the GPU reaches by a detour: the call itself waits for the stream."""
        self._await(stream)
        self._call("cuMemcpyDtoHAsync", target, source, size, stream)

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Enqueue a copy of so many bytes within the device."""
        self._call("cuMemcpyDtoDAsync", target, source, size, stream)

    def allocate_host(self, size: int) -> int:
        """Host memory that the GPU copies from without a detour."""
        return int(self._call("cuMemAllocHost", max(size, 1)))

    def free_host(self, address: int) -> None:
        """Free pinned memory of the host."""
        self._call("cuMemFreeHost", address)

    # -- streams and events ------------------------------------------------------------------------------------

    def new_stream(self) -> Stream:
        """Make a stream that the legacy default stream does not wait for."""
        return int(self._call("cuStreamCreate", int(self.cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def new_urgent_stream(self) -> Stream:
        """Make one whose kernels, also as nodes of a graph, get the GPU's next free places before those of others."""
        _, greatest = self._call("cuCtxGetStreamPriorityRange")
        flags = int(self.cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self._call("cuStreamCreateWithPriority", flags, int(greatest)))

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream."""
        self._call("cuStreamDestroy", stream)

    def synchronize(self, stream: Stream) -> None:
        """Wait until all that is on the stream is done."""
        self._await(stream)
        self._call("cuStreamSynchronize", stream)

    def _await(self, stream: Stream) -> None:
        """Where other ranks may be lost, wait in a way that ends: calls of the driver that wait do so for ever."""
        if self.watch is not None:
            self.watch(lambda: self._is_through("cuStreamQuery", stream))

    def new_event(self, timing: bool = False) -> Handle:
        """Make an event, one that can be timed if asked for."""
        flags = self.cu.CUevent_flags
        return self._call("cuEventCreate", int(flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING))

    def destroy_event(self, event: Handle) -> None:
        """Destroy an event."""
        self._call("cuEventDestroy", event)

    def record(self, event: Handle, stream: Stream) -> None:
        """Record an event behind what is on the stream by now."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Stream, event: Handle) -> None:
        """Let what is enqueued on the stream from now on wait for the event."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def wait_for(self, event: Handle) -> None:
        """Let the host wait for an event."""
        if self.watch is not None:
            self.watch(lambda: self.is_done(event))
        self._call("cuEventSynchronize", event)

    def is_done(self, event: Handle) -> bool:
        """Tell whether what an event was recorded behind is done."""
        return self._is_through("cuEventQuery", event)

    def _is_through(self, name: str, what: Handle) -> bool:
        (error,) = self._try(name, what)
        if int(error) and error.name != "CUDA_ERROR_NOT_READY":
            self._fail(name, error)
        return int(error) == 0

    def seconds(self, start: Handle, end: Handle) -> float:
        """Give the time between two events that have been, in seconds."""
        return float(self._call("cuEventElapsedTime", start, end)) / 1000

    def order(self, before: Stream, after: Stream) -> None:
        """Let what is enqueued on `after` from now on wait for what is on `before` by now."""
        if before == after:
            return
        event = self.new_event()
        self.record(event, before)
        self.wait(after, event)
        self.destroy_event(event)  # it is kept until it has happened

    # -- capture of a stream into a graph ----------------------------------------------------------------------

    def is_capturing(self, stream: Stream) -> bool:
        """Tell whether what is enqueued on the stream is captured into a graph. The legacy default stream never is."""
        return bool(stream) and int(self._call("cuStreamIsCapturing", stream)) != 0

    def begin_capture(self, stream: Stream) -> None:
        """Let what is enqueued on the stream from now on become a graph. Other threads, and what libraries do to set
        themselves up, go on as before."""
        self._call("cuStreamBeginCapture", stream, self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)

    def end_capture(self, stream: Stream) -> Handle:
        """End what `begin_capture` began. Gives the graph."""
        return self._call("cuStreamEndCapture", stream)

    def captured(self, stream: Stream) -> tuple[Handle, list[Handle]]:
        """Give the graph that a stream is captured into, and the nodes that the next one waits for."""
        _, _, graph, nodes, *_ = self._call("cuStreamGetCaptureInfo", stream)
        return graph, list(nodes or ())

    def go_on_behind(self, stream: Stream, nodes: Sequence[Handle]) -> None:
        """Let what is captured on the stream from now on wait for these nodes."""
        flag = self.cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        self._call("cuStreamUpdateCaptureDependencies", stream, list(nodes), None, len(nodes), int(flag))

    # -- code --------------------------------------------------------------------------------------------------

    def load(self, cubin: bytes, built: str, kernel: str) -> Handle:
        """Load the module of a cubin made for the architecture `built`."""
        self.check_architecture(built)
        error, *found = self._try("cuModuleLoadData", cubin)
        if int(error) == 0:
            return found[0]
        if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
            free, total = self.memory_left()
            raise BnfuseError(
                f"the GPU's memory does not suffice for the code of kernel '{kernel}': "
                f"{scaled(free, 'B')} of {scaled(total, 'B')} are free"
            )
        raise BnfuseError(
            f"kernel '{kernel}' does not load on the GPU ({error.name}): update NVIDIA's driver, or compile again"
        )

    def check_architecture(self, built: str) -> None:
        """Refuse code that this GPU does not execute."""
        if not arch.runs_on(built, self.architecture):
            raise BnfuseError(
                f"the step was compiled for {built}; the GPU here ({self.name}) is {self.architecture}: "
                f"compile it for cuda:{self.architecture}"
            )

    def unload(self, module: Handle) -> None:
        """Unload a module."""
        self._call("cuModuleUnload", module)

    def function(self, module: Handle, symbol: str, shared: int) -> Handle:
        """Give a device kernel that may use `shared` bytes of dynamic shared memory."""
        error, *found = self._try("cuModuleGetFunction", module, symbol.encode())
        if int(error) != 0:
            raise BnfuseError(f"there is no device kernel '{symbol}' in its code ({error.name}): compile again")
        if shared > self.shared_limit:
            raise BnfuseError(
                f"device kernel '{symbol}' needs {shared} bytes of shared memory, the GPU ({self.name}) has "
                f"{self.shared_limit} a block: compile for cuda:{self.architecture}"
            )
        if shared > FREE_SHARED:
            attribute = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", found[0], attribute, shared)
        return found[0]

    def launch(self, call: Call, stream: Stream) -> None:
        """Enqueue one launch of a device kernel."""
        self._call(
            "cuLaunchKernel",
            call.function,
            *call.grid,
            call.threads,
            1,
            1,
            call.shared,
            stream,
            call.arguments.address,
            0,
        )

    # -- graphs ------------------------------------------------------------------------------------------------

    def new_graph(self) -> Handle:
        """Make an empty graph."""
        return self._call("cuGraphCreate", 0)

    def destroy_graph(self, graph: Handle) -> None:
        """Destroy a graph."""
        self._call("cuGraphDestroy", graph)

    def add_kernel(self, graph: Handle, after: Sequence[Handle], call: Call, kernels: Sequence[Handle] = ()) -> Handle:
        """Add a node that runs when those of `after` are done. For those of `kernels`, nodes of kernels, it waits
        itself: it comes to the GPU when all of their blocks are there and let it, or are done."""
        node = self._call("cuGraphAddKernelNode", graph, list(after), len(after), self._node(call))
        if kernels:
            edge = self.cu.CUgraphEdgeData()
            edge.from_port = self.cu.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
            edge.type = self.cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
            count = len(kernels)
            self._call("cuGraphAddDependencies", graph, list(kernels), [node] * count, [edge] * count, count)
        return node

    def add_copy(self, graph: Handle, after: Sequence[Handle], target: int, source: int, size: int) -> Handle:
        """Add a copy from device memory to device memory."""
        kind = self.cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        node = self.cu.CUDA_MEMCPY3D()
        node.srcMemoryType, node.srcDevice = kind, source
        node.dstMemoryType, node.dstDevice = kind, target
        node.WidthInBytes, node.Height, node.Depth = size, 1, 1
        return self._call("cuGraphAddMemcpyNode", graph, list(after), len(after), node, self.context)

    def instantiate(self, graph: Handle) -> Handle:
        """Make a graph executable."""
        return self._call("cuGraphInstantiate", graph, 0)

    def destroy_executable(self, executable: Handle) -> None:
        """Destroy what `instantiate` made."""
        self._call("cuGraphExecDestroy", executable)

    def update_kernel(self, executable: Handle, node: Handle, call: Call) -> None:
        """Give a node the arguments that its call has now. Launches that are under way keep theirs."""
        self._call("cuGraphExecKernelNodeSetParams", executable, node, self._node(call))

    def launch_graph(self, executable: Handle, stream: Stream) -> None:
        """Enqueue one run of an executable graph."""
        self._call("cuGraphLaunch", executable, stream)

    def _node(self, call: Call) -> Any:
        node = self.cu.CUDA_KERNEL_NODE_PARAMS()
        node.func = call.function
        node.gridDimX, node.gridDimY, node.gridDimZ = call.grid
        node.blockDimX, node.blockDimY, node.blockDimZ = call.threads, 1, 1
        node.sharedMemBytes = call.shared
        node.kernelParams = call.arguments.address
        return node
