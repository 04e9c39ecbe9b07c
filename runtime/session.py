"""A compiled step at work: its state, and the calls that run its launches.

State (parameters, running statistics, the optimiser's moments) lives in the step and is updated in place; the
caller's arrays are never touched. It is exchanged in the layout and by the names of the ONNX file.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import safetensors
import safetensors.numpy

from bnfuse.errors import BnfuseError
from bnfuse.io import write_atomically
from bnfuse.runtime import program as p
from bnfuse.runtime.build import Library
from bnfuse.runtime.kernels.kernel import Target
from bnfuse.runtime.memory import Memory
from bnfuse.runtime.optim import Optimizer
from bnfuse.runtime.targets import features_of, missing_features, start_threads

T = TypeVar("T")

MOMENT_PREFIX = "optimizer."
STEP_KEY = "optimizer.step"


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


class Runner:
    """Executes the launches of one program. Code for another processor can be kept and exported, not run."""

    def __init__(self, compiled: Compiled, mcpu: str, shared: Mapping[str, np.ndarray] | None = None) -> None:
        self.program = compiled.program
        self.memory = Memory(compiled.program, shared)
        self.mcpu, self.missing = mcpu, missing_features(features_of(mcpu))
        if not self.missing:
            self.library = Library(compiled.program.kernels, compiled.codes)
            self.calls = {phase: [self._call(launch) for launch in self.program.phase(phase)] for phase in p.PHASES}

    def _call(self, launch: p.Launch) -> tuple[Any, list[Any], list[tuple[int, str]]]:
        """Function, arguments, and which of them have to be filled in when the step runs."""
        arguments: list[Any] = []
        late = []
        for argument in launch.arguments:
            if isinstance(argument, p.Scalar):
                late.append((len(arguments), argument.name))
                arguments.append(0.0)
            else:
                arguments.append(self.memory.tensor(argument.storage) if isinstance(argument, p.Buffer) else argument)
        return self.library.functions[launch.kernel], arguments, late

    def run(self, phase: p.Phase, scalars: Mapping[str, Any]) -> float:
        """All launches of a phase; the seconds that they took."""
        self._check_cpu()
        start = time.perf_counter()
        for function, arguments, late in self.calls[phase]:
            for index, name in late:
                arguments[index] = scalars[name]
            function(*arguments)
        return time.perf_counter() - start

    def profile(self, phase: p.Phase, scalars: Mapping[str, Any]) -> list[LaunchTime]:
        """The same, each launch timed."""
        self._check_cpu()
        times = []
        for launch, (function, arguments, late) in zip(self.program.phase(phase), self.calls[phase], strict=True):
            for index, name in late:
                arguments[index] = scalars[name]
            start = time.perf_counter()
            function(*arguments)
            seconds = time.perf_counter() - start
            work = self.program.works[launch.kernel] if self.program.works else None
            times.append(LaunchTime(phase, launch.node, self.program.kernels[launch.kernel], seconds, work))
        return times

    def _check_cpu(self) -> None:
        if self.missing:
            raise BnfuseError(
                f"the step was compiled for {self.mcpu}; this CPU lacks {', '.join(self.missing[:4])}: "
                f"export it and run it there, or compile it for cpu"
            )

    def feed(self, names: Sequence[str], arrays: Sequence[Any]) -> None:
        """Copy the inputs into the step's memory, checked against the types of the file."""
        if len(arrays) != len(names):
            raise BnfuseError(f"the step takes {len(names)} inputs ({', '.join(names)}), not {len(arrays)}")
        for name, given in zip(names, arrays, strict=True):
            tensor = self.program.inputs[name]
            array = as_numpy(given, f"input '{name}'")
            if array.shape != tensor.shape:
                raise BnfuseError(
                    f"input '{name}' has the shape {list(array.shape)}, the graph takes {list(tensor.shape)}"
                )
            if not np.can_cast(array.dtype, tensor.dtype, "same_kind"):
                raise BnfuseError(f"input '{name}' is {array.dtype}, the graph takes {tensor.dtype}")
            np.copyto(self.memory.array(tensor), array, casting="same_kind")


