"""The functions that `bnfuse` offers. Each takes a model in any form: a path, ModelProto, gs.Graph, onnx_ir.Model,
or what `rewrite` returned.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import require_apart, require_writable
from bnfuse.core.progress import Bar, Progress, quiet
from bnfuse.core.ranges import check_real, check_whole
from bnfuse.graph.freezing import frozen
from bnfuse.graph.io import load, save
from bnfuse.graph.training_graph import TrainingGraph, open_graph

if TYPE_CHECKING:
    from bnfuse.benchmarking.results import Benchmark
    from bnfuse.diffing import Diff
    from bnfuse.exploring import Exploration
    from bnfuse.fromtorch.initial_state import Loading
    from bnfuse.inspecting import Inspection
    from bnfuse.parallel.world import World
    from bnfuse.passes import Rewritten
    from bnfuse.runtime import Step
    from bnfuse.runtime.program.optim import Optimizer
    from bnfuse.searching.result import SearchResult
    from bnfuse.training import Evaluation, History, Options
    from bnfuse.verifying.verdict import Verification

__all__ = [
    "add_batch",
    "bench",
    "compile",
    "diff",
    "estimate",
    "evaluate",
    "explore",
    "export_inference",
    "inspect",
    "load",
    "open_step",
    "optimizer",
    "rewrite",
    "run",
    "save",
    "search",
    "train",
    "verify",
]

Source = Any
OPENING = ("checkpoint", "data_input", "labels_input")


def parted(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide keywords: those for opening a file that others wrote, as `load` takes them, and all others."""
    opening = {name: value for name, value in given.items() if name in OPENING}
    return opening, {name: value for name, value in given.items() if name not in OPENING}


def require_gpu(target: str | None, precision: str | None) -> None:
    """Refuse at once a GPU that is not here, where a graph is to run on one, for compiling takes minutes."""
    if target is None or target.partition(":")[0] != "cuda":
        return
    from bnfuse.runtime.backends.cuda.backend import CudaBackend
    from bnfuse.runtime.backends.cuda.driver import open_driver

    machine = CudaBackend().resolve(target.partition(":")[2], precision=precision)
    open_driver().check_architecture(machine.architecture)


def rewrite(
    source: Source,
    level: str = "icf",
    *,
    pool_first: bool | None = None,
    remove: str | Iterable[int] | None = None,
    keep_affine: bool = False,
    decay: float | None = None,
    sample: str | None = None,
    local_bn: int | None = None,
    sync: bool = False,
    sync_ranks: int | None = None,
    freeze: Sequence[str] = (),
    **signature: Any,
) -> Rewritten:
    """Run the passes of `level` on a graph. Gives it, and the report of what they did and why they did not do more.

    `pool_first` moves average pools in front of 1x1 convolutions; by default it does so at level icf. `remove` takes
    BatchNorms out first: numbers, or a list in words such as "1,4-6", "all-except:5,8", "paper"
    (passes/removal/placements.py); with `keep_affine` their scale and bias stay. `decay` is the weight that a batch
    has in the running statistics. `sample` says what part of the batch each BatchNorm takes its statistics from:
    "fs:1/32" (passes/sampling/spec.py). With `local_bn` each group of so many samples is normalised on its own.
    With `sync` statistics are those of all ranks of a data-parallel run, or of its first `sync_ranks`.
    `freeze` has globs of parameters that are not trained.
    """
    from bnfuse import passes

    graph = frozen(open_graph(source, **signature), freeze)
    return passes.rewrite(
        graph.model,
        level=level,
        pool_first=pool_first,
        remove=remove,
        keep_affine=keep_affine,
        decay=decay,
        sample=sample,
        local_bn=local_bn,
        sync=sync,
        sync_ranks=sync_ranks,
        signature=graph.signature,
    )


def diff(before: Source, after: Source, **signature: Any) -> Diff:
    """Compare two training graphs: nodes, edges, BatchNorms, feature-map traffic."""
    from bnfuse.diffing import diff_graphs

    return diff_graphs(open_graph(before, name="before", **signature), open_graph(after, name="after", **signature))


