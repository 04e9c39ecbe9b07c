"""Gradients of all parameters as torch's tensors, which nothing that runs later writes to.

Lent      on a CPU they are handed out as they lie: backward writes elsewhere as long as somebody has one
Copied    on a GPU, whose graphs have their addresses in them, they are copied out, all in one go

Either way they are views of one flat tensor.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch

from bnfuse.runtime import Step
from bnfuse.runtime.hosting import GradientViews

UNSHARED = 2  # uses of a tensor's storage where only that tensor, and who asks, have it
KEPT = 2  # flat tensors that are used in turns, where gradients of the step before are still there in the next


class Gradients(abc.ABC):
    """The gradients of a step, of one batch size."""

    def __init__(self, views: GradientViews) -> None:
        self.names, self.slices = list(views.slices), views.slices
        self.shapes = [views.shapes[name] for name in self.names]
        self.sizes, self.places, end = [], [], 0
        for part in views.slices.values():
            self.sizes += [part.start - end] * (part.start > end)
            self.places.append(len(self.sizes))
            self.sizes.append(part.stop - part.start)
            end = part.stop
        self.sizes += [views.flat.shape[0] - end] * (views.flat.shape[0] > end)

    @abc.abstractmethod
    def begin(self) -> None:
        """Say that a backward is about to write to them."""

    @abc.abstractmethod
    def flat(self, start: int, stop: int | None) -> torch.Tensor:
        """Give these elements of all gradients, which nothing writes to any more."""

    def some(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Give those of some parameters, which are final; they lie next to each other, or nearly so."""
        start = min((self.slices[name].start for name in names), default=0)
        stop = max((self.slices[name].stop for name in names), default=0)
        flat, shapes = self.flat(start, stop), dict(zip(self.names, self.shapes, strict=True))
        parts = {name: (self.slices[name].start - start, self.slices[name].stop - start) for name in names}
        return {name: flat[first:last].view(shapes[name]) for name, (first, last) in parts.items()}

    def all(self) -> dict[str, torch.Tensor]:
        """Give those of all parameters, by name."""
        parts = self.flat(0, None).split_with_sizes(self.sizes)
        found = zip(self.names, self.places, self.shapes, strict=True)
        return {name: parts[place].view(shape) for name, place, shape in found}


class Lent(Gradients):
    """Gradients where the step has them."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.gradient_views())
        self.step = step
        self._held: list[Held] = []

    def begin(self) -> None:
        """Let backward write where nobody has a view."""
        free = next((held for held in self._held if held.is_free()), None)
        if free is None:
            free = Held(self.step)
            self._held = self._held[-KEPT + 1 :]
        else:
            self._held.remove(free)
            self.step.gradients_to(free.place)
        self._held.append(free)

    def flat(self, start: int, stop: int | None) -> torch.Tensor:
        """Give these elements of all gradients, which nothing writes to any more."""
        return self._held[-1].tensor()[start:stop]


class Held:
    """One place for gradients, and what torch has of it."""

    def __init__(self, step: Step) -> None:
        self.place = step.another_gradients()
        step.gradients_to(self.place)
        self.array = step.gradient_views().flat
        self._tensor = as_torch(self.array)

    def tensor(self) -> torch.Tensor:
        """Give all of it as a tensor. What moves a view of it into memory of several processes (share_memory, a queue)
        moves all that are views of the same: what is here is then nobody's."""
        if self._tensor.data_ptr() != self.array.ctypes.data:
            self._tensor = as_torch(self.array)
        return self._tensor

    def is_free(self) -> bool:
        """Tell whether nobody has a view of it."""
        return uses(self.tensor()) == UNSHARED


class Copied(Gradients):
    """Copies of gradients. torch's allocator alone uses their memory again: it knows which streams still read there
    (`record_stream`), and what a captured CUDA graph will write to."""

    def __init__(self, step: Step) -> None:
        views = step.gradient_views()
        super().__init__(views)
        self.source = as_torch(views.flat)

    def begin(self) -> None:
        """Do nothing: what was handed out is elsewhere."""

    def flat(self, start: int, stop: int | None) -> torch.Tensor:
        """Give a copy of these elements of all gradients."""
        return self.source[start:stop].clone()


def uses(tensor: torch.Tensor) -> int:
    """Count who has a tensor's memory: tensors, arrays that are views of them, and who asks."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def as_torch(view: Any) -> torch.Tensor:
    """Take a view of a step's memory as torch's."""
    with torch.inference_mode(False):
        return torch.from_dlpack(view)
