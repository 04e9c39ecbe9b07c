"""From a graph to what it has learned: what can be wrong is looked at first, then it is compiled and trained.

    history = train_graph(open_graph("fused.onnx"), "digits", Options(epochs=10))

`run_graph` runs some steps, of a graph or of a step that is compiled already.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.processors import physical_cores
from bnfuse.core.progress import Progress, bar_of, quiet
from bnfuse.core.text import scaled
from bnfuse.data import Dataset
from bnfuse.data.loaders import LoadedImages
from bnfuse.data.workers import default_workers
from bnfuse.exporting import export_model, require_exportable, require_state
from bnfuse.graph.batches import with_batch
from bnfuse.graph.soft_labels import with_soft_labels
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.training.checkpoints import digest_of_data
from bnfuse.training.feeding import (
    batch_of,
    data_for,
    labelling_of,
    raw_data_for,
    require_followed,
    run_steps,
    takes_probabilities,
    with_loaders,
)
from bnfuse.training.history import History
from bnfuse.training.loading import Loader, require_colours
from bnfuse.training.loop import train_by
from bnfuse.training.nonfinite import require_finite_state
from bnfuse.training.options import Options
from bnfuse.training.team import ALONE, Team
from bnfuse.training.updates import require_updates

if TYPE_CHECKING:
    from bnfuse.parallel.world import World
    from bnfuse.runtime import Step
    from bnfuse.runtime.program.optim import Optimizer


@dataclasses.dataclass(frozen=True)
class Compiling:
    """How a graph becomes a step: the options of `bnfuse.compile`. Without an optimiser it is `default_optimizer`."""

    target: str = "cpu"
    precision: str | None = None
    optimizer: Optimizer | None = None
    threads: int | None = None
    world: World | None = None
    sharing: int = 1  # how many ranks have the processors of this one
    wire: str = "fp32"  # what gradients are between ranks

    @property
    def highest_rate(self) -> float:
        """The learning rate of the optimiser."""
        return (self.optimizer or default_optimizer()).lr

    @property
    def workers(self) -> int:
        """How many threads may decode images beside the step."""
        busy = 1 if self.target.startswith("cuda") else self.own_threads or physical_cores()
        return default_workers(busy, self.sharing)

    @property
    def own_threads(self) -> int | None:
        """How many threads the kernels have: as is asked for, or this rank's share of the cores; None for all."""
        if self.threads is not None or self.sharing == 1:
            return self.threads
        return max(1, physical_cores() // self.sharing)

    def step(self, graph: TrainingGraph, progress: Progress, batches: Sequence[int] = ()) -> Step:
        """Compile the graph, for several `batches` if they are given; `progress` hears of each kernel by its bar."""
        from bnfuse.runtime import compile_step

        return compile_step(
            graph,
            target=self.target,
            optimizer=self.optimizer or default_optimizer(),
            threads=self.own_threads,
            progress=bar_of(progress),
            precision=self.precision,
            batches=batches,
            world=self.world,
            wire=self.wire,
        )


def default_optimizer() -> Optimizer:
    """Give the optimiser of a training that names none: SGD at a rate of 0.1, with momentum 0.9."""
    from bnfuse.runtime.program.optim import SGD

    return SGD(lr=0.1, momentum=0.9)


def train_graph(
    graph: TrainingGraph,
    data: Any,
    options: Options,
    compiling: Compiling | None = None,
    *,
    export: str | Path | None = None,
    reading: Mapping[str, Any] | None = None,
    progress: Progress = quiet,
) -> History:
    """Compile the graph and train it on `data`, a name, a folder, a file, or a Dataset, which is fed as it is.

    `export` is the file that gets the trained network for inference, with what images must be normalised by.
    `reading` has options of `load_data`. Raises BnfuseError for data, options and states that do not fit before
    anything is compiled; of a world, on all ranks for what one of them finds.
    """
    compiling = compiling or Compiling()
    team = Team(compiling.world)
    look = functools.partial(looked_at, graph, data, options, compiling, export, reading, progress, team)
    ready = team.together(look)
    progress(f"preparing {graph.name}")
    step = team.together(lambda: compiling.step(ready.graph, progress, ready.batches))
    progress(f"{step.report.kernels} kernels, {step.target.place}")
    if kept := [f"{what} {scaled(size, 'B')}" for what, size in step.kept_bytes.items()]:
        progress(f"memory of updates: {', '.join(kept)}")
    history = train_by(options, step, ready.data, progress=progress, normalise=not ready.given)
    if export is not None and team.leads:
        export_trained(step, ready, export, progress)
    return history


@dataclasses.dataclass(frozen=True)
class Ready:
    """What a training begins with, when nothing is wrong with it: the graph as it is trained, data that were `given`
    as they are fed or else are normalised, and the sizes of batches."""

    graph: TrainingGraph
    data: Dataset
    given: bool
    batches: tuple[int, ...]


def looked_at(
    graph: TrainingGraph,
    data: Any,
    options: Options,
    compiling: Compiling,
    export: str | Path | None,
    reading: Mapping[str, Any] | None,
    progress: Progress,
    team: Team,
) -> Ready:
    """Look at all that can be wrong before anything is compiled."""
    from bnfuse.runtime.lowering.inference import require_inference

    require_loss(graph)
    data = with_loaders(graph, data)
    require_loaded(data, options)
    asked, given = dict(reading or {}), isinstance(data, Dataset)
    if not given:
        workers = options.workers or compiling.workers
        asked |= {"random_crops": options.changes.scale is not None, "shared": team.size > 1}
        asked |= {"workers": workers, "progress": progress}
    found = raw_data_for(graph, data, **asked)
    require_colours(found, options.changes)
    tell_of(found, graph, progress, options.partial, team)
    options.rates.check(compiling.highest_rate)
    if not options.recipe.is_plain and not takes_probabilities(graph):
        graph = with_soft_labels(graph)
    labelling_of(graph, found, options.recipe)
    require_followed(found, options.changes)
    loader = Loader(found, graph.batch, partial=options.partial, rank=team.rank, size=team.size)
    batches = last_batches(graph, loader)
    require_updates(compiling.optimizer, loader.steps)
    require_state(graph, options.started_from if team.leads else None)
    if export is not None:
        require_exportable(graph)
    if len(found.test_y):
        require_inference(graph)
    return Ready(graph, found, given, batches)


def export_trained(step: Step, ready: Ready, export: str | Path, progress: Progress) -> None:
    """Write the trained network, by the average of its weights where there is one."""
    data = ready.data
    mean, std, scale = (None, None, None) if ready.given else (data.mean, data.std, data.scale)
    share = None if ready.given else data.crop_share
    averaged = step.optimizer is not None and step.optimizer.ema is not None
    state = step.state_dict(ema=True) if averaged else None
    fixed = export_model(
        step, export, state=state, mean=mean, std=std, scale=scale, classes=data.class_names, crop_share=share
    )
    if averaged:
        progress(f"{export} has the average of the weights")
    if fixed is not None:
        progress(f"note: {export} takes {ready.graph.batch} images at a time: {fixed}")


def run_graph(
    source: TrainingGraph | Step,
    data: Any,
    compiling: Compiling,
    *,
    steps: int,
    seed: int,
    name: str,
    lr: float | None = None,
    save_to: str | Path | None = None,
    reading: Mapping[str, Any] | None = None,
    progress: Progress = quiet,
) -> list[float]:
    """Give the losses of some steps on shuffled batches of `data`, or on one random batch where it is None.

    `name` is what `progress` hears the source called. Raises DivergedError where the state is not finite in the end.
    Of a world each rank takes its part of every batch, and the first one saves.
    """
    team = Team(compiling.world)

    def looked_at() -> Any:
        require_loss(source)
        if isinstance(source, TrainingGraph):
            source.state()  # complains of values that are missing before the work, not after it
        if data is None:
            return None
        found = data_for(source, with_loaders(source, data), **(reading or {}))
        tell_of(found, source, progress, team=team)
        return found

    found = team.together(looked_at)
    digest = None if found is None or team.size == 1 else digest_of_data(found)
    team.agree({"steps": steps, "seed": seed, "lr": lr, "data": digest}, "setting")
    progress(f"preparing {name}")
    step = team.together(lambda: compiling.step(source, progress)) if isinstance(source, TrainingGraph) else source
    if lr is not None:
        step.lr = lr
    losses = run_steps(step, found, steps=steps, seed=seed, team=team)
    team.together(lambda: require_finite_state(step, where=f"step {steps}", lr=step.lr))
    if save_to is not None and team.leads:
        step.save(save_to)
    return losses


def require_loaded(data: Any, options: Options) -> None:
    """Raise where DataLoaders of torch cannot do what is asked for."""
    if not isinstance(data, Dataset) or not isinstance(data.train_x, LoadedImages):
        return
    images = data.train_x
    if options.workers is not None:
        raise BnfuseError(f"{images.name}: has workers of its own (num_workers): leave --workers out")
    if (options.automatic or options.continued is not None) and not images.repeats:
        raise BnfuseError(
            f"{images.name}: a run cannot go on exactly with a generator of its own or persistent_workers: leave both "
            "out, or begin a new run with --resume FILE.safetensors"
        )


def require_loss(source: TrainingGraph | Step) -> None:
    """Raise where gradients of outputs come in: nothing here computes them."""
    if isinstance(source, TrainingGraph):
        _ = source.loss
    elif source.program.signature["loss"] is None:
        raise BnfuseError(
            "the step has no loss, the gradients of its outputs come in: call step.forward, step.backward and "
            "step.update, or build it with --loss for this"
        )


def last_batches(graph: TrainingGraph, loader: Loader) -> tuple[int, ...]:
    """List the batch sizes of a training. Raises BnfuseError where the graph has no batch of what is left."""
    rest = loader.rest
    if not rest:
        return (graph.batch,)
    try:
        with_batch(graph, rest)
    except BnfuseError as error:
        raise BnfuseError(f"{error}; or leave the last {rest} images out with --last-batch drop") from None
    return graph.batch, rest


def tell_of(
    data: Dataset, source: TrainingGraph | Step, progress: Progress, partial: bool = False, team: Team = ALONE
) -> None:
    """Say what the data are, and what an epoch of them is."""
    for line in (*data.about, Loader(data, batch_of(source), partial=partial, size=team.size).about):
        progress(line)
