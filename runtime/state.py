"""What a step keeps from call to call: parameters, running statistics, the optimiser's moments and averages.

It is exchanged in the layout and by the names of the ONNX file, or by those of the torch module behind it
(bnfuse/graph/module_state.py), whose counts of batches are kept here as well.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
import safetensors.numpy

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import write_atomically
from bnfuse.core.tensor_files import read_safetensors
from bnfuse.fromtorch.tensors import as_array, as_tensors, is_tensor
from bnfuse.graph.module_state import COUNT, ModuleState, digest_of
from bnfuse.graph.state_matching import fitted, matched, require_all, statistic_of
from bnfuse.runtime.backends.execution import Runner
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.optim import Optimizer

MOMENT_PREFIX = "optimizer."
STEP_KEY = "optimizer.step"
ADDED_KEY = "optimizer.added"  # backward passes since the last update
AVERAGE_PREFIX = f"{MOMENT_PREFIX}average."
ACCUMULATED_PREFIX = f"{MOMENT_PREFIX}accumulated."
Places = dict[str, tuple[p.Storage, tuple[int, ...]]]  # by name: where a tensor lies, and its shape in the file


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict` did not find, by the names of the module or the graph, and what it did not take."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class State:
    """The state in a runner's memory, wherever that is. `model` is the graph's file, whose metadata tells the names of
    the module; without it nothing is known of a module."""

    def __init__(self, runner: Runner, optimizer: Optimizer | None, model: bytes = b"") -> None:
        self._runner, self._program, self._model = runner, runner.program, model
        self.tensors = {**self._program.parameters, **self._program.running}
        self._moments = moments_of(self._program, optimizer)
        self._begin = dict(optimizer.moments) if optimizer is not None else {}
        self._accumulated = mirrored(self._program, {p.PARAMETERS: p.ACCUMULATED}, self._program.signature["trainable"])
        self._averages = mirrored(self._program, {p.PARAMETERS: p.AVERAGE, p.RUNNING: p.AVERAGE_RUNNING}, self.tensors)
        if any(self._begin.values()):
            self.clear_moments()
        self.forwards = self._last = 0  # how many there were, and the last one whose statistics were taken over
        self.updates = 0  # how often running statistics moved
        self._counted: dict[str, int] = {}  # num_batches_tracked -> what it was before these updates

    @functools.cached_property
    def module(self) -> ModuleState:
        """What the torch module behind the graph calls its tensors."""
        metadata = {entry.key: entry.value for entry in self._file.metadata_props}
        return ModuleState.from_metadata(metadata)

    @property
    def _file(self) -> onnx.ModelProto:
        return onnx.ModelProto.FromString(self._model) if self._model else onnx.ModelProto()

    @property
    def has_average(self) -> bool:
        """Whether there is an average of parameters and running statistics."""
        return bool(self._averages)

    def read(self) -> dict[str, np.ndarray]:
        """Parameters and running statistics: copies."""
        return {name: self._runner.memory.read(tensor) for name, tensor in self.tensors.items()}

    def read_average(self) -> dict[str, np.ndarray]:
        """Read the averages of parameters and running statistics, by the names of these: copies."""
        return self._load(self._averages)

    def _load(self, places: Places) -> dict[str, np.ndarray]:
        return {name: self._runner.memory.load(s).reshape(shape) for name, (s, shape) in places.items()}

    def of_module(self, own: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Parameters and buffers as torch tensors by the names of the module that the graph was made of: what its
        `load_state_dict` takes. Tensors that no result depends on are not in it. `own` has those of the graph."""
        module = self.module
        names = module.names if module.is_known else {name: name for name in own}
        found = {name: own[graph_name] for name, graph_name in names.items() if graph_name in own}
        if module.constants:
            held = {tensor.name: tensor for tensor in self._file.graph.initializer if tensor.name in module.constants}
            arrays = {name: onnx.numpy_helper.to_array(tensor).copy() for name, tensor in held.items()}
            found |= {name: array for name, array in arrays.items() if digest_of(array) == module.constants[name]}
        return as_tensors(found | {name: np.array(count) for name, count in self.counts.items()})

    @property
    def counts(self) -> dict[str, int]:
        """How many batches the BatchNorms of the module have seen, by the names of its buffers."""
        module, running = self.module, self._program.running

        def moved(name: str) -> int:
            statistic = module.names.get(statistic_of(name), statistic_of(name))
            return self.updates * module.calls.get(name, 1) * (statistic in running)

        return {name: count + moved(name) for name, count in {**module.tracked, **self._counted}.items()}

    def count(self) -> None:
        """Count the batch of the last forward, whose running statistics take the place of the old ones: once."""
        self.updates += self._last != self.forwards
        self._last = self.forwards

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """Say how many batches BatchNorms have seen."""
        now = self.counts
        self._counted = {**now, **counts}
        self.updates = 0

    def restore(self, state: Mapping[str, Any], strict: bool = True, skip_head: bool = False) -> IncompatibleKeys:
        """Replace parameters and running statistics by those of a state, by the names of the graph or the module.

        Raises BnfuseError, and leaves all as it was, for shapes that differ, and with `strict` for names that are
        missing or unexpected: in one line all of them. Gives both lists.
        """
        if not isinstance(state, Mapping):
            what = (
                "a path: step.load reads checkpoints" if isinstance(state, str | os.PathLike) else type(state).__name__
            )
            raise BnfuseError(f"a state is a mapping of names to arrays, as module.state_dict() gives it, not {what}")
        module = ModuleState() if state.keys() == self.tensors.keys() else self.module
        found = matched(state, self.tensors, module, self._array)
        arrays = {name: self._array(value, f"the state's '{name}'") for name, value in found.values.items()}
        own = {name: (tensor.shape, np.dtype(tensor.dtype)) for name, tensor in self.tensors.items()}
        fit = fitted(arrays, own, self._classes, skip_head=skip_head)
        if strict:
            require_all(found.missing, found.unexpected, len(own), "strict=False takes what there is of it")
        self._write(fit.arrays)
        if found.tracked:
            self.set_counts(found.tracked)
        return IncompatibleKeys([*found.missing, *fit.head], list(found.unexpected))

    @property
    def _classes(self) -> int | None:
        logits = self._program.outputs.get(self._program.signature.get("logits") or "")
        return int(logits.shape[1]) if logits is not None and len(logits.shape) > 1 else None

    def _array(self, value: Any, what: str) -> np.ndarray:
        return as_array(value, what) if is_tensor(value) else self._runner.to_host(value, what)

    def _write(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self._runner.memory.write(self.tensors[name], array)
        self.begin_average()

    def begin_average(self) -> None:
        """Let the averages begin at the values as they are."""
        for name, (storage, _) in self._averages.items():
            self._runner.memory.store(storage, self._runner.memory.read(self.tensors[name]))

    def clear_moments(self) -> None:
        """Set the optimiser's moments back to before the first step."""
        for name, (storage, shape) in self._moments.items():
            moment = name.removeprefix(MOMENT_PREFIX).partition(".")[0]
            self._runner.memory.store(storage, np.full(shape, self._begin[moment], storage.dtype))

    def not_finite(self) -> str | None:
        """Name the first trained parameter, running statistic, moment or average that is not finite."""
        memory = self._runner.memory
        trained: list[str] = self._program.signature["trainable"]
        for name in (*trained, *self._program.running):
            if not np.isfinite(memory.read(self.tensors[name])).all():
                return name
        averages = {f"the average of {name}": place for name, place in self._averages.items()}
        for name, (storage, _) in (*self._moments.items(), *averages.items()):
            if not np.isfinite(memory.load(storage)).all():
                return name
        return None

    def whole(self) -> dict[str, np.ndarray]:
        """Read all that is the same on each of several ranks: parameters, running statistics, moments, averages."""
        averages = {f"{AVERAGE_PREFIX}{name}": value for name, value in self.read_average().items()}
        return {**self.read(), **self._load(self._moments), **averages}

    def added_up(self) -> dict[str, np.ndarray]:
        """Read the gradients that are added up since the last update."""
        return {f"{ACCUMULATED_PREFIX}{name}": value for name, value in self._load(self._accumulated).items()}

    def replace_whole(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Put what `whole`, and perhaps `added_up`, gave elsewhere in the place of all of it."""
        found = dict(tensors)
        averages, sums = (taken(found, prefix) for prefix in (AVERAGE_PREFIX, ACCUMULATED_PREFIX))
        moments = {name: found.pop(name) for name in list(found) if name.startswith(MOMENT_PREFIX)}
        self._write(found)
        self._store(self._averages, averages)
        self._store(self._moments, moments)
        self._store(self._accumulated, sums)

    def save(self, path: pathlib.Path, steps: int, added: int, metadata: Mapping[str, str]) -> None:
        """Write all as safetensors, with the optimiser's count of steps and how many backward passes are `added` up
        since the last one; the file is replaced as a whole."""
        tensors = self.whole()
        about = {**metadata, "format": "bnfuse", STEP_KEY: str(steps)}
        if counts := self.counts:
            about[COUNT] = json.dumps(counts)
        if added:
            tensors |= self.added_up()
            about[ADDED_KEY] = str(added)
        data = safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, about)
        write_atomically(path, data, durable=True)

    def load(self, path: str | os.PathLike[str]) -> tuple[int, int]:
        """Read what `save` wrote, and give the count of steps and of backward passes since: 0 where the file has no
        moments, or those of another optimiser, which begins anew then. An average that it has not begins anew too."""
        tensors, metadata = read_safetensors(path)
        steps, added = (counted(path, metadata.get(key, "0")) for key in (STEP_KEY, ADDED_KEY))
        kept = {name: tensors.pop(name) for name in list(tensors) if name.startswith(MOMENT_PREFIX)}
        averages, sums = (taken(kept, prefix) for prefix in (AVERAGE_PREFIX, ACCUMULATED_PREFIX))
        try:
            counts = counts_of(metadata)
            self.restore(tensors)
        except BnfuseError as error:
            raise BnfuseError(f"{path}: {error}") from None
        self.set_counts(counts)
        self._store(self._averages, averages)
        if not self._store(self._moments, kept):
            self.clear_moments()
            return 0, 0
        return steps, added if self._store(self._accumulated, sums) else 0

    def _store(self, places: Places, values: Mapping[str, np.ndarray]) -> bool:
        """Write the values where they belong, if all are there with their shapes and none besides."""
        if places.keys() != values.keys() or any(shape != values[name].shape for name, (_, shape) in places.items()):
            return False
        for name, (storage, _) in places.items():
            self._runner.memory.store(storage, values[name])
        return True


def counts_of(metadata: Mapping[str, str]) -> dict[str, int]:
    """Read the counts of batches of a checkpoint; one without any has none."""
    try:
        said = json.loads(metadata.get(COUNT, "{}"))
        return {str(name): int(count) for name, count in said.items()}
    except (AttributeError, TypeError, ValueError, RecursionError):
        raise BnfuseError(f"its {COUNT} is no list of counts") from None


def counted(path: str | os.PathLike[str], text: str) -> int:
    """Read a count of steps. Raises BnfuseError where the text is none."""
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise BnfuseError(f"{path}: its count of steps is '{text[:20]}': it must be a number of less than 16 digits")
    return int(text)


def taken(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Take out the tensors whose names begin so, by what follows."""
    return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}


def moments_of(program: p.Program, optimizer: Optimizer | None) -> Places:
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


def mirrored(program: p.Program, regions: Mapping[str, str], names: Iterable[str]) -> Places:
    """Say where these tensors' counterparts lie in other regions, by the region; none where the program lacks them."""
    found = {}
    for name in names:
        tensor = program.parameters.get(name) or program.running[name]
        held = program.storages[tensor.storage]
        if (region := regions.get(held.region)) in program.regions:
            found[name] = (dataclasses.replace(held, region=str(region)), tensor.shape)
    return found


def averaged(program: p.Program) -> p.Program:
    """Give an evaluation by the averages: the same program, over their regions."""
    instead = {p.PARAMETERS: p.AVERAGE, p.RUNNING: p.AVERAGE_RUNNING}
    storages = [dataclasses.replace(s, region=instead.get(s.region, s.region)) for s in program.storages]
    regions = {instead.get(name, name): size for name, size in program.regions.items()}
    return dataclasses.replace(program, storages=storages, regions=regions)
