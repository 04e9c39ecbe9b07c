"""The launches of a program as calls of device kernels, with arguments that are filled in when the step runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from bnfuse.core.errors import BnfuseError
from bnfuse.parallel.nccl import GpuWorld, Piece
from bnfuse.runtime.backends.cuda.dependencies import Access, accesses_of
from bnfuse.runtime.backends.cuda.driver import Arguments, Call, Handle, Stream
from bnfuse.runtime.backends.cuda.memory import DeviceMemory
from bnfuse.runtime.backends.cuda.queue import Queue
from bnfuse.runtime.backends.execution import Scalars
from bnfuse.runtime.kernels.cuda import container
from bnfuse.runtime.kernels.cuda.container import Code
from bnfuse.runtime.program import program as p

STEADY = ("loss_scale",)  # scalars that are not another number in each step
WIRE = Access("wire", 0, 1, reads=True, writes=True)  # between ranks, who all begin their exchanges in one order


@dataclasses.dataclass(frozen=True)
class Task:
    """What a launch stands for: device kernels one after the other. Or a copy: target, source, bytes. Or an exchange
    between ranks: what enqueues it on a stream.

    `accesses` has what each of the kernels touches (or the copy): a graph orders them one by one, so that whoever waits
    for a convolution's input gradient does not wait for its weight gradient.
    """

    phase: p.Phase
    accesses: tuple[tuple[Access, ...], ...]
    calls: tuple[Call, ...] = ()
    copy: tuple[int, int, int] | None = None
    exchange: Callable[[Stream], None] | None = None
    launch: p.Launch | None = None


class Modules:
    """Loaded code, each cubin once. It is unloaded when nobody has it any more."""

    def __init__(self, queue: Queue) -> None:
        self.driver = queue.driver
        self._modules: dict[bytes, Handle] = {}
        weakref.finalize(self, unload, queue, self._modules)

    def functions(self, kernel: str, code: Code) -> list[Handle]:
        """Give the device kernels of a kernel's stages."""
        if code.cubin not in self._modules:
            self._modules[code.cubin] = self.driver.load(code.cubin, code.arch, kernel)
        module = self._modules[code.cubin]
        return [self.driver.function(module, stage.symbol, stage.shared) for stage in code.stages]


def unpacked(program: p.Program, codes: Sequence[bytes]) -> list[Code]:
    """Unpack the code of each kernel, seen to fit the launches."""
    found = [container.unpack(code, name) for name, code in zip(program.kernels, codes, strict=True)]
    for launch in program.launches:
        if launch.exchanges:
            continue
        parameters = found[launch.kernel].parameters
        taken = [kind == container.BUFFER for _, kind in parameters]
        if taken != [isinstance(argument, p.Buffer) for argument in launch.arguments]:
            raise BnfuseError(
                f"node '{launch.node}': its arguments are not those of kernel '{program.kernels[launch.kernel]}': "
                f"compile the model again"
            )
    return found


