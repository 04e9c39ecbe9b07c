"""What a step asks of whatever runs its programs, on a CPU (cpu/runner.py) or on a GPU (cuda/runner.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.memory import Store
from bnfuse.runtime.program import program as p

if TYPE_CHECKING:
    from bnfuse.runtime.backends.cuda.array import DeviceArray

STATE = (p.PARAMETERS, p.RUNNING, p.OPTIMIZER, p.ACCUMULATED, p.AVERAGE, p.AVERAGE_RUNNING)
SHARED = (*STATE, p.GRADIENTS, p.NEW_RUNNING, p.ARENA)
Scalars = Mapping[str, float]  # arguments that are known when the step runs, by name


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program and the object code of each of its kernels."""

    program: p.Program
    codes: Sequence[bytes]


@dataclasses.dataclass(frozen=True)
class LaunchTime:
    """One line of a profile: what ran, for how long (seconds)."""

    phase: str
    node: str
    kernel: str
    seconds: float
    work: p.Work | None = None  # None in a file of an earlier version


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A block of memory that a region of the program of `owner` may be in, and the calls that work there."""

    region: str
    block: np.ndarray
    calls: dict[p.Phase, list[Any]]
    owner: object


class Runner(Protocol):
    """A program in memory, ready to run."""

    program: p.Program

    @property
    def memory(self) -> Store:
        """What the regions of the program hold."""

    def feed(self, names: Sequence[str], arrays: Sequence[Any]) -> dict[str, np.ndarray]:
        """Take the inputs, checked against the types of the file. Gives those that lie on the host, by name."""

    def run(self, parts: Sequence[p.Part], scalars: Mapping[p.Phase, Scalars]) -> dict[p.Phase, float]:
        """Run parts of phases one after the other; gives the seconds of each phase where they are known."""

    def profile(self, phases: Sequence[p.Phase], scalars: Mapping[p.Phase, Scalars]) -> list[LaunchTime]:
        """Run some phases, each launch timed."""

    def result(self, tensor: p.Tensor) -> Any:
        """Give a tensor as it is now, which later runs leave alone.

        It is of numpy, or on the device if an input of the last `feed` was there.
        """

    def view(self, storage: p.Storage, shape: tuple[int, ...]) -> Any:
        """Give elements where they lie, to be read and written: of numpy, or on the device."""

    def to_host(self, array: Any, what: str) -> np.ndarray:
        """Take an array of any kind as numpy's. `what` is what messages call it."""

    def synchronize(self) -> None:
        """Wait until everything is done that was begun."""

    def on_device(self, what: str) -> OnDevice:
        """Give what a runner on a GPU has besides. Raises BnfuseError for one on a CPU, which lacks `what`."""

    def on_host(self, what: str) -> OnHost:
        """Give what a runner on a CPU has besides. Raises BnfuseError for one on a GPU, which lacks `what`."""


class OnDevice(Protocol):
    """What there is of a program on a GPU alone."""

    stream: Any  # an address; anything with `__cuda_stream__` can be set

    def array(self, tensor: p.Tensor) -> DeviceArray:
        """Give a tensor where it lies on the device."""


class OnHost(Protocol):
    """What there is of a program on a CPU alone."""

    def another(self, region: str) -> Block:
        """Make another block of memory for a region that is written before it is read."""

    def use(self, place: Block) -> None:
        """Let a region be in a block that `another` made."""


def shared_regions(regions: Mapping[str, Any], *programs: p.Program) -> dict[str, Any]:
    """Of a runner's regions those that another one beside it uses too: state, and what is written before it is read.

    Not what the `programs` of both find there from the start on (a gradient that is constant), each its own.
    """
    found_there = {program.storages[storage].region for program in programs for storage in program.initial}
    return {name: regions[name] for name in SHARED if name in regions and (name in STATE or name not in found_there)}


def paired(names: Sequence[str], arrays: Sequence[Any]) -> list[tuple[str, Any]]:
    """Names and inputs, of which there have to be as many."""
    if len(arrays) != len(names):
        raise BnfuseError(f"the step takes {len(names)} inputs ({', '.join(names)}), not {len(arrays)}")
    return list(zip(names, arrays, strict=True))


def check_input(name: str, tensor: p.Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse an input of another shape, or of a type that does not become the graph's without loss of its kind."""
    if shape != tensor.shape:
        what = f"input '{name}' has the shape {list(shape)}, the graph takes {list(tensor.shape)}"
        if shape[1:] == tensor.shape[1:]:
            what += (
                f": it is compiled for that batch. bnfuse.add_batch(step, {shape[0]}) compiles it for another one too"
            )
        raise BnfuseError(what)
    if not np.can_cast(dtype, tensor.dtype, "same_kind"):
        raise BnfuseError(f"input '{name}' is {dtype}, the graph takes {tensor.dtype}")


def as_numpy(array: Any, what: str) -> np.ndarray:
    """Take anything that is a numpy array or speaks DLPack as numpy's. `what` is what messages call it."""
    if isinstance(array, np.ndarray):
        return array
    try:
        return np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise BnfuseError(f"{what} cannot be read as an array: {str(error).splitlines()[0]}") from None
