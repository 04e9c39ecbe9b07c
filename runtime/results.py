"""The part of a step that is about what it gives back: outputs and gradients, copied or where they lie on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.exclusion import Exclusive, alone
from bnfuse.runtime.backends.execution import Runner, shared_regions
from bnfuse.runtime.program import program as p
from bnfuse.runtime.sizes import Sizes
from bnfuse.runtime.state import State
from bnfuse.runtime.targets.target import Target

if TYPE_CHECKING:
    from bnfuse.runtime.backends.cuda.array import DeviceArray


class Insides(Protocol):
    """What of a step the methods here work with."""

    target: Target
    steps: int
    _loss_scale: float
    _gradients_scale: float
    _sizes: Sizes
    _state: State

    @property
    def _train(self) -> Runner: ...

    def _on_device(self, tensors: Mapping[str, p.Tensor], name: str, kind: str) -> DeviceArray: ...


class Results(Exclusive):
    """What a step gives back."""

    @property
    @alone
    def outputs(self: Insides) -> dict[str, np.ndarray]:
        """All outputs of the file after the last phase that ran, by name: copies."""
        return {name: self._train.memory.read(tensor) for name, tensor in self._train.program.outputs.items()}

    @alone
    def gradients(self: Insides) -> dict[str, np.ndarray]:
        """Gradients by the names of the parameters: copies. Of several ranks the mean over them; with `accumulate` this
        rank's own."""
        program = self._train.program
        found = {name: self._train.memory.read(tensor) for name, tensor in program.gradients.items()}
        scale = self._gradients_scale * (1 if program.accumulates else program.ranks)
        return found if scale == 1 else {name: value / scale for name, value in found.items()}

    @property
    @alone
    def loss_scale(self: Insides) -> float:
        """With fp16 what the gradients begin with, and are divided by in the update. 1 otherwise.

        Of a graph without a loss, gradients of outputs must come in multiplied by it.
        """
        return self._loss_scale

    @loss_scale.setter
    @alone
    def loss_scale(self: Insides, scale: float) -> None:
        if self.target.precision != "fp16":
            raise BnfuseError(f"a step of precision {self.target.precision} has no loss scale: compile it for fp16")
        if not 0 < scale < float("inf"):
            raise BnfuseError(f"a loss scale of {scale} scales nothing: use a number above 0")
        self._loss_scale = float(scale)

    @property
    @alone
    def skipped(self: Insides) -> bool:
        """Whether the last update changed no parameter: with fp16, if a gradient was not finite. Waits for the step.

        The count of steps and the running statistics went on. A smaller `loss_scale` is the remedy.
        """
        program = self._train.program
        if program.finite is None or self.steps == 0:
            return False
        return not bool(self._train.memory.load(program.storages[program.finite])[0])

    @alone
    def device_output(self: Insides, name: str) -> DeviceArray:
        """Give an output of the file where it lies on the GPU. The next step writes over it."""
        return self._on_device(self._train.program.outputs, name, "output")

    @alone
    def device_gradient(self: Insides, name: str) -> DeviceArray:
        """Give the gradient of a parameter where it lies on the GPU, with fp16 times `loss_scale`; of several ranks the
        sum over them.

        The next step writes over it.
        """
        return self._on_device(self._train.program.gradients, name, "gradient of a parameter")

    @alone
    def device_state(self: Insides, name: str) -> DeviceArray:
        """Give a parameter or a running statistic where it lies on the GPU. Steps update it in place."""
        return self._on_device(self._state.tensors, name, "parameter or running statistic")

    def _on_device(self: Insides, tensors: Mapping[str, p.Tensor], name: str, kind: str) -> DeviceArray:
        if name not in tensors:
            raise BnfuseError(f"there is no {kind} '{name}': it is one of {', '.join(sorted(tensors)[:8])}, ...")
        return self._train.on_device("device arrays").array(tensors[name])

    @property
    @alone
    def stream(self: Insides) -> int:
        """The address of the CUDA stream that the step runs on: one of its own, until another is set."""
        return int(self._train.on_device("stream").stream)

    @stream.setter
    @alone
    def stream(self: Insides, stream: Any) -> None:
        """Set the stream, an address or one of torch, cupy or what has `__cuda_stream__`. Waits for what was begun."""
        self._train.on_device("stream").stream = stream

    @alone
    def synchronize(self: Insides) -> None:
        """Wait until the GPU has done all that it was given. On a CPU a call returns when it is done."""
        self._train.synchronize()

    @property
    def device_bytes(self: Insides) -> int:
        """Of all regions of memory, training's and evaluation's, and of the code."""
        programs = [compiled.program for pair in self._sizes.compiled for compiled in pair]
        first = programs[0]
        codes = {code for pair in self._sizes.compiled for compiled in pair for code in compiled.codes}
        apart = 0
        for other in programs[1:]:
            common = shared_regions(other.regions, first, other)
            shared = {name for name, size in common.items() if first.regions.get(name, -1) >= size}
            apart += sum(size for name, size in other.regions.items() if name not in shared)
        return sum(first.regions.values()) + apart + sum(map(len, codes))
