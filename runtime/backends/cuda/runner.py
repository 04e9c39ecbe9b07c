"""Running a compiled step on an NVIDIA GPU: `execution.Runner` with one CUDA graph for the phases of a call.

The GPU is looked for when something is to run. Until then state is kept on the host, so that a step can be compiled,
loaded, looked at and exported on a machine without one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.parallel.nccl import UNREACHED, GpuWorld, gpu_world
from bnfuse.parallel.world import World
from bnfuse.runtime.backends.cuda import dlpack
from bnfuse.runtime.backends.cuda.array import DeviceArray
from bnfuse.runtime.backends.cuda.calls import Calls, Modules, Task, unpacked
from bnfuse.runtime.backends.cuda.driver import Driver, Stream, open_driver
from bnfuse.runtime.backends.cuda.graph import Graph, capture
from bnfuse.runtime.backends.cuda.memory import DeviceMemory, Results, Staging, mapped, to_host
from bnfuse.runtime.backends.cuda.queue import Queue
from bnfuse.runtime.backends.execution import (
    STATE,
    Compiled,
    LaunchTime,
    Scalars,
    as_numpy,
    check_input,
    paired,
    shared_regions,
)
from bnfuse.runtime.backends.memory import Memory, Store
from bnfuse.runtime.kernels.cuda.container import Code
from bnfuse.runtime.program import program as p
from bnfuse.runtime.targets.target import CudaTarget


class CudaRunner:
    """A program for a GPU. `beside` is the runner whose state and working memory it shares, `world` the ranks that run
    it together. Raises BnfuseError for a world that does not reach from GPU to GPU."""

    def __init__(
        self,
        compiled: Compiled,
        target: CudaTarget,
        beside: CudaRunner | None = None,
        world: World | None = None,
    ) -> None:
        self.program, self.target, self.beside = compiled.program, target, beside
        self._world = gpu_world(world)
        if p.MAPPED in compiled.program.regions and self._world is not None and not self._world.maps:
            raise BnfuseError(UNREACHED)
        self._codes = unpacked(compiled.program, compiled.codes)
        without = (p.ARENA, p.CONSTANTS, *p.mapped_regions(compiled.program))
        self._host = Memory(compiled.program, without=without) if beside is None else None
        self._device: Device | None = None

    @property
    def device(self) -> Device:
        """The program on the GPU, brought there when it is first wanted."""
        if self._device is None:
            beside = self.beside.device if self.beside else None
            device = Device(self.program, self._codes, self.target, beside, self._world)
            if self._host is not None:
                for region in [name for name in STATE if name in self._host.regions]:
                    block = self._host.regions[region]
                    device.memory.store(p.Storage(region, 0, block.nbytes, "uint8"), block)
            self._device, self._host = device, None
        return self._device

    @property
    def memory(self) -> Store:
        """The regions of the program: on the host until the step first runs, then on the GPU."""
        return self._host if self._host is not None else self.device.memory

    def feed(self, names: Sequence[str], arrays: Sequence[Any]) -> dict[str, np.ndarray]:
        """Take the inputs: those on the host are copied, those on the GPU are read where they lie if they have the
        graph's type and the order of C. Gives those that lie on the host."""
        given = paired(names, arrays)
        found = {}
        for name, array in given:
            if not dlpack.is_on_device(array):
                found[name] = as_numpy(array, f"input '{name}'")
                check_input(name, self.program.inputs[name], found[name].shape, found[name].dtype)
        self.device.feed(given, found)
        return found

    def run(self, parts: Sequence[p.Part], scalars: Mapping[p.Phase, Scalars]) -> dict[p.Phase, float]:
        """Enqueue some parts, as one graph. Their seconds are not known then: see `profile`."""
        self.device.run(tuple(parts), scalars)
        return {}

    def profile(self, phases: Sequence[p.Phase], scalars: Mapping[p.Phase, Scalars]) -> list[LaunchTime]:
        """Launch by launch on one stream, each between two events. Copies of running statistics have no line."""
        times = []
        for task, seconds in self.device.profile(phases, scalars):
            if task.launch is not None:
                name, work = self.program.name_of(task.launch), self.program.work_of(task.launch)
                times.append(LaunchTime(task.phase, task.launch.node, name, seconds, work))
        return times

    def result(self, tensor: p.Tensor) -> Any:
        """On the device if an input of the last `feed` was there: then nothing waits."""
        return self.device.copy_of(tensor) if self.device.is_fed_from_device else self.memory.read(tensor)

    def array(self, tensor: p.Tensor) -> DeviceArray:
        """Give a tensor where it lies on the device."""
        return self.view(self.program.storages[tensor.storage], tensor.shape)

    def view(self, storage: p.Storage, shape: tuple[int, ...]) -> DeviceArray:
        """Give elements where they lie on the device."""
        return self.device.view_of_own(storage, shape)

    def to_host(self, array: Any, what: str) -> np.ndarray:
        """Copy an array of any kind to numpy's. `what` is what messages call it."""
        return self.device.to_host(array, what) if dlpack.is_on_device(array) else as_numpy(array, what)

    def on_device(self, what: str) -> CudaRunner:
        """Give itself: it is on a device."""
        return self

    def on_host(self, what: str) -> Any:
        """Raise BnfuseError: addresses are written into the graphs of a step on a GPU."""
        raise BnfuseError(f"a step on a GPU has no {what}: copy what is to be kept")

    @property
    def stream(self) -> Stream:
        """Address of the CUDA stream that the step runs on."""
        return self.device.queue.stream

    @stream.setter
    def stream(self, stream: Any) -> None:
        """Set the stream, in any form that `address_of` takes. Waits for what was begun."""
        self.device.queue.use(stream)

    def synchronize(self) -> None:
        """Wait for the GPU. Where nothing was begun there is nothing to wait for."""
        if self._device is not None:
            with self._device.driver.active():
                self._device.driver.synchronize(self._device.queue.stream)


