"""What a step draws for itself: places of samples once an epoch, virtual samples and random values each step.

Everything follows from (seed, epoch) or (seed, steps done), random values from the rank too, and is sent to the step's
memory only when it has changed. Virtual samples are the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.sampling import NOTHING, Sampling, virtual_samples
from bnfuse.runtime.backends.execution import check_input
from bnfuse.runtime.program import program as p

PerChannel = float | Sequence[float]


def sampling_of(program: p.Program) -> Sampling:
    """Read what the inputs of a program draw."""
    return Sampling.from_json(program.sampling) if program.sampling else NOTHING


@dataclasses.dataclass
class Draws:
    """`virtual_statistics` are mean and standard deviation of the data that is fed, for all channels or for each."""

    program: p.Program
    rank: int = 0  # random values of operators are others on each; places and virtual samples are the same
    sampling: Sampling = dataclasses.field(init=False)
    fixed: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    _statistics: tuple[np.ndarray, np.ndarray] = (np.zeros(1, np.float32), np.ones(1, np.float32))
    _sent: dict[str, Any] = dataclasses.field(default_factory=dict)  # of each input what its memory was drawn from
    _pending: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sampling = sampling_of(self.program)
        for name in self.sampling.random:
            tensor = self.program.inputs.get(name)
            if tensor is None or math.prod(tensor.shape) != self.program.storages[tensor.storage].elements:
                raise ValueError(f"there is no room for what '{name}' draws")

    @property
    def virtual_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of virtual samples, for all channels or for each."""
        return self._statistics

    @virtual_statistics.setter
    def virtual_statistics(self, given: tuple[PerChannel, PerChannel]) -> None:
        """Set them, or raise BnfuseError for what is no such pair."""
        try:
            mean, std = (np.atleast_1d(np.asarray(values, np.float32)) for values in given)
        except (TypeError, ValueError):
            raise BnfuseError("statistics of virtual samples are a pair: mean and standard deviation") from None
        for name in self.sampling.virtual:
            channels = self.program.inputs[name].shape[1]
            if any(values.ndim != 1 or len(values) not in (1, channels) for values in (mean, std)):
                raise BnfuseError(f"statistics of virtual samples have {channels} channels: give one number, or each's")
        if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std >= 0).all()):
            raise BnfuseError("statistics of virtual samples must be finite, and no deviation below 0")
        self._statistics = mean, std
        self._forget(self.sampling.virtual)

    def fix(self, values: Mapping[str, np.ndarray]) -> None:
        """Use these values, and no others, in the place of draws."""
        checked = {name: self._checked(name, value) for name, value in values.items()}
        self._forget([*self.fixed, *checked])
        self.fixed = checked

    def changed(self, *, seed: int, epoch: int, step: int) -> dict[str, np.ndarray]:
        """Draw the inputs whose values are others than those that were sent."""
        found: dict[str, np.ndarray] = {}
        wanted: dict[str, Any] = {
            **dict.fromkeys(self.sampling.places, ("places", seed, epoch)),
            **dict.fromkeys(self.sampling.virtual, ("virtual", seed, step)),
            **dict.fromkeys(self.sampling.random, ("random", seed, step)),
            **dict.fromkeys(self.fixed, "fixed"),
        }
        late = [name for name, key in wanted.items() if self._sent.get(name) != key]
        if any(name in self.sampling.places and name not in self.fixed for name in late):
            places = self.sampling.offsets(seed=seed, epoch=epoch)
            found |= {name: places[name] for name in late if name in places}
        mean, std = (values.tolist() for values in self._statistics)
        for name in late:
            if name in self.fixed:
                found[name] = self.fixed[name]
            elif name in self.sampling.random:
                tensor, random = self.program.inputs[name], self.sampling.random[name]
                own = f"{name}@{self.rank}" if self.rank else name
                found[name] = random.draw(tensor.shape, tensor.dtype, seed=seed, step=step, name=own)
            elif name in self.sampling.virtual:
                shape = self.program.inputs[name].shape
                found[name] = virtual_samples(shape, mean, std, seed=seed, step=step)
        self._pending = {name: wanted[name] for name in late}
        return found

    def sent(self) -> None:
        """Note that what `changed` gave last is in the step's memory."""
        self._sent |= self._pending

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._sent.pop(name, None)

    def _checked(self, name: str, array: np.ndarray) -> np.ndarray:
        if name in self.sampling.places:
            if not np.issubdtype(array.dtype, np.integer):
                raise BnfuseError(f"input '{name}' is {array.dtype}: where a sample lies is int64")
            self.sampling.check(name, array)
        elif name in self.sampling.virtual or name in self.sampling.random:
            check_input(name, self.program.inputs[name], array.shape, array.dtype)
        else:
            known = ", ".join([*self.sampling.places, *self.sampling.virtual, *self.sampling.random][:5]) or "none"
            raise BnfuseError(f"input '{name}' is none that the step draws: those are {known}")
        return array.astype(self.program.inputs[name].dtype)
