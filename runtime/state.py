"""What a step keeps from call to call: parameters, running statistics and the optimiser's moments.

It is exchanged in the layout and by the names of the ONNX file.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import write_atomically
from bnfuse.core.tensor_files import read_safetensors
from bnfuse.runtime.backends.execution import Runner
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.optim import Optimizer

MOMENT_PREFIX = "optimizer."
STEP_KEY = "optimizer.step"


class State:
    """The state in a runner's memory, wherever that is."""

    def __init__(self, runner: Runner, optimizer: Optimizer | None) -> None:
        self._runner, self._program = runner, runner.program
        self.tensors = {**self._program.parameters, **self._program.running}
        self._moments = moments_of(self._program, optimizer)

    def read(self) -> dict[str, np.ndarray]:
        """Parameters and running statistics: copies."""
        return {name: self._runner.memory.read(tensor) for name, tensor in self.tensors.items()}

    def replace(self, state: Mapping[str, Any]) -> None:
        """Replace parameters and running statistics. Raises BnfuseError, and leaves all as it was, unless all are there
        with their shapes."""
        own = self.tensors
        missing, foreign = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or foreign:
            found = [f"lacks '{missing[0]}' ({len(missing)} of the graph's {len(own)} names)"] if missing else []
            found += [f"has '{foreign[0]}' ({len(foreign)} names), which the graph has not"] if foreign else []
            raise BnfuseError(f"the state {' and '.join(found)}: is it of this network?")
        arrays = {name: self._runner.to_host(state[name], f"the state's '{name}'") for name in own}
        for name, array in arrays.items():
            if array.shape != own[name].shape:
                raise BnfuseError(
                    f"the state's '{name}' has the shape {list(array.shape)}, not {list(own[name].shape)}"
                )
            if not np.can_cast(array.dtype, own[name].dtype, "same_kind"):
                raise BnfuseError(f"the state's '{name}' is {array.dtype}, not {own[name].dtype}")
        for name, array in arrays.items():
            self._runner.memory.write(own[name], array)

    def clear_moments(self) -> None:
        """Set the optimiser's moments back to before the first step."""
        for storage, shape in self._moments.values():
            self._runner.memory.store(storage, np.zeros(shape, storage.dtype))

    def not_finite(self) -> str | None:
        """Name the first trained parameter, running statistic or moment of the optimiser that is not finite."""
        memory = self._runner.memory
        trained: list[str] = self._program.signature["trainable"]
        for name in (*trained, *self._program.running):
            if not np.isfinite(memory.read(self.tensors[name])).all():
                return name
        for name, (storage, _) in self._moments.items():
            if not np.isfinite(memory.load(storage)).all():
                return name
        return None

    def save(self, path: pathlib.Path, steps: int, metadata: Mapping[str, str]) -> None:
        """Write all as safetensors, with the optimiser's count of steps; the file is replaced as a whole."""
        moments = {name: self._runner.memory.load(s).reshape(shape) for name, (s, shape) in self._moments.items()}
        tensors = {**self.read(), **moments}
        about = {**metadata, "format": "bnfuse", STEP_KEY: str(steps)}
        data = safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, about)
        write_atomically(path, data, durable=True)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Read what `save` wrote, and give the count of steps: 0 where the file has no moments, or those of another
        optimiser, which begins anew then."""
        tensors, metadata = read_safetensors(path)
        steps = metadata.get(STEP_KEY, "0")
        if not (steps.isascii() and steps.isdigit() and len(steps) < 16):
            raise BnfuseError(
                f"{path}: its count of steps is '{steps[:20]}': it must be a number of less than 16 digits"
            )
        moments = {name: tensors.pop(name) for name in list(tensors) if name.startswith(MOMENT_PREFIX)}
        try:
            self.replace(tensors)
        except BnfuseError as error:
            raise BnfuseError(f"{path}: {error}") from None
        own = self._moments
        if own.keys() != moments.keys() or any(shape != moments[name].shape for name, (_, shape) in own.items()):
            self.clear_moments()
            return 0
        for name, (storage, _) in own.items():
            self._runner.memory.store(storage, moments[name])
        return int(steps)


def moments_of(program: p.Program, optimizer: Optimizer | None) -> dict[str, tuple[p.Storage, tuple[int, ...]]]:
    """Cut the optimiser's buffers up by parameter: where each part lies, and its shape in the file."""
    if optimizer is None or not optimizer.moments or p.OPTIMIZER not in program.regions:
        return {}
    size = program.regions[p.OPTIMIZER] // len(optimizer.moments)
    found = {}
    for index, moment in enumerate(optimizer.moments):
        for name in program.signature["trainable"]:
            tensor = program.parameters[name]
            held = program.storages[tensor.storage]
            place = p.Storage(p.OPTIMIZER, index * size + held.offset, held.elements, held.dtype)
            found[f"{MOMENT_PREFIX}{moment}.{name}"] = (place, tensor.shape)
    return found
