"""The command that searches for the BatchNorms that training needs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from bnfuse.commands import options, recipes
from bnfuse.commands.output import Progress, show, show_json


class Method(str, enum.Enum):
    """How placements are proposed."""

    BO = "bo"
    RANDOM = "random"
    ANNEALING = "annealing"
    EXHAUSTIVE = "exhaustive"


class Cost(str, enum.Enum):
    """What a BatchNorm costs."""

    COUNT = "count"
    BYTES = "bytes"


def search(
    model: options.Model,
    data: options.Data,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, help="Trainings in all (default: 20; exhaustive: all placements).", show_default=False),
    ] = None,
    initial: Annotated[int, typer.Option(min=0, help="Random placements after the first, which keeps all.")] = 4,
    method: Annotated[
        Method, typer.Option(help="bo is the Bayesian optimisation; the others are baselines.")
    ] = Method.BO,
    penalty: Annotated[
        list[float] | None,
        typer.Option(
            "--lambda",
            metavar="X",
            min=0,
            help="Accuracy that a BatchNorm must be worth; several take turns (default: 4 tolerances over all).",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="How far below the accuracy with all BatchNorms is good enough.")
    ] = 0.01,
    cost: Annotated[Cost, typer.Option(help="Count BatchNorms, or the bytes of their maps.")] = Cost.COUNT,
    keep_affine: Annotated[
        bool, typer.Option("--keep-affine", help="Scale and bias of removed BatchNorms stay.")
    ] = False,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE.jsonl", help="Where each training is stored at once."),
    ] = Path("search.jsonl"),
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Go on with this file, or begin it.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Write a picture.", show_default=False)
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training data in each training.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Trainings a placement, whose mean accuracy counts.")] = 1,
    target: options.Target = "cpu",
    precision: options.Precision = None,
    optimizer: options.OptimizerOption = options.OptimizerName.sgd,
    lr: options.LearningRate = 0.1,
    momentum: options.Momentum = 0.9,
    nesterov: options.Nesterov = False,
    weight_decay: options.WeightDecay = 0.0,
    no_decay: options.NoDecay = None,
    schedule: recipes.Schedule = "cosine",
    warm_up: recipes.WarmUp = 0.0,
    augment: options.Augment = "none",
    skip_unreadable: options.SkipUnreadable = False,
    seed: options.Seed = 0,
    threads: options.Threads = None,
    json: options.Json = False,
    checkpoint: options.Checkpoint = None,
    data_input: options.DataInput = None,
    labels_input: options.LabelsInput = None,
) -> None:
    """Find the fewest BatchNorms that train as well as all of them.

    Trains the network again and again, each time with other BatchNorms removed. Every training is on the disk before
    the next begins; --resume goes on after a break as if there had been none. The last line is the command that
    removes what the search found to be needless.

    \b
    bnfuse search train.onnx --data digits --epochs 5 --lr 0.05 --plot search.png
    bnfuse search train.onnx --data fashion-mnist --iterations 30 --cost bytes --resume run.jsonl
    bnfuse search small.onnx --data digits --method exhaustive -o all.jsonl
    """
    from bnfuse import api

    found: Any = api.search(
        model,
        data,
        iterations=iterations,
        initial=initial,
        method=method.value,
        lambdas=penalty,
        tolerance=tolerance,
        cost=cost.value,
        keep_affine=keep_affine,
        output=output,
        resume=resume,
        plot=plot,
        epochs=epochs,
        repeats=repeats,
        target=target,
        precision=precision,
        optimizer=api.optimizer(optimizer.value, lr, momentum, nesterov, weight_decay, no_decay or ()),
        schedule=schedule,
        warm_up=warm_up,
        augment=augment,
        skip_unreadable=skip_unreadable,
        seed=seed,
        threads=threads,
        progress=Progress(),
        **options.opening(checkpoint, data_input, labels_input),
    )
    show_json(found.to_json()) if json else show(found.sections())


COMMANDS: tuple[Any, ...] = (search,)
