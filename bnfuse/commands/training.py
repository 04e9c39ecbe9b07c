"""The command that trains."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from bnfuse.commands import options, recipes, updates, worlds
from bnfuse.commands.config import Config, asked_for, written
from bnfuse.commands.output import Progress, show, show_json


def train(
    context: typer.Context,
    model: options.Model,
    data: options.Data,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training data.")] = 10,
    target: options.Target = "cpu",
    precision: options.Precision = None,
    optimizer: options.OptimizerOption = options.OptimizerName.sgd,
    lr: options.LearningRate = 0.1,
    momentum: options.Momentum = 0.9,
    nesterov: options.Nesterov = False,
    weight_decay: options.WeightDecay = 0.0,
    no_decay: options.NoDecay = None,
    freeze: updates.Freeze = None,
    opt: updates.Opt = None,
    lr_of: updates.LrOf = None,
    decay_of: updates.DecayOf = None,
    layer_decay: updates.LayerDecay = 1.0,
    clip_norm: updates.ClipNorm = None,
    clip_value: updates.ClipValue = None,
    accumulate: updates.Accumulate = 1,
    ema: updates.Ema = None,
    ema_warm_up: updates.EmaWarmUp = False,
    schedule: recipes.Schedule = "cosine",
    warm_up: recipes.WarmUp = 0.0,
    warm_up_lr: recipes.WarmUpRate = None,
    min_lr: recipes.MinRate = 0.0,
    schedule_by: recipes.ScheduleBy = recipes.By.step,
    label_smoothing: recipes.LabelSmoothing = 0.0,
    class_weights: recipes.ClassWeights = None,
    mixup: recipes.Mixup = 0.0,
    cutmix: recipes.Cutmix = 0.0,
    mixup_prob: recipes.MixupProb = 1.0,
    mixup_switch_prob: recipes.MixupSwitchProb = 0.5,
    mixup_off_epoch: recipes.MixupOffEpoch = None,
    augment: options.Augment = "none",
    last_batch: options.LastBatch = options.LastBatchName.drop,
    eval_every: Annotated[int, typer.Option(min=1, metavar="EPOCHS", help="Evaluate every so many epochs.")] = 1,
    patience: recipes.Patience = None,
    min_delta: recipes.MinDelta = 0.0,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|CKPT.safetensors",
            help="A folder for the last and the best checkpoint, or a file for the state after each epoch.",
            show_default=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEPS", help="Checkpoints within epochs too (--save DIR).", show_default=False),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|DIR|CKPT.safetensors",
            help="auto: go on with the run in the folder of --save, if there is one. DIR: go on with that run. "
            "A file: begin a run with that state.",
            show_default=False,
        ),
    ] = None,
    metrics: recipes.Metrics = None,
    tensorboard: recipes.TensorBoard = None,
    log_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEPS", help="Lines of metrics every so many steps too.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png|svg", help="Write the curves as a picture.", show_default=False),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="MODEL.onnx", help="Write the trained network for inference.", show_default=False),
    ] = None,
    weights: options.Weights = None,
    skip_head: options.SkipHead = False,
    partial_weights: options.PartialWeights = False,
    skip_unreadable: options.SkipUnreadable = False,
    stream: options.Stream = False,
    workers: options.Workers = None,
    crop_share: options.CropShare = None,
    mean: options.Mean = None,
    std: options.Std = None,
    seed: options.Seed = 0,
    threads: options.Threads = None,
    world: worlds.WorldOption = worlds.WorldName.auto,
    world_timeout: worlds.WorldTimeout = None,
    deterministic: worlds.Deterministic = False,
    wire: worlds.Wire = worlds.WireName.fp32,
    json: options.Json = False,
    checkpoint: options.Checkpoint = None,
    data_input: options.DataInput = None,
    labels_input: options.LabelsInput = None,
    config: Config = None,
) -> None:
    """Train on a data set, with the accuracy on held-out images after each epoch.

    A folder of --save gets last.safetensors and best.safetensors, each whole at any time; --resume auto goes on from
    the last, bit by bit as if nothing had happened. A loss of nan ends the run with the name of the layer behind it.

    \b
    bnfuse train fused.onnx --data digits --epochs 5 --lr 0.05
    bnfuse train fused.onnx --data fashion-mnist --augment flip,pad-crop --save run/ --resume auto
    bnfuse train fused.onnx --data photos/ --epochs 90 --schedule step:30,60,80 --warm-up 5 --weight-decay 1e-4
    bnfuse train fused.onnx --data photos/ --label-smoothing 0.1 --mixup 0.2 --cutmix 1.0
    bnfuse train fused.onnx --config recipe.toml --epochs 30
    bnfuse train fused.onnx --data photos/ --augment random-resized-crop,flip,jitter:0.4 --mean imagenet --std imagenet
    bnfuse train fused.onnx --data digits --last-batch train
    bnfuse train fused.onnx --data photos/ --weights timm:resnet50.a1_in1k --skip-head --lr 0.01
    bnfuse train fused.onnx --data photos/ --accumulate 8 --clip-norm 1 --ema 0.9998 --lr-of 'head.*=10'
    bnfuse train fused.onnx --data digits --metrics run.jsonl --log-every 10 --plot run.png --export model.onnx
    mpirun -n 4 bnfuse train fused.onnx --data photos/ --save run/ --resume auto
    torchrun --nproc-per-node 2 -m bnfuse train fused.onnx --data photos/ --target cuda --precision bf16
    """
    from bnfuse import api

    ranks = worlds.here.open("train", world, world_timeout, deterministic, target)

    def chosen() -> Any:
        recipe = updates.recipe(opt, lr_of, decay_of, layer_decay, clip_norm, clip_value, accumulate, ema, ema_warm_up)
        return api.optimizer(optimizer.value, lr, momentum, nesterov, weight_decay, no_decay or (), **recipe)

    history: Any = api.train(
        model,
        data,
        epochs=epochs,
        target=target,
        precision=precision,
        freeze=freeze or (),
        optimizer=worlds.here.together(chosen),
        schedule=schedule,
        warm_up=warm_up,
        warm_up_lr=warm_up_lr,
        min_lr=min_lr,
        schedule_by=schedule_by.value,
        label_smoothing=label_smoothing,
        class_weights=class_weights,
        mixup=mixup,
        cutmix=cutmix,
        mixup_prob=mixup_prob,
        mixup_switch_prob=mixup_switch_prob,
        mixup_off_epoch=mixup_off_epoch,
        augment=augment,
        last_batch=last_batch.value,
        eval_every=eval_every,
        patience=patience,
        min_delta=min_delta,
        save_to=save,
        checkpoint_every=checkpoint_every,
        resume=resume,
        metrics=metrics,
        tensorboard=tensorboard,
        log_every=log_every,
        plot=plot,
        export=export,
        skip_unreadable=skip_unreadable,
        stream=stream,
        workers=workers,
        crop_share=crop_share,
        mean=mean,
        std=std,
        seed=seed,
        threads=threads,
        recorded=written(context.params),
        world=ranks,
        wire=wire.value,
        progress=Progress(asked_for(context)),
        **options.loading(weights, skip_head, partial_weights),
        **options.opening(checkpoint, data_input, labels_input),
    )
    if worlds.here.leads:
        show_json(history.to_json()) if json else show(history.sections())


class PartName(str, enum.Enum):
    """Parts of a data set."""

    train = "train"
    val = "val"
    test = "test"


def evaluate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL.ONNX|TRAIN.ONNX|STEP.BNF",
            help="A model for inference, a training graph, or a compiled step.",
            show_default=False,
        ),
    ],
    data: options.Data,
    state: Annotated[
        Path | None,
        typer.Option(metavar="CKPT.safetensors", help="The values of a training graph or step.", show_default=False),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="By the average of the weights in the checkpoint.")] = False,
    part: Annotated[
        PartName | None,
        typer.Option(help="Of the data (default: what training holds out).", show_default=False),
    ] = None,
    target: options.Target = "cpu",
    precision: options.Precision = None,
    confusion: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png|csv", help="Write which classes are taken for which.", show_default=False),
    ] = None,
    skip_unreadable: options.SkipUnreadable = False,
    stream: options.Stream = False,
    workers: options.Workers = None,
    crop_share: options.CropShare = None,
    mean: options.Mean = None,
    std: options.Std = None,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Tell how well a network does on images: accuracies and cross-entropy, each image counted once.

    \b
    bnfuse evaluate model.onnx --data digits
    bnfuse evaluate fused.onnx --data photos/ --state run/best.safetensors --part test
    bnfuse evaluate fused.onnx --data photos/ --state run/best.safetensors --ema
    bnfuse evaluate model.onnx --data photos/ --confusion confusion.png
    """
    from bnfuse import api

    found = api.evaluate(
        source,
        data,
        part=part.value if part else None,
        state=state,
        ema=ema,
        confusion=confusion,
        target=target,
        precision=precision,
        threads=threads,
        skip_unreadable=skip_unreadable,
        stream=stream,
        workers=workers,
        crop_share=crop_share,
        mean=mean,
        std=std,
        progress=Progress(),
    )
    show_json(found.to_json()) if json else show(found.sections())


COMMANDS: tuple[Any, ...] = (train, evaluate)
