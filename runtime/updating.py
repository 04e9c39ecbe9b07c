"""The part of a step that is about its updates: gradients added up over several of them, their norm, the average.

for images, labels in data:          # with SGD(..., accumulate=4): an update at each fourth call
    step(images, labels)
step.flush()                         # and one of what is left over
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

from bnfuse.core.errors import BnfuseError
from bnfuse.parallel.world import World
from bnfuse.runtime.backends.exclusion import Exclusive, alone
from bnfuse.runtime.backends.execution import Runner, Scalars
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.optim import Optimizer
from bnfuse.runtime.state import State


class Insides(Protocol):
    """What of a step the methods here work with."""

    optimizer: Optimizer | None
    lr: float
    seed: int
    steps: int
    _added: int
    _loss_scale: float
    _gradients_scale: float
    _state: State

    @property
    def accumulate(self) -> int:
        """How many backward passes an update is of."""
        ...

    @property
    def world(self) -> World | None:
        """The ranks that run the step together."""
        ...

    @property
    def _train(self) -> Runner: ...

    @property
    def _count(self) -> int: ...

    def _run(self, phases: tuple[p.Phase, ...]) -> None: ...

    def _write_seed(self) -> None: ...


class Updating(Exclusive):
    """Updates of a step, and what they keep."""

    @property
    def accumulate(self: Insides) -> int:
        """How many backward passes an update is of."""
        return 1 if self.optimizer is None else self.optimizer.accumulate

    @property
    def pending(self: Insides) -> int:
        """How many backward passes have been added up since the last update."""
        return self._added

    @alone
    def flush(self: Insides) -> bool:
        """Update by the mean of the gradients that are added up, though they are fewer than `accumulate`.

        Tells whether there were any; without, nothing is changed.
        """
        if not self._added:
            return False
        self._run(("update",))
        return True

    @alone
    def discard(self: Insides) -> None:
        """Forget the gradients that are added up: the next update is of those that follow alone."""
        self._added = 0

    @property
    @alone
    def gradient_norm(self: Insides) -> float:
        """The norm of all gradients of the last update, before they were clipped, of their mean where several were
        added up; 0 before the first one. Waits for the step.

        Raises BnfuseError where the optimiser has no `clip_norm`: infinity clips nothing, and has the norm taken.
        """
        program = self._train.program
        if program.norm is None:
            raise BnfuseError(
                "the step takes no norm of its gradients: compile it with clip_norm= in the optimiser (infinity clips "
                "nothing)"
            )
        return float(self._train.memory.load(program.storages[program.norm])[0])

    @property
    def kept_bytes(self: Insides) -> dict[str, int]:
        """What an update needs beside parameters and gradients, in bytes of memory, by what it is for."""
        regions = self._train.program.regions
        found = {
            "moments": regions.get(p.OPTIMIZER, 0),
            "gradients of several batches": regions.get(p.ACCUMULATED, 0),
            "averages": regions.get(p.AVERAGE, 0) + regions.get(p.AVERAGE_RUNNING, 0),
        }
        return {what: size for what, size in found.items() if size}

    @property
    def _count(self: Insides) -> int:
        """How many steps were begun: what is drawn, is drawn anew for each of them."""
        return self.steps * self.accumulate + self._added

    @property
    def _ending(self: Insides) -> tuple[p.Phase, ...]:
        """The phases that follow backward: with an update where it is its turn."""
        if not self._train.program.accumulates:
            return ("update",)
        return ("accumulate", "update") if self._added + 1 >= self.accumulate else ("accumulate",)

    def _scalars(self: Insides, phases: Sequence[p.Phase]) -> dict[p.Phase, Scalars]:
        """Give what launches of the phases take. What begins is counted: an update, gradients that are added."""
        found: dict[p.Phase, Scalars] = {}
        for phase in phases:
            drawn = self._count
            if phase == "backward":
                self._gradients_scale = self._loss_scale
                self._write_seed()
            elif phase == "accumulate":
                self._added += 1
            elif phase == "update":
                self.steps += 1
            if self._train.program.whole(phase).commits:
                self._state.count()
            ema = None if self.optimizer is None else self.optimizer.ema
            found[phase] = {
                "lr": self.lr,
                "step": self.steps if phase == "update" else drawn,
                "seed": seed_of(self.seed, 0 if self.world is None else self.world.rank),
                "loss_scale": self._gradients_scale,
                "divisor": (self._added or self._gradients_scale) * self._train.program.ranks,
                "keep": int(self._added > 1),
                "factor": 1 / self._gradients_scale,
                "share": 0.0 if ema is None else ema.share(max(self.steps, 1)),
            }
            if phase == "update":
                self._added = 0
        return found


def seed_of(seed: int, rank: int) -> int:
    """Give the seed that kernels draw from for the samples of a rank; the step's own for the first one."""
    return seed if rank == 0 else zlib.crc32(f"{seed} of rank {rank}".encode())


def require_average(state: State) -> None:
    """Raise BnfuseError where a step keeps no average."""
    if not state.has_average:
        raise BnfuseError("the step keeps no average of its weights: compile it with ema= in the optimiser")