def verify(
    before: Source,
    after: Source,
    *,
    runtime: str = "ort",
    steps: int = 0,
    seed: int = 0,
    lr: float = 0.01,
    threads: int | None = None,
    target: str = "cpu",
    precision: str | None = None,
    batch: int | None = None,
    progress: Progress = quiet,
    **signature: Any,
) -> Verification:
    """Verify that both graphs compute the same loss, gradients and running statistics (docs/numerics.md).

    `batch` compares them at another batch than theirs. `target` and `precision` are those of `compile`, for the
    runtime tvm.
    """
    from bnfuse.verifying.verification import verify_graphs

    check_whole("steps", steps)
    check_whole("seed", seed)
    check_real("lr", lr)

    require_gpu(target, precision)
    return verify_graphs(
        open_graph(before, name="before", **signature),
        open_graph(after, name="after", **signature),
        runtime=runtime,
        steps=steps,
        seed=seed,
        lr=lr,
        threads=threads,
        target=target,
        precision=precision,
        batch=batch,
        progress=progress,
    )


def inspect(source: Source, *, zoo: dict[str, Any] | None = None, **signature: Any) -> Inspection:
    """Count sizes, parameters, FLOPs and feature-map traffic, layer by layer.

    `source` is a training graph, or the name of a network of the zoo, which is counted without making its weights:
    `zoo` has its batch, image, channels, classes and metaparameters. docs/design-space.md
    """
    from bnfuse.inspecting.source import inspect_source

    return inspect_source(source, zoo, **signature)


def estimate(source: Source, *, progress: Progress = quiet, **options: Any) -> Any:
    """Estimate time and memory traffic of a training step on hardware that need not be here.

    `source` is a training graph, or the name of a network of the zoo. `options` are those of the command line
    (`bnfuse.estimating.request.Request`): hardware, levels, cache, bandwidth, flops, sweep, workers, reuse, assume,
    plot, ...; what comes back is an Estimate, or what they ask for: a Comparison of levels, a Sweep, Reuse, Roofline,
    Scaling or Pipeline, each with to_json(), to_csv() and sections(). docs/estimate.md
    """
    from bnfuse.estimating.request import Request, answer

    opening, asked = parted(options)
    return answer(Request(source, signature=opening, **asked), progress)


def explore(network: str | None = None, vary: Iterable[str] = (), **options: Any) -> Exploration:
    """Sweep a family of networks of the zoo: sizes, work and estimated step times, before and after fusion.

    `vary` has axes in words: "growth=12:48:12", "bypass=none,simple". `options` are those of
    `bnfuse.exploring.explore`: base, preset_name, hardware, level, pareto, plot, ... docs/design-space.md
    """
    from bnfuse import exploring

    return exploring.explore(network, vary, **options)


def optimizer(
    name: str,
    lr: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    no_decay: Sequence[str] = (),
    **more: Any,
) -> Optimizer:
    """Make an optimiser by its name: sgd, adamw, adam, rmsprop, rmsproptf or lion.

    `momentum` is sgd's, rmsprop's and rmsproptf's, `nesterov` sgd's alone. `more` are further fields of its class:
    betas, epsilon, ... and what all have in common, groups, layer_decay, clip_norm, clip_value, accumulate, ema.
    docs/updates.md
    """
    from bnfuse.runtime.program.optim import named_optimizer

    return named_optimizer(
        name,
        lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        no_decay=tuple(no_decay),
        **more,
    )


def compile(
    source: Source,
    target: str = "cpu",
    optimizer: Optimizer | None = None,
    *,
    threads: int | None = None,
    progress: Bar | None = None,
    cache: bool | str | Path = True,
    tune: bool = False,
    precision: str | None = None,
    batches: Sequence[int] = (),
    freeze: Sequence[str] = (),
    world: World | None = None,
    bucket: int | None = None,
    wire: str = "fp32",
    **signature: Any,
) -> Step:
    """Compile a training graph, rewritten or not, to a step. Without an optimiser parameters stay as they are.

    `target` is cpu, cpu:MCPU with an LLVM CPU name, cuda for the GPU that is here, or cuda:ARCHITECTURE such as
    cuda:sm_90. For a GPU `precision` is fp32 (the default), tf32, bf16 or fp16. docs/runtime.md

    `threads` is one a physical core by default. `progress(done, total, kernel)` hears of each kernel that had to be
    compiled. `cache` is a folder for compiled kernels, True for the user's own, False for none.
    `tune` measures kernels that can be made in several ways and remembers the fastest in that folder.
    `batches` are batch sizes: a call takes the programs of its own, and all share parameters, statistics and the
    optimiser's state. By default it is the graph's; `add_batch` compiles for more. `freeze` has globs of parameters
    that are not trained.
    `world` is what `bnfuse.parallel.open_world()` gave to each of several processes: the graph's batch is one's, and
    gradients are means over all of them, exchanged when `bucket` bytes are finished (4 MiB by default);
    between GPUs with `wire="bf16"` in half of their bits.
    docs/parallel.md
    """
    from bnfuse.parallel.ranks import BUCKET
    from bnfuse.runtime import compile_step
    from bnfuse.runtime.program.optim import require_optimizer

    require_optimizer(optimizer)
    graph = frozen(open_graph(source, **signature), freeze)
    graph.state()  # complains of values that are missing before the work, not after it
    return compile_step(
        graph,
        target=target,
        optimizer=optimizer,
        threads=threads,
        progress=progress,
        cache=cache,
        tune=tune,
        precision=precision,
        batches=batches,
        world=world,
        bucket=BUCKET if bucket is None else bucket,
        wire=wire,
    )


