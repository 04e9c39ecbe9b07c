"""Commands that list networks and build training graphs of them: models, build."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bnfuse.commands import options
from bnfuse.commands.output import require_text_writable, show, show_json
from bnfuse.core.files import require_apart
from bnfuse.core.text import Section, count, number, scaled
from bnfuse.core.vectors import read_vector

if TYPE_CHECKING:
    from bnfuse.build.zoo import ZooEntry


def models(json: options.Json = False) -> None:
    """List the networks of the zoo, with the parameters and FLOPs of their default sizes.

    \b
    bnfuse models
    bnfuse models --json
    """
    from bnfuse.build.zoo import zoo_entries

    entries = zoo_entries()
    if json:
        show_json({"models": [entry.to_json() for entry in entries]})
        return
    rows = [
        (
            e.name,
            "shapes only" if e.shape_only else f"{e.image}x{e.image}",
            number(e.parameters),
            scaled(e.flops, "FLOP"),
        )
        for e in entries
    ]
    columns = ("name", "image", "parameters", "forward, per sample")
    title = "Networks for `bnfuse build NAME`, those of shapes only for `bnfuse estimate NAME`"
    about = [line for e in entries for line in about_network(e)]
    show([Section.table(title, columns, rows), Section.lines("What they are, and what --set changes", about)])


def about_network(entry: ZooEntry) -> list[str]:
    """Write a line on a network, and its metaparameters with their defaults in lines that a narrow terminal takes."""
    settings = " ".join(f"{key}={value}" for key, value in entry.metaparameters.items())
    return [f"{entry.name}: {entry.about}", *textwrap.wrap(settings, 72, initial_indent="  ", subsequent_indent="  ")]


def build(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FORWARD.ONNX|MODEL.PY:MAKE|PROGRAM.PT2",
            help="A zoo network; a forward model; code that makes a torch module, which is run: a function, class or "
            "module in a file or in a package (package.module:make); what torch.export.save wrote.",
            show_default=False,
        ),
    ],
    output: options.Output,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Images in a batch; fixes a dynamic batch.", show_default=False)
    ] = None,
    example: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            help="What the torch module is called with: 16,3,224,224, or int64:16,20 for another type than float32; "
            "repeatable (default: images of --batch, --channels, --image).",
            show_default=False,
        ),
    ] = None,
    make_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An argument of MAKE, repeatable.", show_default=False),
    ] = None,
    image: options.ImageSize = None,
    channels: options.Channels = None,
    classes: options.Classes = None,
    seed: options.Seed = 0,
    set_: options.Settings = None,
    loss: Annotated[
        str,
        typer.Option(
            metavar="LOSS|own|FILE.onnx",
            help="The loss on top of the logits, that of the file, one in a file, or none (docs/training-file.md).",
        ),
    ] = "cross-entropy",
    label_smoothing: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="S", help="Smoothing in the loss, where `train` is not to do it.", show_default=False
        ),
    ] = None,
    class_weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Weights of the classes in the loss, where `train` is not to do it.",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Inputs that are labels of a loss own or FILE.onnx.", show_default=False),
    ] = None,
    logits: Annotated[str | None, typer.Option(help="The output that the loss reads.", show_default=False)] = None,
    train: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Parameters to train (default: all).", show_default=False)
    ] = None,
    freeze: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Parameters not to train.", show_default=False)
    ] = None,
    train_bn: Annotated[
        bool, typer.Option("--train-bn", help="Train BatchNorms that were exported for inference.")
    ] = False,
    frozen_bn: Annotated[
        bool, typer.Option("--frozen-bn", help="Keep BatchNorms that were exported for inference frozen.")
    ] = False,
    freeze_bn: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="BatchNorms to freeze, by module: they normalise by their running statistics, which stay.",
            show_default=False,
        ),
    ] = None,
    running_variance: Annotated[
        options.RunningVariance | None,
        typer.Option(
            help="Move it by the batch's biased variance (onnx) or unbiased one (torch, the default of torch modules).",
            show_default=False,
        ),
    ] = None,
    init: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Parameters to draw anew; others keep their values.", show_default=False),
    ] = None,
    allow_folded_bn: Annotated[
        bool, typer.Option("--allow-folded-bn", help="Take a file whose BatchNorms its exporter folded away.")
    ] = False,
    weights: options.Weights = None,
    skip_head: options.SkipHead = False,
    partial_weights: options.PartialWeights = False,
) -> None:
    """Make a training graph of a zoo network, of any forward ONNX model, or of a torch module.

    MODEL.PY:MAKE is your own code: it is run. A torch module is taken as it is, with its weights and in its mode.

    \b
    bnfuse build densenet121 --batch 16 --image 224 -o train.onnx
    bnfuse build resnet18 --image 190x226 -o train.onnx
    bnfuse build densenet40 --set growth=24 --classes 10 -o train.onnx
    bnfuse build forward.onnx --batch 8 --freeze 'stem.*' --train-bn -o train.onnx
    bnfuse build network_with_loss.onnx --loss own --labels target -o train.onnx
    bnfuse build model.py:make --make-arg width=2 --example 16,3,224,224 -o train.onnx
    bnfuse build torchvision.models:resnet18 --make-arg num_classes=10 --weights weights.pth --skip-head -o train.onnx
    """
    from bnfuse.build.named import build_file

    if Path(source).is_file():
        require_apart(source, output)
    if Path(loss).is_file():
        require_apart(loss, output)
    if weights and Path(weights).is_file():
        require_apart(weights, output)
    require_text_writable(output)
    built = build_file(
        source,
        output,
        zoo={"seed": seed, **options.zoo(batch, image, channels, classes, set_)},
        example=example or (),
        make_arg=make_arg or (),
        loss=loss_with(loss, label_smoothing, class_weights),
        labels=labels or [],
        logits=logits,
        train=train or ["*"],
        freeze=freeze or [],
        train_bn=train_bn,
        frozen_bn=frozen_bn,
        freeze_bn=freeze_bn or (),
        running_variance=running_variance.value if running_variance else None,
        init=init or [],
        allow_folded_bn=allow_folded_bn,
        **options.loading(weights, skip_head, partial_weights),
    )
    for warning in built.warnings:
        typer.echo(f"warning: {warning}", err=True)
    for note in built.notes:
        typer.echo(f"note: {note}")
    trained = f"{count(len(built.trainable), 'parameter')} to train"
    if built.frozen:
        trained += f", {len(built.frozen)} frozen"
    typer.echo(f"{output}: {count(len(built.model.graph.node), 'node')}, {trained}")


def loss_with(loss: str, label_smoothing: float | None, class_weights: Path | None) -> Any:
    """Give the loss with options of its cross-entropies, or the text as it is where there are none."""
    if label_smoothing is None and class_weights is None:
        return loss
    from bnfuse.build.losses import parse_loss, with_options

    weights = None if class_weights is None else read_vector(class_weights)
    return with_options(parse_loss(loss), label_smoothing=label_smoothing, class_weights=weights)


COMMANDS = (models, build)