class Device:
    """A program in the memory of a GPU, with its code, its graphs and its stream."""

    def __init__(
        self,
        program: p.Program,
        codes: Sequence[Code],
        target: CudaTarget,
        beside: Device | None,
        world: GpuWorld | None = None,
    ) -> None:
        self.program = program
        self.driver: Driver = beside.driver if beside else open_driver(world.device if world else None)
        self.driver.check_architecture(target.architecture)
        if world is not None:
            self.driver.watch = world.watch
        self.queue: Queue = beside.queue if beside else Queue(self.driver)
        self.modules: Modules = beside.modules if beside else Modules(self.queue)
        self.results: Results = beside.results if beside else Results(self.queue)
        with self.driver.active():
            shared = shared_regions(beside.memory.regions, beside.program, program) if beside else {}
            self.memory: DeviceMemory = DeviceMemory(program, self.queue, shared)
            self._codes, self._world = codes, world
            self._calls: Calls | None = None
            self._exchanges = any(launch.exchanges for launch in program.launches)
        self.is_fed_from_device = False
        self._graphs: dict[tuple[p.Part, ...], Graph] = {}
        self._staging: dict[str, Staging] = {}
        self._inputs: dict[str, dlpack.View] = {}  # of the caller, on the device

    @property
    def calls(self) -> Calls:
        """The program's tasks, made when it is first given something: all ranks come here together, as they need to
        where they share memory. One that reads this memory, or evaluates beside it, may be alone."""
        if self._calls is None:
            with self.driver.active():
                if self._world is not None:
                    self.memory.regions |= mapped(self.program, self.queue, self._world)
                self._calls = Calls(self.program, self._codes, self.modules, self.memory, self._world)
        return self._calls

    # -- inputs ------------------------------------------------------------------------------------------------

    def feed(self, given: Sequence[tuple[str, Any]], on_host: Mapping[str, np.ndarray]) -> None:
        """Take inputs, of which some lie on the host. All others stay where they are: backward reads what forward was
        given."""
        with self.driver.active():
            if on_host and self.queue.is_capturing():
                raise BnfuseError(
                    f"input '{next(iter(on_host))}' lies on the host, and a CUDA graph is being captured: give it on "
                    "the GPU"
                )
            for name, array in given:
                self._inputs.pop(name, None)
                if name in on_host:
                    self._send(name, on_host[name])
                    continue
                what = f"input '{name}'"
                view = self.view(array, what)
                check_input(name, self.program.inputs[name], view.shape, view.dtype)
                if self._is_usable(view, self.program.inputs[name]):
                    self._inputs[name] = view
                elif self.queue.is_capturing():
                    raise BnfuseError(
                        f"{what} would be copied through the host, and a CUDA graph is being captured: make it "
                        f"{self.program.inputs[name].dtype}, contiguous, and begin at a multiple of {p.ALIGNMENT} bytes"
                    )
                else:
                    self._send(name, to_host(self.driver, view, self.queue.stream))
            self.calls.set_inputs({name: view.address for name, view in self._inputs.items()})
        self.is_fed_from_device = len(on_host) < len(given)

    def _send(self, name: str, values: np.ndarray) -> None:
        """Into the region of inputs."""
        tensor = self.program.inputs[name]
        storage = self.program.storages[tensor.storage]
        if name not in self._staging:
            self._staging[name] = Staging(self.driver, tensor.shape, storage.dtype)
        self._staging[name].send(values, self.memory.address(storage), self.queue.stream)

    def view(self, array: Any, what: str) -> dlpack.View:
        """View an array of the device, ready when our stream gets to it."""
        try:
            view = dlpack.view_of(array, self.queue.stream, self.driver.order)
        except (BufferError, RuntimeError, TypeError, ValueError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise BnfuseError(f"{what} cannot be read as an array: {reason}") from None
        if view.device not in (-1, self.driver.ordinal):
            raise BnfuseError(
                f"{what} is on GPU {view.device}, the step on GPU {self.driver.ordinal}: move one of them"
            )
        if min(view.strides, default=0) < 0:
            raise BnfuseError(f"{what} runs backwards along an axis: make it contiguous")
        return view

    def _is_usable(self, view: dlpack.View, tensor: p.Tensor) -> bool:
        """Whether kernels can read it as they would the region of inputs."""
        kind = self.program.storages[tensor.storage].dtype
        return view.dtype == np.dtype(kind) and view.is_contiguous and view.address % p.ALIGNMENT == 0

    def to_host(self, array: Any, what: str) -> np.ndarray:
        """Copy an array of the device to the host. `what` is what messages call it."""
        with self.driver.active():
            return to_host(self.driver, self.view(array, what), self.queue.stream)

    # -- running -----------------------------------------------------------------------------------------------

    def run(self, parts: tuple[p.Part, ...], scalars: Mapping[p.Phase, Scalars]) -> None:
        """Enqueue some parts as one graph, or add them to the graph that the stream is captured into."""
        with self.driver.active():
            self._prepare([part.phase for part in parts], scalars)
            if self.queue.is_capturing():
                self._check_repeatable(parts)
                capture(self.driver, self.calls.of(parts), self.queue.stream)
                return
            if parts not in self._graphs:
                side = self.queue.side if self._exchanges else None
                self._graphs[parts] = Graph(self.driver, self.calls.of(parts), side)
            self._graphs[parts].launch(self.queue.stream)
            if self._inputs:
                self.queue.hold(list(self._inputs.values()))

    def _check_repeatable(self, parts: Sequence[p.Part]) -> None:
        """Refuse to be captured where replaying would not be what calling is."""
        signature = self.program.signature
        fed = {*signature["data"], *signature["labels"], *signature.get("output_gradients", {}).values()}
        found = next((f"input '{name}' is drawn" for name in self.program.inputs if name not in fed), None)
        if found is None and (name := self.calls.varying(parts)) is not None:
            found = f"'{name}' is another number"
        if found is not None:
            raise BnfuseError(
                f"{found} in each step, and a CUDA graph that is being captured would keep the one of now: call the "
                "step outside of the capture"
            )

    def profile(self, phases: Sequence[p.Phase], scalars: Mapping[p.Phase, Scalars]) -> list[tuple[Task, float]]:
        """Run some phases launch by launch; gives the seconds of each."""
        with self.driver.active():
            self._prepare(phases, scalars)
            tasks = self.calls.of([self.program.whole(phase) for phase in phases])
            events = [self.driver.new_event(timing=True) for _ in range(len(tasks) + 1)]
            self.driver.record(events[0], self.queue.stream)
            for task, event in zip(tasks, events[1:], strict=True):
                self._enqueue(task)
                self.driver.record(event, self.queue.stream)
            self.driver.synchronize(self.queue.stream)
            seconds = [self.driver.seconds(*pair) for pair in itertools.pairwise(events)]
            for event in events:
                self.driver.destroy_event(event)
        return list(zip(tasks, seconds, strict=True))

    def _prepare(self, phases: Sequence[p.Phase], scalars: Mapping[p.Phase, Scalars]) -> None:
        for phase in phases:
            if phase in scalars:
                self.calls.set_scalars(phase, scalars[phase])
        self.queue.wait_for_readers()

    def _enqueue(self, task: Task) -> None:
        if task.copy is not None:
            self.driver.copy(*task.copy, self.queue.stream)
        if task.exchange is not None:
            task.exchange(self.queue.stream)
        for call in task.calls:
            self.driver.launch(call, self.queue.stream)

    # -- results -----------------------------------------------------------------------------------------------

    def view_of_own(self, storage: p.Storage, shape: tuple[int, ...]) -> DeviceArray:
        """Give elements where they lie; the next step may write over them."""
        return DeviceArray(self.queue, self.memory.address(storage), shape, storage.dtype, self.memory)

    def copy_of(self, tensor: p.Tensor) -> DeviceArray:
        """Copy a tensor on the device, where later runs leave it alone."""
        storage = self.program.storages[tensor.storage]
        with self.driver.active():
            if self.queue.is_capturing():
                raise BnfuseError(
                    "a CUDA graph is being captured, and its results lie where the step has them: call run_forward, "
                    "and copy from output_views()"
                )
            return DeviceArray.copy_of(self.results, self.memory.address(storage), tensor.shape, storage.dtype)
