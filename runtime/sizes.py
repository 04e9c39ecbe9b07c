"""The programs of a step for its batch sizes: one state, and for each size a program of training and one of evaluation.

    step(images of 16), step(images of 7)             the same parameters, statistics, moments and count of steps

All share the regions of the state, and the arena of the first one where it is large enough. So one call at a time is
under way, and what it left in the arena is gone with the next, whatever its batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.parallel.world import World
from bnfuse.runtime.backends.backend import backend_of
from bnfuse.runtime.backends.draws import Draws
from bnfuse.runtime.backends.execution import STATE, Compiled, Runner
from bnfuse.runtime.program import program as p
from bnfuse.runtime.state import averaged
from bnfuse.runtime.targets.target import Target

Pair = tuple[Compiled, Compiled]  # the programs of training and of evaluation with their code
HOST = (1, 3)  # kinds of devices of DLPack: CPU, and its pinned memory


@dataclasses.dataclass(frozen=True)
class Size:
    """The programs of one batch size in memory."""

    compiled: Pair
    train: Runner
    draws: Draws
    load: Callable[[Compiled], Runner]  # a program beside that of training

    @functools.cached_property
    def evaluate(self) -> Runner:
        """The program of evaluation, loaded when it is first asked for: some only train."""
        return self.load(self.compiled[1])

    @functools.cached_property
    def averaged(self) -> Runner:
        """The evaluation by the averages of parameters and running statistics."""
        return self.load(dataclasses.replace(self.compiled[1], program=averaged(self.evaluation)))

    @property
    def evaluation(self) -> p.Program:
        """The program of evaluation as data."""
        return self.compiled[1].program

    @property
    def batch(self) -> int:
        """How many samples a call takes: the first dimension of the data; 0 where the graph takes none."""
        return batch_of(self.train.program)

    def takes(self, values: Mapping[str, np.ndarray]) -> bool:
        """Tell whether values have the shapes of the inputs that they are named like."""
        inputs = self.train.program.inputs
        return all(name in inputs and inputs[name].shape == value.shape for name, value in values.items())


class Sizes:
    """All sizes of a step, by batch, and the one of the last call."""

    def __init__(self, compiled: Sequence[Pair], target: Target, world: World | None = None) -> None:
        self.target, self.world = target, world
        self.first = self.now = self._loaded(compiled[0], None)
        self.by_batch = {self.first.batch: self.first}
        for pair in compiled[1:]:
            self.add(pair)

    def _loaded(self, pair: Pair, beside: Runner | None) -> Size:
        check_ranks(pair[0].program, self.world)
        backend = backend_of(self.target)
        rank = self.world.rank if self.world is not None else 0
        train: Runner = backend.runner(of_rank(pair[0], rank), self.target, beside, self.world)

        def load(compiled: Compiled) -> Runner:
            return backend.runner(compiled, self.target, train, self.world)

        return Size(pair, train, Draws(pair[0].program, rank), load)

    def add(self, pair: Pair) -> None:
        """Load the programs of another batch size. Raises BnfuseError where they are of another network."""
        ours, theirs = self.first.train.program, pair[0].program
        for mine, other in ((ours.parameters, theirs.parameters), (ours.running, theirs.running)):
            places = [(name, ours.storages[tensor.storage], tensor.shape) for name, tensor in mine.items()]
            others = [(name, theirs.storages[tensor.storage], tensor.shape) for name, tensor in other.items()]
            if places != others:
                raise BnfuseError("a step's batch sizes must be of one network: this one has another state")
        if any(ours.regions.get(region) != theirs.regions.get(region) for region in STATE):
            raise BnfuseError("a step's batch sizes must be of one network and one optimizer")
        batch = batch_of(theirs)
        if batch in self.by_batch:
            raise BnfuseError(f"the step has a batch of {batch} already")
        self.by_batch[batch] = self._loaded(pair, self.first.train)

    @property
    def compiled(self) -> tuple[Pair, ...]:
        """The programs of all sizes with their code, the first one's first."""
        return tuple(size.compiled for size in self.by_batch.values())

    def choose(self, inputs: Sequence[Any]) -> Size:
        """Take the size that a call's inputs have; the first one, which refuses them, where there is none of it."""
        self.now = self.by_batch.get(rows_of(inputs), self.first)
        return self.now

    def fix(self, values: Mapping[str, np.ndarray]) -> None:
        """Use these values in the place of draws, in the size whose shapes they have (the first one refuses what has
        none of them). In the others nothing is fixed."""
        chosen = next((size for size in self.by_batch.values() if size.takes(values)), self.first)
        chosen.draws.fix(values)
        for size in self.by_batch.values():
            if size is not chosen:
                size.draws.fix({})

    def cut(self, data: Sequence[np.ndarray]) -> Iterator[tuple[Size, list[np.ndarray], int]]:
        """Cut data of any number of rows into batches that there are: each with its size and how many rows count. The
        last one is filled up by its own last row."""
        left, sizes = len(data[0]), sorted(self.by_batch)
        start = 0
        while left:
            fitting = [size for size in sizes if size >= left]
            batch = fitting[0] if fitting else sizes[-1]
            rows = min(batch, left)
            parts = [array[start : start + rows] for array in data]
            yield self.by_batch[batch], [filled(part, batch) for part in parts], rows
            start, left = start + rows, left - rows


def of_rank(compiled: Compiled, rank: int) -> Compiled:
    """Tell a program whose statistics are of some ranks' samples whether those of this rank are among them."""
    program = compiled.program
    if program.counts is None:
        return compiled
    counts = np.full(1, rank < program.counted_ranks, np.float32)
    initial = {**program.initial, program.counts: counts}
    return Compiled(dataclasses.replace(program, initial=initial), compiled.codes)


def check_ranks(program: p.Program, world: World | None) -> None:
    """Raise BnfuseError where a program is for another number of ranks than there are."""
    size = 1 if world is None else world.size
    if program.ranks != size:
        there = "this is one process alone" if world is None else f"there are {size}"
        raise BnfuseError(
            f"the step is compiled for {program.ranks} ranks, and {there}: start so many and open their world "
            "(world=), or compile the graph again"
            if program.ranks > 1
            else f"the step is compiled for one process alone, and there are {size} ranks: give them the graph itself"
        )


def filled(rows: np.ndarray, batch: int) -> np.ndarray:
    """Fill up to a batch by repeating the last row."""
    missing = batch - len(rows)
    return np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)]) if missing else rows


def batch_of(program: p.Program) -> int:
    """Give the first dimension of a program's data; 0 where it takes none."""
    shapes = [program.inputs[name].shape for name in program.signature["data"] if name in program.inputs]
    return shapes[0][0] if shapes and shapes[0] else 0


def rows_of(inputs: Sequence[Any]) -> int:
    """Give the first dimension of the first input; 0 where it does not say."""
    shape: Sequence[int] = getattr(inputs[0], "shape", ()) if inputs else ()
    return int(shape[0]) if len(shape) else 0


def lies_on_host(array: Any) -> bool:
    """Tell whether an array says of no GPU that it lies there."""
    device = getattr(array, "__dlpack_device__", None)
    if device is None:
        return getattr(array, "__cuda_array_interface__", None) is None
    return int(device()[0]) in HOST