def add_batch(step: Step, batch: int, *, progress: Bar | None = None, cache: bool | str | Path = True) -> None:
    """Compile a step for another batch size too, which shares its state. A size that it has is nothing to do.

    Raises BnfuseError where its graph has no such batch. `progress` and `cache` are those of `compile`.
    """
    from bnfuse.runtime import add_batch as add

    add(step, batch, progress=progress, cache=cache)


def open_step(
    source: Source,
    *,
    threads: int | None = None,
    target: str | None = None,
    precision: str | None = None,
    world: World | None = None,
    **options: Any,
) -> Step:
    """Open the step of a file that `step.export` wrote (it has its own target and optimiser), or compile a graph
    now. `world` is that of `compile`."""
    from bnfuse.runtime import Step, load_step

    if isinstance(source, Step):
        return source
    if isinstance(source, str | os.PathLike) and Path(source).suffix == ".bnf":
        if target is not None or precision is not None:
            raise BnfuseError(f"{source}: is compiled already: leave target and precision out, or give it a graph")
        return load_step(Path(source), threads=threads, world=world)
    return compile(source, target or "cpu", threads=threads, precision=precision, world=world, **options)


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


def export_inference(
    source: Source | Step,
    path: str | Path,
    *,
    state: Any = None,
    ema: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    scale: float | None = None,
    classes: Sequence[str] = (),
    **signature: Any,
) -> str | None:
    """Write the trained network as a model for inference that any ONNX runtime runs: standard operators only.

    `source` is a step, with its state, or a training graph of any level, with its initial values; `state` (a dict of
    arrays by name, or a checkpoint's file) overrules both; with `ema` it is the average of the weights that the step or
    the checkpoint has. BatchNormalization has the running statistics, Dropout is gone, the batch is `N` where shapes
    allow. `mean`, `std`, `scale` and `classes` go into the metadata: what images
    must be normalised by (x / scale - mean) / std, and the names of the classes. Raises where a value is not finite.
    Gives why the batch is fixed in the file, None where it is open. docs/training.md
    """
    from bnfuse.exporting import export_model

    about: dict[str, Any] = {"mean": mean, "std": std, "scale": scale, "classes": classes}
    return export_model(source, path, state=state, ema=ema, **about, **signature)


def bench(source: Source, *, plot: str | Path | None = None, progress: Progress = quiet, **options: Any) -> Benchmark:
    """Time a step at several levels and in other runtimes, in turns, and measure the peak memory of each.

    levels        none, rcf, mvf, bnff, icf, each also with +pool-first or +no-pool-first; none and icf by default
    samples       specs of `rewrite`: each level also with each of them
    against       ort, torch, torch-cl, torch-compile; on a GPU torch's, each also with +graph
    repetitions   timed steps of each, 9 by default, behind `warm_up` others, 2 by default
    wait          seconds of patience for an idle machine, 60 by default
    profile       our steps kernel by kernel too; `estimate`: also what each kernel is predicted to take here
    compile_time  compiling with empty caches too; memory=False leaves peak memory out
    plot          the file of a picture

    tune, threads, target and precision are those of `compile`, seed is that of the data. docs/bench.md
    """
    from bnfuse.benchmarking import run as benchmark

    opening, asked = parted(options)
    plan = benchmark.plan_of(**asked)
    require_apart(source, plot)
    return benchmark.run_benchmark(open_graph(source, **opening), plan, plot=plot, progress=progress)


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
