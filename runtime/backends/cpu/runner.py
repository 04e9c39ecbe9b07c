"""Running a compiled step on the CPU: its kernels are functions that take views of its memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm

from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.core.processors import check_threads
from bnfuse.parallel.world import World
from bnfuse.runtime.backends.cpu import permission
from bnfuse.runtime.backends.cpu.exchanging import Exchanges, Place
from bnfuse.runtime.backends.cpu.library import Library
from bnfuse.runtime.backends.execution import (
    Block,
    Compiled,
    LaunchTime,
    Scalars,
    as_numpy,
    check_input,
    paired,
    shared_regions,
)
from bnfuse.runtime.backends.launching import launch
from bnfuse.runtime.backends.memory import Memory, aligned, as_bits
from bnfuse.runtime.program import program as p
from bnfuse.runtime.targets.cpus import missing_features, required_features
from bnfuse.runtime.targets.target import CpuTarget


class CpuRunner:
    """Executes the launches of one program, with the ranks of `world` where it exchanges. Code for another processor
    can be kept and exported, not run."""

    def __init__(
        self, compiled: Compiled, target: CpuTarget, beside: CpuRunner | None = None, world: World | None = None
    ) -> None:
        check_threads(target.threads)
        self.program, self.threads = compiled.program, target.threads
        program = compiled.program
        shared = shared_regions(beside.regions, beside.program, program) if beside else None
        self.memory: Memory = Memory(program, shared)
        self.regions: dict[str, np.ndarray] = {**self.memory.regions}  # for runners beside it: `use` moves none
        self.mcpu, self.missing = target.mcpu, missing_features(required_features(target))
        if not self.missing:
            permission.require(target)
            self._tensors: dict[int, Any] = {}
            self.library = Library(compiled.program.kernels, compiled.codes)
            self.exchanges = Exchanges(program, self.memory, world)
            self.calls: dict[p.Phase, list[Any]] = {
                phase: [self._call(launch, (phase, index)) for index, launch in enumerate(program.phase(phase))]
                for phase in p.ALL_PHASES
            }

    def _call(self, launch: p.Launch, place: Place) -> tuple[Any, list[Any], list[tuple[int, str]]]:
        """Give function, arguments, and which of them have to be filled in when the step runs."""
        if launch.exchanges:
            return self.exchanges.begin, [place], []
        arguments: list[Any] = []
        late = []
        for argument in launch.arguments:
            if isinstance(argument, p.Scalar):
                late.append((len(arguments), argument.name))
                arguments.append(0.0)
            else:
                arguments.append(self._tensor(argument.storage) if isinstance(argument, p.Buffer) else argument)
        return self.library.functions[launch.kernel], arguments, late

    def _tensor(self, storage: int) -> Any:
        """Wrap a storage as kernels take it; no copy. Raises BnfuseError for one that lies where they cannot."""
        if storage not in self._tensors:
            elements = as_bits(self.memory.flat(storage))
            if elements.ctypes.data % p.ALIGNMENT:  # vector loads would end the process
                raise BnfuseError(f"storage {storage} is not aligned: compile the model again")
            self._tensors[storage] = tvm.runtime.from_dlpack(elements)
        return self._tensors[storage]

    def another(self, region: str) -> Block:
        """Make another block for a region that is written before it is read; `use` lets the region be there."""
        if self.exchanges:
            raise BnfuseError("a step of several ranks has its gradients in one place: copy what is to be kept")
        now, calls, storages = self.memory.regions[region], self.calls, self.program.storages
        there = {index for index, storage in enumerate(storages) if storage.region == region}

        def forget() -> None:
            self._tensors = {index: one for index, one in self._tensors.items() if index not in there}

        block = self.memory.regions[region] = aligned(now.nbytes)
        forget()
        for index, value in self.program.initial.items():
            if index in there:
                self.memory.flat(index)[:] = value
        made = {
            phase: [
                self._call(launch, (phase, index)) if there & {buffer.storage for buffer in launch.buffers} else call
                for index, (launch, call) in enumerate(zip(self.program.phase(phase), calls[phase], strict=True))
            ]
            for phase in calls
        }
        self.memory.regions[region] = now
        forget()
        return Block(region, block, made, self)

    def use(self, place: Block) -> None:
        """Let a region be in a block that `another` made."""
        self.memory.regions[place.region], self.calls = place.block, place.calls
        for index, value in self.program.initial.items():
            if self.program.storages[index].region == place.region:
                self.memory.flat(index)[:] = value  # whoever was given the block may have written there

    def run(self, parts: Sequence[p.Part], scalars: Mapping[p.Phase, Scalars]) -> dict[p.Phase, float]:
        """All launches of some parts, and the seconds that each phase took."""
        self._check_cpu()
        return dict(launch(self.threads, functools.partial(self._run, parts, scalars)))

    def _run(self, parts: Sequence[p.Part], scalars: Mapping[p.Phase, Scalars]) -> dict[p.Phase, float]:
        seconds: dict[p.Phase, float] = {}
        exchanges = bool(self.exchanges)
        try:
            for part in parts:
                start, given = time.perf_counter(), scalars.get(part.phase, {})
                if part.start:
                    self.exchanges.finish()  # launches that would have waited are left out
                for place, (function, arguments, late) in enumerate(
                    self.calls[part.phase][part.start : part.stop], part.start
                ):
                    if exchanges:
                        self.exchanges.before((part.phase, place))
                    for index, name in late:
                        arguments[index] = given[name]
                    try:
                        function(*arguments)
                    except (TypeError, ValueError, RuntimeError) as error:
                        raise unfit(error) from None
                if part.commits:
                    self.exchanges.finish()
                    self._commit()
                seconds[part.phase] = seconds.get(part.phase, 0.0) + time.perf_counter() - start
            self.exchanges.finish()
        except BaseException:
            self.exchanges.forget()
            raise
        return seconds

    def profile(self, phases: Sequence[p.Phase], scalars: Mapping[p.Phase, Scalars]) -> list[LaunchTime]:
        """Run some phases, each launch timed."""
        self._check_cpu()
        return list(launch(self.threads, functools.partial(self._profile, phases, scalars)))

    def _profile(self, phases: Sequence[p.Phase], scalars: Mapping[p.Phase, Scalars]) -> list[LaunchTime]:
        times = []
        for phase in phases:
            for one, (function, arguments, late) in zip(self.program.phase(phase), self.calls[phase], strict=True):
                for index, name in late:
                    arguments[index] = scalars[phase][name]
                start = time.perf_counter()
                function(*arguments)
                self.exchanges.finish()  # an exchange is timed from its beginning to its end
                seconds = time.perf_counter() - start
                name, work = self.program.name_of(one), self.program.work_of(one)
                times.append(LaunchTime(phase, one.node, name, seconds, work))
            if self.program.whole(phase).commits:
                self._commit()
        return times

    def _commit(self) -> None:
        """Put new running statistics into the place of the old ones."""
        for name, tensor in self.program.new_running.items():
            np.copyto(self.memory.array(self.program.running[name]), self.memory.array(tensor))

    def _check_cpu(self) -> None:
        if self.missing:
            raise BnfuseError(
                f"the step was compiled for {self.mcpu}; this CPU lacks {', '.join(self.missing[:4])}: "
                f"export it and run it there, or compile it for cpu"
            )

    def feed(self, names: Sequence[str], arrays: Sequence[Any]) -> dict[str, np.ndarray]:
        """Copy the inputs into the step's memory; views of them there."""
        found = {}
        for name, given in paired(names, arrays):
            tensor = self.program.inputs[name]
            array = as_numpy(given, f"input '{name}'")
            check_input(name, tensor, array.shape, array.dtype)
            found[name] = self.memory.array(tensor)
            np.copyto(found[name], array, casting="same_kind")
        return found

    def result(self, tensor: p.Tensor) -> np.ndarray:
        """Copy a tensor as it is now."""
        copied: np.ndarray = self.memory.array(tensor).copy()
        return copied

    def view(self, storage: p.Storage, shape: tuple[int, ...]) -> np.ndarray:
        """View elements where they lie."""
        return self.memory.view(storage).reshape(shape)

    def to_host(self, array: Any, what: str) -> np.ndarray:
        """Take an array of any kind as numpy's. `what` is what messages call it."""
        return as_numpy(array, what)

    def synchronize(self) -> None:
        """`run` returns when everything is done."""

    def on_device(self, what: str) -> Any:
        """Raise BnfuseError: a step on the CPU has nothing on a device."""
        raise BnfuseError(f"a step on the CPU has no {what}: compile it for cuda")

    def on_host(self, what: str) -> CpuRunner:
        """Give itself: it is on the host."""
        return self


def unfit(error: Exception) -> BnfuseError:
    """Kernels look at what they are given, which our own programs never give wrongly."""
    what = first_line(error).removesuffix(" when calling:")
    return BnfuseError(f"a kernel does not fit to its program ({what}): compile the model again")
