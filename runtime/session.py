"""A compiled step at work: its state, and the calls that run its launches.

State (state.py) lives in the step and is updated in place; the caller's arrays are never touched.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError, UnknownAttributeError
from bnfuse.core.ranges import check_real, check_whole
from bnfuse.graph.labels import Classes
from bnfuse.graph.sampling import Sampling
from bnfuse.parallel.world import World
from bnfuse.runtime.artifact import Artifact, write_artifact
from bnfuse.runtime.backends.draws import Draws, PerChannel
from bnfuse.runtime.backends.exclusion import alone
from bnfuse.runtime.backends.execution import Compiled, LaunchTime, Runner, paired
from bnfuse.runtime.hosting import TICKETS, Hosted, Plans, Under
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.optim import Optimizer
from bnfuse.runtime.results import Results
from bnfuse.runtime.sizes import Pair, Size, Sizes, lies_on_host, rows_of
from bnfuse.runtime.state import IncompatibleKeys, State
from bnfuse.runtime.targets.target import Target
from bnfuse.runtime.together import Shared, Together, agree_on_batch, agree_on_virtual
from bnfuse.runtime.updating import Updating, require_average

__all__ = ["Compiled", "LaunchTime", "Step"]

LOSS_SCALE = 1024.0  # of float16, whose smallest normal number is 6e-5

RANGES: dict[str, Callable[[str, object], None]] = {  # what is set between steps
    "lr": check_real,
    "seed": check_whole,
    "epoch": check_whole,
    "steps": check_whole,
}
GIVEN = ("target", "optimizer", "model", "times")


class Step(Hosted, Results, Together, Updating):
    """A training step: `loss = step(images, labels)`. Made by `compile_step` or `load_step`.

    On a GPU the inputs may be arrays of the host, which are copied, or anything on that GPU that speaks DLPack or has
    `__cuda_array_interface__`, which the step reads where it is. With an input on the GPU a call returns at once, and
    what it returns is on the GPU too (cuda/array.py); labels that lie there are not checked.

    A call is one thread's at a time: others wait. `forward`, `backward` and `update` are three calls, and refuse to go
    on with what another thread began; `outputs` and `gradients()` are of the last call, whoever made it.

    It may be compiled for several batch sizes (sizes.py): a call takes the programs of its inputs' batch, and all of
    them have one state. `evaluate` takes any number of samples.

    What a graph draws is no input of a call (draws.py): `epoch` moves the samples, `virtual_statistics` are those of
    the data that virtual samples are drawn like, `seed` and the count of steps say what random operators give, and
    `fix` replaces draws.

    One of several ranks (together.py) is given its part of each batch: the loss that it returns, gradients and running
    statistics are the means over the ranks, and all ranks have the same state.
    """

    def __init__(
        self,
        training: Compiled,
        evaluation: Compiled,
        *others: Pair,
        target: Target,
        optimizer: Optimizer | None = None,
        model: bytes = b"",
        world: World | None = None,
    ) -> None:
        super().__init__()
        self.target, self.optimizer, self.model = target, optimizer, model
        self._sizes = Sizes(((training, evaluation), *others), target, world)
        self._shared = Shared()
        self._state = State(self._sizes.first.train, optimizer, model)
        self.lr = optimizer.lr if optimizer is not None else 0.0
        self.steps = self._added = 0  # updates, and backward passes since the last one
        self.times: dict[str, float] = dict.fromkeys(p.PHASES, 0.0)
        self.seed = self.epoch = 0
        self._loss_scale = self._gradients_scale = LOSS_SCALE if target.precision == "fp16" else 1.0
        self._seeds: dict[int, float] = {}  # by batch size, what is written where the gradients begin; 1 in the file
        self._done: p.Phase | None = None  # the last phase whose results the next one finds where it reads them
        self._done_by = 0  # the thread that ran it
        self._under = Under()
        self._plans = Plans()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a name that a step has to a value in its range: a misspelt one would be set and never read."""
        if name in RANGES:
            RANGES[name](name, value)
        elif not (name.startswith("_") or name in self.__dict__ or hasattr(type(self), name) or name in GIVEN):
            raise UnknownAttributeError(
                f"a step has no '{name}' to set: it has {', '.join(RANGES)}; what belongs to the optimiser is compiled "
                "in, so compile the step again with another optimizer="
            )
        elif name == "optimizer" and name in self.__dict__:
            raise BnfuseError("a step's optimizer is compiled in: compile the step again with another optimizer=")
        object.__setattr__(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BnfuseError(
            "a step cannot be copied or pickled, for it holds native code and memory: step.export(FILE) and "
            "bnfuse.open_step(FILE) make another one, step.save and step.load hand on its state"
        )

    @property
    def _train(self) -> Runner:
        """The program of training of the batch size of the last call."""
        return self._sizes.now.train

    @property
    def _state_tensors(self) -> Mapping[str, p.Tensor]:
        return self._state.tensors

    def _moved(self) -> None:
        self._state.count()

    @property
    def _batch(self) -> int:
        return self._sizes.now.batch

    @property
    def _draws(self) -> Draws:
        return self._sizes.first.draws

    @property
    def program(self) -> p.Program:
        """The program of training, of the first batch size."""
        return self._sizes.first.train.program

    @property
    def latest(self) -> p.Program:
        """The program of training, of the batch size of the last call."""
        return self._train.program

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that the step is compiled for; the first is that of `program`."""
        return tuple(self._sizes.by_batch)

    @property
    def batch(self) -> int:
        """The batch size of the last call; the first one before any."""
        return self._batch

    @alone
    def add(self, training: Compiled, evaluation: Compiled) -> None:
        """Take the programs of another batch size (compile.py makes them): they share the state."""
        self._sizes.add((training, evaluation))

    def add_from(self, other: Step) -> None:
        """Take the programs of the batch sizes that a `twin` of this step has, and this one has not."""
        self._add_missing(other._pairs())  # one lock at a time: two that take from each other do not wait for ever

    @alone
    def _pairs(self) -> dict[int, Pair]:
        return dict(zip(self._sizes.by_batch, self._sizes.compiled, strict=True))

    @alone
    def _add_missing(self, pairs: Mapping[int, Pair]) -> None:
        for batch, pair in pairs.items():
            if batch not in self._sizes.by_batch:
                self._sizes.add(pair)

    def twin(self) -> Step:
        """Make a step of the same programs, with memory of its own, in the state that the graph begins with."""
        first, *others = self._sizes.compiled
        return Step(*first, *others, target=self.target, optimizer=self.optimizer, model=self.model, world=self.world)

    @property
    def report(self) -> p.Report:
        """What the planner of the training program did."""
        return self.program.report

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what a call takes, in its order: data, labels."""
        signature = self.program.signature
        wanted = (*signature["data"], *signature["labels"])
        return tuple(name for name in wanted if name in self.program.inputs)

    @property
    def sampling(self) -> Sampling:
        """What the step draws: where samples may lie, by input, the inputs of virtual samples, random values."""
        return self._draws.sampling

    @property
    @alone
    def virtual_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation that virtual samples are drawn from: one number, or one of each channel."""
        return self._draws.virtual_statistics

    @virtual_statistics.setter
    @alone
    def virtual_statistics(self, given: tuple[PerChannel, PerChannel]) -> None:
        self._draws.virtual_statistics = given

    @alone
    def fix(self, values: Mapping[str, Any] | None) -> None:
        """Use these values in the place of what would be drawn: until `fix(None)`.

        By the input that is drawn, or by the name of what a random operator of the file gives.
        """
        on_host = {name: self._train.to_host(value, f"input '{name}'") for name, value in (values or {}).items()}
        self._sizes.fix(on_host)

    # -- running -----------------------------------------------------------------------------------------------

    @alone
    def __call__(self, *inputs: Any) -> Any:
        """One step: forward, backward, and with an optimiser the update. Returns the loss."""
        if self._output_gradients:
            raise BnfuseError(
                "the graph has no loss: call forward(...), backward(...) with the gradients of its outputs, update()"
            )
        self._take(inputs)
        self._run(("forward", "backward", *self._ending))
        return self._loss()

    @alone
    def forward(self, *inputs: Any) -> Any:
        """Run the forward phase: loss, logits and new running statistics. State stays as it is.

        Returns the loss; of a graph without one its outputs, a tuple where there are several.
        """
        self._take(inputs)
        self._run(("forward",))
        self._did("forward")
        return self._loss()

    @alone
    def backward(self, *gradients: Any) -> None:
        """Run the backward phase, after `forward`: all gradients.

        Of a graph without a loss it takes the gradients of the outputs that forward returned, in their order; with fp16
        times `loss_scale`.
        """
        names = list(self._output_gradients.values())
        if len(gradients) != len(names):
            raise BnfuseError(f"backward takes the gradients of {len(names)} outputs: {len(gradients)} are given")
        self._follow("forward", "backward needs a forward before it, with no evaluate in between")
        self._train.feed(names, gradients)
        self._run(("backward",))
        self._did("backward")

    @alone
    def update(self) -> None:
        """Run the update phase, after `backward`: parameters, where there is an optimiser, and running statistics.

        With `accumulate` parameters change at each so many updates, by the mean of the gradients of all.
        """
        self._follow("backward", "update needs a backward before it: it applies gradients once")
        self._run(self._ending)

    @alone
    def evaluate(self, *data: Any, ema: bool = False) -> Any:
        """Logits by the running statistics instead of the batch's, as after training.

        It takes any number of samples: batches that the step is compiled for, the last one filled up. Data on a GPU
        must be of such a batch. With `ema` by the average of parameters and statistics that the optimiser keeps.
        """
        self.require_evaluation()
        if ema:
            require_average(self._state)
        self._arena_is_taken(self._done if self._done == "backward" else None)  # both share it
        if (size := self._sizes.by_batch.get(rows_of(data))) is not None:
            return self._evaluated(size, data, ema)
        first = self._sizes.first
        paired(self._evaluated_names(first), data)
        if not all(map(lies_on_host, data)):
            return self._evaluated(first, data, ema)  # it says what its batch must be
        arrays = [np.asarray(first.train.to_host(array, f"data input {place}")) for place, array in enumerate(data)]
        if not arrays or not rows_of(arrays) or any(array.shape[:1] != arrays[0].shape[:1] for array in arrays):
            return self._evaluated(first, data, ema)  # it says what is wrong with them
        (logits,) = first.evaluation.outputs.values()
        if logits.shape[:1] != (first.batch,):
            raise BnfuseError(
                f"the logits are {list(logits.shape)}, which is no row for each sample: give a batch of "
                f"{' or '.join(map(str, self.batches))}"
            )
        return np.concatenate([self._evaluated(size, part, ema)[:rows] for size, part, rows in self._sizes.cut(arrays)])

    def _evaluated_names(self, size: Size) -> list[str]:
        program = size.evaluation
        return [name for name in program.signature["data"] if name in program.inputs]

    def _evaluated(self, size: Size, data: Sequence[Any], ema: bool) -> Any:
        """Run the evaluation of one batch size."""
        runner = size.averaged if ema else size.evaluate
        runner.feed(self._evaluated_names(size), data)
        runner.run([p.WHOLE["forward"]], self._scalars(("forward",)))
        (logits,) = runner.program.outputs.values()
        return runner.result(logits)

    @property
    def evaluates(self) -> bool:
        """Whether there is a program of evaluation."""
        return not self._sizes.first.evaluation.refused

    def require_evaluation(self) -> None:
        """Raise where the step can only train: the graph names no logits, or draws what belongs into them."""
        if refused := self._sizes.first.evaluation.refused:
            raise BnfuseError(refused)

    @alone
    def profile(self, *inputs: Any) -> list[LaunchTime]:
        """One step, launch by launch. It is a whole step: state changes as it does in a call."""
        self._take(inputs)
        phases: tuple[p.Phase, ...] = ("forward", "backward", *self._ending)
        return self._train.profile(phases, self._scalars(phases))

    def _take(self, inputs: tuple[Any, ...]) -> None:
        """Take the inputs of a step. What the last one computed is no longer to be built upon."""
        self._arena_is_taken()
        self._state.forwards += 1
        agree_on_batch(self, self._sizes.choose(inputs).batch)
        names = [name for name, _ in paired(self.inputs, inputs)]
        draws = self._sizes.now.draws
        agree_on_virtual(self, draws)
        drawn = draws.changed(seed=self.seed, epoch=self.epoch, step=self._count)
        found = self._train.feed([*names, *drawn], [*inputs, *drawn.values()])
        draws.sent()
        self._check_labels(found)

    def _run(self, phases: tuple[p.Phase, ...]) -> None:
        parts = [self._train.program.whole(phase) for phase in phases]
        for phase, seconds in self._train.run(parts, self._scalars(phases)).items():
            self.times[phase] = seconds

    def _arena_is_taken(self, done: p.Phase | None = None) -> None:
        """Forget what the last forward left there, for something else is about to write to it."""
        self._done = done
        self._under = Under(next(TICKETS))

    @property
    def _output_gradients(self) -> dict[str, str]:
        return dict(self.program.signature.get("output_gradients", {}))

    def _loss(self) -> Any:
        """Give the loss: a float; on the device an array of rank 0. Without a loss the outputs."""
        if self._output_gradients:
            results = [self._train.result(self._train.program.outputs[name]) for name in self._output_gradients]
            return results[0] if len(results) == 1 else tuple(results)
        program = self._train.program
        loss = program.outputs[program.signature["loss"]]
        if program.mean_loss is not None:
            loss = p.Tensor(program.mean_loss, (1,))
        found = self._train.result(loss)
        return float(found.reshape(())) if isinstance(found, np.ndarray) else found.reshape(())

    def _follow(self, phase: p.Phase, otherwise: str) -> None:
        """Use up the results of a phase: backward writes over the maps that forward left in the arena."""
        if self._done != phase:
            raise BnfuseError(otherwise)
        if self._done_by != threading.get_ident():
            raise BnfuseError(
                f"the {phase} before it was another thread's: run the phases of a step in one thread, or all of them "
                "as one call, step(...)"
            )
        self._done = None

    def _did(self, phase: p.Phase) -> None:
        self._done, self._done_by = phase, threading.get_ident()

    def _write_seed(self) -> None:
        """Let gradients begin with the loss scale, from when it is another one on."""
        batch, program = self._sizes.now.batch, self._train.program
        if program.seed is not None and self._seeds.get(batch, 1.0) != self._loss_scale:
            self._train.memory.store(program.storages[program.seed], np.full(1, self._loss_scale, np.float32))
            self._seeds[batch] = self._loss_scale

    def _check_labels(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Labels are indices: a kernel must not be led outside of the classes. Those on a GPU are not looked at."""
        for name, said in self.program.classes.items():
            labels, classes = inputs.get(name), Classes(**said)
            if labels is None or not labels.size or not classes.exact:
                continue
            labels = labels[labels != classes.ignored] if classes.ignored is not None else labels
            if labels.size and not 0 <= labels.min() <= labels.max() < classes.count:
                raise BnfuseError(
                    f"input '{name}' has labels from {labels.min()} to {labels.max()}: "
                    f"the graph has the classes 0 to {classes.count - 1}"
                )

    # -- state -------------------------------------------------------------------------------------------------

    @alone
    def state_dict(self, *, torch: bool = False, ema: bool = False) -> dict[str, Any]:
        """Parameters and running statistics, with `ema` their averages: copies, numpy's in the layout and by the names
        of the file.

        With `torch` they are tensors by the names of the module that the graph was made of, with the counts of batches
        of its BatchNorms: what the module's `load_state_dict` takes.
        """
        if ema:
            require_average(self._state)
        own = self._state.read_average() if ema else self._state.read()
        return self._state.of_module(own) if torch else own

    @alone
    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True, *, skip_head: bool = False
    ) -> IncompatibleKeys:
        """Replace parameters and running statistics by arrays or torch tensors, of any device, under the names of the
        file or of the module behind it. The optimiser's moments and count of steps stay; `reset_optimizer` lets it
        begin anew. An average begins anew, at these values, and gradients that were added up are gone.

        Gives what is missing and what is unexpected, as torch does. Raises BnfuseError, and leaves all as it was, where
        a shape differs, and where `strict` and there is either. With `skip_head` the last layer of a state for another
        number of classes is left out. docs/training-file.md
        """
        found = self._state.restore(state, strict, skip_head)
        self._added = 0
        return found

    @alone
    def not_finite(self) -> str | None:
        """Name the first parameter, running statistic or moment of the optimiser that is not finite, or None."""
        return self._state.not_finite()

    @alone
    def save(self, path: str | pathlib.Path, metadata: Mapping[str, str] | None = None) -> None:
        """Write state and the optimiser's state as safetensors, `metadata` with it; the file is replaced as a whole.

        Of several ranks one does. Raises BnfuseError where gradients are added up then, each rank's own: `flush` first.
        """
        if self.world is not None and self._added:
            raise BnfuseError("gradients are added up on each rank, which a file does not hold: call flush() before")
        self._state.save(pathlib.Path(path), self.steps, self._added, metadata or {})

    @alone
    def load(self, path: str | pathlib.Path) -> None:
        """Read what `save` wrote. The optimiser starts anew where the file has no state, or that of another one."""
        self.steps, self._added = self._state.load(path)

    @alone
    def reset_optimizer(self) -> None:
        """Set the optimiser back to before the first step. An average begins anew, at the values as they are."""
        self.steps = self._added = 0
        self._state.clear_moments()
        self._state.begin_average()

    @alone
    def export(self, path: str | pathlib.Path) -> None:
        """Write the step, its code, state and model as one file (artifact.py)."""
        counts = {name: np.array(count) for name, count in self._state.counts.items()}
        state = {**self._state.read(), **counts}
        artifact = Artifact(self.target, self.optimizer, self._sizes.compiled, state, self.model)
        write_artifact(artifact, pathlib.Path(path))

    @property
    def compiled(self) -> Pair:
        """The programs of training and of evaluation, of the first batch size, with their code."""
        return self._sizes.first.compiled
