"""The part of a step that is about the ranks that run it together.

step = compile_step(graph, optimizer=SGD(lr=0.1), world=open_world())    # begins with the state of rank 0
step(images, labels)                                                     # this rank's part of the batch
step.same_everywhere()                                                   # or which ranks went astray
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Protocol

import safetensors.numpy

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import some
from bnfuse.parallel.ranks import BUCKET, WIRES, Ranks
from bnfuse.parallel.world import World
from bnfuse.runtime.backends.draws import Draws
from bnfuse.runtime.backends.exclusion import Exclusive, alone
from bnfuse.runtime.program import optim
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.optim import Optimizer
from bnfuse.runtime.sizes import Sizes
from bnfuse.runtime.state import State


@dataclasses.dataclass
class Shared:
    """What ranks have agreed on."""

    batch: int = -1  # of the last call
    virtual: bool = False  # whether virtual samples were seen to be the same
    bucket: int = BUCKET


class Insides(Protocol):
    """What of a step the methods here work with."""

    optimizer: Optimizer | None
    steps: int
    seed: int
    _added: int
    _state: State
    _sizes: Sizes
    _shared: Shared

    @property
    def world(self) -> World | None:
        """The ranks that run the step together."""
        ...

    @property
    def program(self) -> p.Program:
        """The program of training."""
        ...


class Together(Exclusive):
    """A step as one of several ranks."""

    _sizes: Sizes

    @property
    def world(self) -> World | None:
        """The ranks that run the step together; None for one process alone."""
        return self._sizes.world

    @property
    def ranks(self: Insides) -> Ranks:
        """What the step is compiled for."""
        size = 1 if self.world is None else self.world.size
        return Ranks(size, self._shared.bucket, wire_of(self.program), p.MAPPED in self.program.regions)

    @alone
    def share_state(self: Insides) -> None:
        """Give every rank the state of rank 0: parameters, statistics, what the optimiser keeps, the count of steps,
        and gradients that are added up since: the mean over ranks that all have the same is theirs. All ranks call it;
        of one process alone nothing changes.

        Raises BnfuseError where the ranks' steps are not the same.
        """
        if (world := self.world) is None:
            return
        require_same(world, likeness(self.program, self.optimizer))
        counts = json.dumps([self.steps, self._added, self._state.counts]) if world.rank == 0 else ""
        state = {**self._state.whole(), **(self._state.added_up() if self._added else {})} if world.rank == 0 else {}
        whole = safetensors.numpy.save(state) if world.rank == 0 else b""
        steps, added, batches = json.loads(world.broadcast(counts.encode()))
        tensors = world.broadcast(whole)
        if world.rank:
            self._state.replace_whole(safetensors.numpy.load(tensors))
            self._state.set_counts(batches)
        self.steps, self._added = steps, added

    @alone
    def same_everywhere(self: Insides) -> None:
        """Compare the state of all ranks, by checksums. All ranks call it, and all raise the same.

        Raises BnfuseError that names the ranks whose state is another one than that of most, and tensors that show it.
        Waits for the step.
        """
        if (world := self.world) is None:
            return
        own = {name: zlib.crc32(array.tobytes()) for name, array in self._state.whole().items()}
        own["the count of steps"] = self.steps
        said = [json.loads(text) for text in world.gather(json.dumps(own).encode())]
        if found := astray(said):
            raise BnfuseError(found)


def wire_of(program: p.Program) -> str:
    """Say what gradients are on their way between ranks."""
    sent = (b.storage for launch in program.launches if launch.kernel == p.SUM for b in launch.buffers)
    return WIRES[1] if any(program.storages[storage].dtype == "bfloat16" for storage in sent) else WIRES[0]


def agree_on_virtual(step: Insides, draws: Draws) -> None:
    """See, in the first call, that all ranks draw the same virtual samples: their statistics are not exchanged."""
    world = step.world
    if world is None or step._shared.virtual or not draws.sampling.virtual:
        return
    own = json.dumps([step.seed, *(values.tolist() for values in draws.virtual_statistics)])
    said = [text.decode() for text in world.gather(own.encode())]
    if others := [rank for rank, text in enumerate(said) if text != said[0]]:
        raise BnfuseError(
            f"{ranks_named(others)} {has(others)} another seed or virtual_statistics than rank 0, and would draw other "
            "virtual samples: set the same on all ranks"
        )
    step._shared.virtual = True


def agree_on_batch(step: Insides, batch: int) -> None:
    """See that all ranks were given as many samples: their gradients count alike in the mean. A step of one batch size
    is asked once, one of several in each call, for some ranks alone may be given another one than last time."""
    world = step.world
    if world is None or (batch == step._shared.batch and len(step._sizes.by_batch) == 1):
        return
    said = [int(text) for text in world.gather(str(batch).encode())]
    if len(set(said)) > 1:
        raise BnfuseError(f"the ranks were given batches of {said} samples: give all of them as many")
    step._shared.batch = batch


def likeness(program: p.Program, optimizer: Optimizer | None) -> str:
    """Give a checksum of what must be the same on all ranks: state, exchanges, optimiser."""
    places = {name: (t.shape, t.dtype) for name, t in {**program.parameters, **program.running}.items()}
    exchanges = [
        (launch.phase, launch.kernel, [dataclasses.astuple(program.storages[b.storage])[2:] for b in launch.buffers])
        for launch in program.launches
        if launch.exchanges
    ]
    boxes = [(storage.offset, storage.bytes) for storage in program.storages if storage.region == p.MAPPED]
    told = repr((places, exchanges, boxes, optim.to_data(optimizer), program.ranks))
    return hashlib.sha256(told.encode()).hexdigest()


def require_same(world: World, own: str) -> None:
    """Raise BnfuseError where ranks have another step than rank 0."""
    said = world.gather(own.encode())
    if others := [rank for rank, text in enumerate(said) if text != said[0]]:
        raise BnfuseError(
            f"{ranks_named(others)} {has(others)} another step than rank 0 (graph, optimizer or batch): compile the "
            "same one on all ranks"
        )


def astray(said: Sequence[dict[str, int]]) -> str | None:
    """Say which ranks' checksums are others than those of most; None where all are the same."""
    keys = [tuple(sorted(one.items())) for one in said]
    usual, count = collections.Counter(keys).most_common(1)[0]
    if count == len(keys):
        return None
    others = [rank for rank, key in enumerate(keys) if key != usual]
    first = said[keys.index(usual)]
    names = [name for name in first if any(said[rank].get(name) != first[name] for rank in others)]
    who = ranks_named(range(len(said))) if 2 * count <= len(keys) else ranks_named(others)
    apart = "have" if 2 * count <= len(keys) else has(others)
    return (
        f"{who} {apart} gone astray: the state differs in {len(names)} of {len(first)} tensors ({some(names)}): go on "
        "from the last checkpoint"
    )


def ranks_named(ranks: Sequence[int]) -> str:
    """Write a list of ranks."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {some([str(rank) for rank in ranks])}"


def has(ranks: Sequence[int]) -> str:
    """Write the verb that goes with them."""
    return "has" if len(ranks) == 1 else "have"
