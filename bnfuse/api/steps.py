"""Functions that compile a step, open one, or write what it has learnt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnfuse.api.opening import Source
from bnfuse.core.errors import BnfuseError
from bnfuse.core.progress import Bar
from bnfuse.graph.freezing import frozen
from bnfuse.graph.training_graph import open_graph

if TYPE_CHECKING:
    from bnfuse.parallel.world import World
    from bnfuse.runtime import Step
    from bnfuse.runtime.program.optim import Optimizer


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
    cuda:sm_90. `precision` is fp32 (the default) or bf16, of a GPU tf32 or fp16 too. docs/runtime.md

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