class Calls:
    """The tasks of a program, in order. `set_scalars` and `set_inputs` fill in what a step brings.

    A program that exchanges needs the `world` of the ranks that run it.
    """

    def __init__(
        self,
        program: p.Program,
        codes: Sequence[Code],
        modules: Modules,
        memory: DeviceMemory,
        world: GpuWorld | None = None,
    ) -> None:
        self._program, self._memory, self._world = program, memory, world
        self._scalars: dict[p.Phase, list[tuple[Arguments, int, str]]] = {phase: [] for phase in p.ALL_PHASES}
        self._inputs: list[tuple[Arguments, int, p.Storage]] = []
        functions = [modules.functions(*named) for named in zip(program.kernels, codes, strict=True)]
        self.tasks = [
            self._exchange(launch)
            if launch.exchanges
            else self._task(launch, codes[launch.kernel], functions[launch.kernel])
            for launch in program.launches
        ]
        self.copies = running_copies(program, memory)
        self.set_inputs({})

    def of(self, parts: Iterable[p.Part]) -> list[Task]:
        """Tasks of some parts of phases, in their order."""
        found: list[Task] = []
        for part in parts:
            found += [task for task in self.tasks if task.phase == part.phase][part.start : part.stop]
            found += self.copies if part.commits else []
        return found

    def varying(self, parts: Sequence[p.Part]) -> str | None:
        """Name what is another number in each step and launches of these parts take as a number, or None."""
        launches = [task.launch for task in self.of(parts) if task.launch is not None]
        scalars = (argument for launch in launches for argument in launch.arguments if isinstance(argument, p.Scalar))
        return next((scalar.name for scalar in scalars if scalar.name not in STEADY), None)

    def _task(self, launch: p.Launch, code: Code, functions: Sequence[Handle]) -> Task:
        values = {name: (kind, a) for (name, kind), a in zip(code.parameters, launch.arguments, strict=True)}
        calls = []
        for stage, function in zip(code.stages, functions, strict=True):
            arguments = Arguments([values[name][0] for name in stage.arguments])
            for index, name in enumerate(stage.arguments):
                self._fill(arguments, index, values[name][1], launch.phase)
            calls.append(Call(function, stage.grid, stage.threads, stage.shared, arguments, code.waits))
        given = {name: argument for name, (_, argument) in values.items()}
        touched = [accesses_of(given, stage.arguments, self._program.storages, code.slots) for stage in code.stages]
        return Task(launch.phase, tuple(map(tuple, touched)), tuple(calls), launch=launch)

    def _exchange(self, launch: p.Launch) -> Task:
        """Make the task of an exchange. All of them touch the wire: each waits for the one before it."""
        world = self._world
        if world is None:
            raise BnfuseError(
                f"the step was compiled for {self._program.ranks} ranks: start them with torchrun or mpirun, and give "
                "compile_step or load_step the world that open_world returns"
            )
        held = [self._program.storages[buffer.storage] for buffer in launch.buffers]
        touched = [
            Access(s.region, s.offset, s.offset + s.bytes, b.access != "out", b.access != "in", b.storage)
            for s, b in zip(held, launch.buffers, strict=True)
        ]
        enqueue: Callable[[Stream], None]
        if launch.kernel == p.SUM:
            pieces = [self._piece(storage) for storage in held]
            enqueue = functools.partial(world.enqueue_sums, pieces)
        else:
            pairs = [(self._piece(own), self._piece(all_)) for own, all_ in zip(held[::2], held[1::2], strict=True)]
            enqueue = functools.partial(world.enqueue_gathers, pairs)
        return Task(launch.phase, ((*touched, WIRE),), exchange=enqueue, launch=launch)

    def _piece(self, storage: p.Storage) -> Piece:
        return Piece(self._memory.address(storage), storage.elements, storage.dtype)

    def _fill(self, arguments: Arguments, index: int, value: p.Argument, phase: p.Phase) -> None:
        """Give an argument its value, or remember that it has none yet."""
        if isinstance(value, p.Scalar):
            arguments.is_late = True
            self._scalars[phase].append((arguments, index, value.name))
        elif isinstance(value, p.Buffer):
            storage = self._program.storages[value.storage]
            arguments.set(index, self._memory.address(storage))
            if storage.region == p.INPUTS:
                arguments.is_late = True
                self._inputs.append((arguments, index, storage))
        else:
            arguments.set(index, value)

    def set_scalars(self, phase: p.Phase, scalars: Scalars) -> None:
        """Set the scalars that launches of a phase take, by name."""
        for arguments, index, name in self._scalars[phase]:
            arguments.set(index, scalars[name])

    def set_inputs(self, addresses: Mapping[str, int]) -> None:
        """Where the inputs lie, by name; those that are not named lie in their region."""
        places = []
        for name, address in addresses.items():
            held = self._program.storages[self._program.inputs[name].storage]
            places.append((held.offset, held.offset + held.bytes, address))
        for arguments, index, storage in self._inputs:
            found = self._memory.address(storage)
            for start, stop, address in places:
                if start <= storage.offset and storage.offset + storage.bytes <= stop:
                    found = address + storage.offset - start
            arguments.set(index, found)


def running_copies(program: p.Program, memory: DeviceMemory) -> list[Task]:
    """After an update new running statistics take the place of the old ones, in as few copies as there can be."""
    found = []
    for source, target, size in merged(running_pairs(program)):
        new, old = p.Storage(p.NEW_RUNNING, source, size, "uint8"), p.Storage(p.RUNNING, target, size, "uint8")
        accesses = (
            Access(p.NEW_RUNNING, source, source + size, reads=True, writes=False),
            Access(p.RUNNING, target, target + size, reads=False, writes=True),
        )
        found.append(Task("update", (accesses,), copy=(memory.address(old), memory.address(new), size)))
    return found


def running_pairs(program: p.Program) -> list[tuple[int, int, int]]:
    """Offset of the new statistic, of the old one, and the bytes, for each."""
    pairs = []
    for name, tensor in program.new_running.items():
        new, old = (program.storages[t.storage] for t in (tensor, program.running[name]))
        if (new.region, old.region, new.bytes) != (p.NEW_RUNNING, p.RUNNING, old.bytes):
            raise BnfuseError(
                f"running statistic '{name}' does not lie where its copy belongs: compile the model again"
            )
        pairs.append((new.offset, old.offset, new.bytes))
    return pairs


def merged(pairs: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours in both regions as one, with what only aligns them in between."""
    found: list[tuple[int, int, int]] = []
    for source, target, size in sorted(pairs):
        if found:
            first, start, length = found[-1]
            if source - first == target - start == p.aligned(length):
                found[-1] = (first, start, source - first + size)
                continue
        found.append((source, target, size))
    return found


def unload(queue: Queue, modules: dict[bytes, Handle]) -> None:
    """Behind what may still run."""
    with contextlib.suppress(BnfuseError), queue.driver.active():
        queue.driver.synchronize(queue.stream)
        for module in modules.values():
            queue.driver.unload(module)
