"""Functions that run steps on data: some, whole trainings, a search over trainings, an evaluation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnfuse.api.opening import Source, parted, require_gpu
from bnfuse.api.steps import open_step
from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import require_apart, require_writable
from bnfuse.core.progress import Progress, quiet
from bnfuse.core.ranges import check_real, check_whole
from bnfuse.graph.freezing import frozen
from bnfuse.graph.training_graph import TrainingGraph, open_graph

if TYPE_CHECKING:
    from bnfuse.fromtorch.initial_state import Loading
    from bnfuse.parallel.world import World
    from bnfuse.runtime.program.optim import Optimizer
    from bnfuse.searching.result import SearchResult
    from bnfuse.training import Evaluation, History, Options


def run(
    source: Source,
    *,
    data: Any = None,
    steps: int = 10,
    lr: float | None = None,
    save_to: str | Path | None = None,
    skip_unreadable: bool = False,
    seed: int = 0,
    threads: int | None = None,
    target: str | None = None,
    precision: str | None = None,
    world: World | None = None,
    progress: Progress = quiet,
) -> list[float]:
    """Run some training steps: on shuffled batches of `data`, or on one random batch. Gives their losses.

    A graph is compiled for `target` (the CPU by default) with SGD, momentum 0.9; a compiled step has its own target and
    optimiser. `lr` overrules both. `skip_unreadable` leaves out files of a folder that cannot be read. In a `world`
    each rank takes its part of every batch. Raises DivergedError where the state is not finite after the last step.
    """
    from bnfuse.training.run import Compiling, run_graph
    from bnfuse.training.team import Team

    team = Team(world)
    progress = progress if team.leads else quiet

    def opened() -> Any:
        check_whole("steps", steps, 1)
        check_whole("seed", seed)
        if lr is not None:
            check_real("lr", lr)
        require_apart(source, save_to)
        if save_to is not None and team.leads:
            require_writable(save_to)
        require_gpu(target, precision)
        compiled = isinstance(source, str | os.PathLike) and Path(source).suffix == ".bnf"
        if compiled:
            return open_step(source, threads=threads, target=target, precision=precision, world=world)
        return open_graph(source)

    return run_graph(
        team.together(opened),
        data,
        Compiling(target or "cpu", precision, None, threads, world, team.sharing),
        steps=steps,
        seed=seed,
        name=str(source),
        lr=lr,
        save_to=save_to,
        reading={"skip_unreadable": skip_unreadable},
        progress=progress,
    )


def train(
    source: Source,
    data: Any,
    *,
    epochs: int = 10,
    optimizer: Optimizer | None = None,
    target: str = "cpu",
    precision: str | None = None,
    threads: int | None = None,
    export: str | Path | None = None,
    weights: Any = None,
    loading: Loading | None = None,
    freeze: Sequence[str] = (),
    skip_unreadable: bool = False,
    stream: bool = False,
    crop_share: float | None = None,
    mean: Any = None,
    std: Any = None,
    world: World | None = None,
    wire: str = "fp32",
    progress: Progress = quiet,
    **options: Any,
) -> History:
    """Train on `data` (a name, a folder, an .npz, what `load_data` gives, DataLoaders of torch) and evaluate after each
    epoch.

    `options` are those of `bnfuse.training.Options`, which says what they mean: seed, schedule, warm_up, min_lr,
    augment, label_smoothing, class_weights, mixup, cutmix, last_batch, eval_every, patience, save_to, resume, metrics,
    tensorboard, plot, workers, ... `export` is a file for the trained network as a standard ONNX model for inference.
    `weights` are values to begin with, a state_dict or what names one (a file .safetensors or .pt, "timm:NAME",
    "torchvision:NAME"), taken as `loading` says (`bnfuse.fromtorch.initial_state.Loading`). `skip_unreadable`,
    `stream`, `crop_share`, `mean` and `std` say how images are read: `load_data` says what they mean. `freeze` has
    globs of parameters that are not trained. In a `world` each rank takes its part of every batch and the first one
    writes; the graph's batch is one rank's, and gradients go between GPUs as `wire` says, fp32 or bf16. The others are
    those of `compile`.

    Data, options and places are looked at before anything is compiled. docs/training.md
    """
    from bnfuse.runtime.program.groups import check_globs
    from bnfuse.runtime.program.optim import require_optimizer
    from bnfuse.training import Options
    from bnfuse.training.run import Compiling, train_graph
    from bnfuse.training.team import Team

    team = Team(world)
    progress = progress if team.leads else quiet
    opening, asked = parted(options)
    wanted = Options(epochs, **asked)

    def opened() -> TrainingGraph:
        require_optimizer(optimizer)
        require_apart(source, wanted.save_to, wanted.metrics, wanted.plot, wanted.class_weights, export)
        wanted.check(places=team.leads)
        if export is not None and team.leads:
            require_writable(export)
        require_gpu(target, precision)
        graph = frozen(open_graph(source, **opening), freeze)
        if optimizer is not None:
            check_globs(optimizer, graph.signature.trainable)
        return graph if weights is None else weighted(graph, weights, loading, wanted, progress)

    return train_graph(
        team.together(opened),
        data,
        wanted,
        Compiling(target, precision, optimizer, threads, world, team.sharing, wire),
        export=export,
        reading={
            "skip_unreadable": skip_unreadable,
            "stream": stream,
            "crop_share": crop_share,
            "mean": mean,
            "std": std,
        },
        progress=progress,
    )


def weighted(
    graph: TrainingGraph, weights: Any, loading: Loading | None, wanted: Options, progress: Progress
) -> TrainingGraph:
    """Give the graph with other initial values. Raises BnfuseError where a checkpoint says them too."""
    from bnfuse.fromtorch.initial_state import with_state
    from bnfuse.fromtorch.weights import read_weights

    if wanted.started_from is not None:
        raise BnfuseError(f"--resume {wanted.started_from} and --weights both say what to begin with: give one of them")
    is_state = isinstance(weights, Mapping)
    found, about = with_state(
        graph, weights if is_state else read_weights(weights), loading, name="the weights" if is_state else str(weights)
    )
    progress(about)
    return found


def evaluate(
    source: Source,
    data: Any,
    *,
    part: str | None = None,
    state: str | Path | None = None,
    ema: bool = False,
    confusion: str | Path | None = None,
    target: str = "cpu",
    precision: str | None = None,
    threads: int | None = None,
    skip_unreadable: bool = False,
    stream: bool = False,
    crop_share: float | None = None,
    mean: Any = None,
    std: Any = None,
    workers: int | None = None,
    progress: Progress = quiet,
) -> Evaluation:
    """Evaluate a network on `data`: right answers, accuracies, class by class too, and the mean cross-entropy.

    `source` is a Step, a step.bnf, a training graph (with the values of the checkpoint `state`), or a model for
    inference that `export_inference` wrote. `part` is train, val or test, by default what training holds out. Each
    image counts once, whatever the batch. `ema` takes the average of the weights that the checkpoint or the step has.
    `confusion` is a file (.csv, .png, .svg, .pdf) that says which classes are taken for which. `skip_unreadable`,
    `stream`, `crop_share`, `mean`, `std` and `workers` say how images are read: `load_data` says what they mean.
    docs/training.md
    """
    from bnfuse.training.confusion import require_confusion, write_confusion
    from bnfuse.training.evaluation import evaluate_source
    from bnfuse.training.run import Compiling

    require_gpu(target, precision)
    require_apart(source, state, confusion)
    if confusion is not None:
        require_confusion(confusion)
    found = evaluate_source(
        source,
        data,
        part=part,
        state=state,
        ema=ema,
        compiling=Compiling(target, precision, threads=threads),
        reading={
            "skip_unreadable": skip_unreadable,
            "stream": stream,
            "crop_share": crop_share,
            "mean": mean,
            "std": std,
            "workers": workers,
        },
        progress=progress,
    )
    if confusion is not None:
        write_confusion(found, confusion)
    return found


def search(
    source: Source,
    data: Any,
    *,
    cost: str = "count",
    output: str | Path = "search.jsonl",
    resume: str | Path | None = None,
    plot: str | Path | None = None,
    skip_unreadable: bool = False,
    progress: Progress = quiet,
    **options: Any,
) -> SearchResult:
    """Find which BatchNorms a network can do without: a search over placements, each of them trained (docs/search.md).

    iterations   trainings in all, 20 by default, all placements with method exhaustive; the first keeps every BatchNorm
    initial      random placements after the first, 4 by default
    method       bo, the Bayesian optimisation of [Joardar22]; random, annealing, exhaustive: baselines
    lambdas      accuracy that a BatchNorm must be worth; several take turns
    tolerance    how far below the accuracy with all BatchNorms is good enough
    cost         count, or bytes: of the maps that a BatchNorm sweeps
    output       a new file of JSON lines, one a training; `resume`: a file to go on with, or to begin
    repeats      trainings of a placement, whose mean accuracy counts

    epochs, optimizer, schedule, warm_up, augment, target, precision, threads and seed are those of `train`, keep_affine
    is that of `rewrite`.
    """
    from bnfuse.searching.run import asked as read
    from bnfuse.searching.run import run_search

    opening, asked = parted(options)
    place = output if resume is None else resume
    require_apart(source, place, plot)
    settings, recipe = read(**asked)
    require_gpu(recipe.target, recipe.precision)
    return run_search(
        open_graph(source, **opening),
        data,
        settings,
        recipe,
        cost=cost,
        output=place,
        resume=resume is not None,
        plot=plot,
        skip_unreadable=skip_unreadable,
        progress=progress,
    )