class Step:
    """A training step: `loss = step(images, labels)`. Made by `compile_step` or `load_step`."""

    def __init__(
        self,
        training: Compiled,
        evaluation: Compiled,
        *,
        target: Target,
        optimizer: Optimizer | None = None,
        model: bytes = b"",
    ) -> None:
        start_threads(target.threads)
        self.target, self.optimizer, self.model = target, optimizer, model
        self._compiled = (training, evaluation)
        self._train = Runner(training, target.mcpu)
        held = self._train.memory.regions
        shared = {name: held[name] for name in (p.PARAMETERS, p.RUNNING, p.ARENA) if name in held}
        self._evaluate = Runner(evaluation, target.mcpu, shared)
        self.lr = optimizer.lr if optimizer is not None else 0.0
        self.steps = 0
        self.times: dict[str, float] = dict.fromkeys(p.PHASES, 0.0)
        self.seed = 0
        self._done: p.Phase | None = None  # the last phase whose results the next one finds where it reads them

    @property
    def program(self) -> p.Program:
        return self._train.program

    @property
    def report(self) -> p.Report:
        return self.program.report

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what a call takes, in its order: data, labels, offsets."""
        roles = self.program.roles
        wanted = (*roles["data"], *roles["labels"], *roles["offsets"])
        return tuple(name for name in wanted if name in self.program.inputs)

    # -- running -----------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any) -> float:
        """One step: forward, backward, and with an optimiser the update. Returns the loss."""
        loss = self.forward(*inputs)
        self.backward()
        self.update()
        return loss

    def forward(self, *inputs: Any) -> float:
        """The forward phase: loss, logits and new running statistics. State stays as it is."""
        self._done = None
        self._train.feed(self.inputs, inputs)
        self._check_labels()
        self.times["forward"] = self._train.run("forward", self._scalars())
        self._done = "forward"
        return float(self._output(self.program.roles["loss"]).reshape(()))

    def backward(self) -> None:
        """The backward phase, after `forward`: all gradients."""
        self._follow("forward", "backward needs a forward before it, with no evaluate in between")
        self.times["backward"] = self._train.run("backward", self._scalars())
        self._done = "backward"

    def update(self) -> None:
        """The update phase, after `backward`: parameters, where there is an optimiser, and running statistics."""
        self._update(self._train.run)

    def _update(self, run: Callable[[p.Phase, Mapping[str, Any]], T]) -> T:
        """The update phase, its launches by `run`, and what that gives."""
        self._follow("backward", "update needs a backward before it: it applies gradients once")
        start = time.perf_counter()
        self.steps += 1
        found = run("update", self._scalars())
        for name, tensor in self.program.new_running.items():
            np.copyto(self._running(name), self._train.memory.array(tensor))
        self.times["update"] = time.perf_counter() - start
        return found

    def evaluate(self, *data: Any) -> np.ndarray:
        """Logits by the running statistics instead of the batch's, as after training."""
        names = [name for name in self.program.roles["data"] if name in self._evaluate.program.inputs]
        self._evaluate.feed(names, data)
        if self._done == "forward":
            self._done = None  # both share the arena
        self._evaluate.run("forward", self._scalars())
        (logits,) = self._evaluate.program.outputs.values()
        return self._evaluate.memory.array(logits).copy()

    def profile(self, *inputs: Any) -> list[LaunchTime]:
        """One step, launch by launch. It is a whole step: state changes as it does in a call."""
        self._done = None
        self._train.feed(self.inputs, inputs)
        self._check_labels()
        times = self._train.profile("forward", self._scalars())
        times += self._train.profile("backward", self._scalars())
        self._done = "backward"
        return times + self._update(self._train.profile)

    def _follow(self, phase: p.Phase, otherwise: str) -> None:
        """Use up the results of a phase: backward writes over the maps that forward left in the arena."""
        if self._done != phase:
            raise BnfuseError(otherwise)
        self._done = None

    def _scalars(self) -> dict[str, Any]:
        return {"lr": self.lr, "step": self.steps, "seed": self.seed}

    def _check_labels(self) -> None:
        """Labels index the logits: a kernel must not be led outside of them."""
        logits = self.program.outputs.get(self.program.roles["logits"] or "")
        for name in self.program.roles["labels"]:
            tensor = self.program.inputs.get(name)
            if logits is None or tensor is None or not np.issubdtype(tensor.dtype, np.integer):
                continue
            labels = self._train.memory.array(tensor)
            labels = labels[labels != self.program.ignored_label]
            if labels.size and not 0 <= labels.min() <= labels.max() < logits.shape[1]:
                raise BnfuseError(
                    f"input '{name}' has labels from {labels.min()} to {labels.max()}: "
                    f"the graph has the classes 0 to {logits.shape[1] - 1}"
                )

    # -- results -----------------------------------------------------------------------------------------------

    @property
    def outputs(self) -> dict[str, np.ndarray]:
        """All outputs of the file after the last phase that ran, by name: copies."""
        return {name: self._output(name).copy() for name in self.program.outputs}

    def gradients(self) -> dict[str, np.ndarray]:
        """Gradients by the names of the parameters: copies."""
        return {name: self._train.memory.array(t).copy() for name, t in self.program.gradients.items()}

    def _output(self, name: str) -> np.ndarray:
        return self._train.memory.array(self.program.outputs[name])

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        """Parameters and running statistics: copies, in the layout of the file."""
        return {name: array.copy() for name, array in self._state().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace parameters and running statistics. All must be there, with their shapes."""
        own = self._state()
        missing, foreign = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or foreign:
            what = f"lacks '{missing[0]}'" if missing else f"has '{foreign[0]}', which the graph has not"
            raise BnfuseError(
                f"the state {what} ({len(missing)} missing, {len(foreign)} unknown): is it of this network?"
            )
        arrays = {name: as_numpy(state[name], f"the state's '{name}'") for name in own}
        for name, array in arrays.items():
            if array.shape != own[name].shape:
                raise BnfuseError(
                    f"the state's '{name}' has the shape {list(array.shape)}, not {list(own[name].shape)}"
                )
            if not np.can_cast(array.dtype, own[name].dtype, "same_kind"):
                raise BnfuseError(f"the state's '{name}' is {array.dtype}, not {own[name].dtype}")
        for name, array in arrays.items():
            np.copyto(own[name], array, casting="same_kind")

    def save(self, path: str | pathlib.Path) -> None:
        """Write state and the optimiser's state as safetensors; the file is replaced as a whole."""
        tensors = {**self._state(), **self._moments()}
        metadata = {"format": "bnfuse", STEP_KEY: str(self.steps)}
        data = safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, metadata)
        write_atomically(pathlib.Path(path), data)

    def load(self, path: str | pathlib.Path) -> None:
        """Read what `save` wrote. The optimiser starts anew where the file has no state, or that of another one."""
        tensors, metadata = read_safetensors(pathlib.Path(path))
        steps = metadata.get(STEP_KEY, "0")
        if not (steps.isascii() and steps.isdigit()):
            raise BnfuseError(f"{path}: its count of steps is '{steps[:20]}', no number")
        moments = {name: tensors.pop(name) for name in list(tensors) if name.startswith(MOMENT_PREFIX)}
        try:
            self.load_state_dict(tensors)
        except BnfuseError as error:
            raise BnfuseError(f"{path}: {error}") from None
        own = self._moments()
        fits = own.keys() == moments.keys() and all(own[name].shape == moments[name].shape for name in own)
        self.reset_optimizer()
        if fits:
            self.steps = int(steps)
            for name, array in own.items():
                array[...] = moments[name]

    def reset_optimizer(self) -> None:
        """The optimiser as before the first step."""
        self.steps = 0
        for array in self._moments().values():
            array[...] = 0

    def _state(self) -> dict[str, np.ndarray]:
        tensors = {**self.program.parameters, **self.program.running}
        return {name: self._train.memory.array(tensor) for name, tensor in tensors.items()}

    def _running(self, name: str) -> np.ndarray:
        return self._train.memory.array(self.program.running[name])

    def _moments(self) -> dict[str, np.ndarray]:
        """The optimiser's buffers, cut up by parameter as the file has them."""
        block = self._train.memory.regions.get(p.OPTIMIZER)
        if block is None or self.optimizer is None:
            return {}
        size = self.program.regions[p.OPTIMIZER] // len(self.optimizer.moments)
        found = {}
        for index, moment in enumerate(self.optimizer.moments):
            for name in self.program.roles["trainable"]:
                tensor = self.program.parameters[name]
                storage = self.program.storages[tensor.storage]
                start = index * size + storage.offset
                view = block[start : start + storage.bytes].view(storage.dtype).reshape(tensor.shape)
                found[f"{MOMENT_PREFIX}{moment}.{name}"] = view
        return found

    def export(self, path: str | pathlib.Path) -> None:
        """Write the step, its code, state and model as one file (artefact.py)."""
        from bnfuse.runtime.artefact import export_step

        export_step(self, pathlib.Path(path))

    @property
    def compiled(self) -> tuple[Compiled, Compiled]:
        """The programs of training and of evaluation with their code."""
        return self._compiled


def as_numpy(array: Any, what: str) -> np.ndarray:
    """A numpy array of anything that is one or speaks DLPack. `what` is what messages call it."""
    if isinstance(array, np.ndarray):
        return array
    try:
        return np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise BnfuseError(f"{what} cannot be read as an array: {str(error).splitlines()[0]}") from None


def read_safetensors(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and metadata of a file."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise BnfuseError(f"{path}: no checkpoint in safetensors form ({str(error).splitlines()[0]})") from None
