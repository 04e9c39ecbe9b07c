"""Options that several commands share."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from bnfuse.core.errors import BnfuseError

Model = Annotated[Path, typer.Argument(help="A training graph (.onnx).", metavar="TRAIN.ONNX", show_default=False)]
Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout (keys: docs/cli.md).")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads; by default one a physical core.", show_default=False)
]
Target = Annotated[
    str,
    typer.Option(
        help="cpu, or cpu:MCPU with an LLVM CPU name; cuda, or cuda:ARCHITECTURE such as cuda:sm_90.",
        metavar="cpu[:MCPU]|cuda[:sm_XX]",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(metavar="P", help="fp32 or bf16; on a GPU also tf32 or fp16 (default: fp32).", show_default=False),
]
Tune = Annotated[
    bool, typer.Option("--tune", help="Measure kernels that can be made in several ways; the fastest are remembered.")
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="onnxruntime checkpoint with the values of parameters.", metavar="FILE", show_default=False),
]
DataInput = Annotated[
    list[str] | None,
    typer.Option(
        help="Graph input that takes the images, where it cannot be told.", metavar="NAME", show_default=False
    ),
]
LabelsInput = Annotated[
    list[str] | None,
    typer.Option(
        help="Graph input that takes the labels, where it cannot be told.", metavar="NAME", show_default=False
    ),
]


def image_size(text: str) -> tuple[int, int]:
    """Read the size of images: 224 -> (224, 224), 190x226 -> (190, 226): height, then width."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isascii() and side.isdigit() and int(side) for side in sides):
        raise typer.BadParameter(f"'{text}' is no image size: write it as 224, or as 190x226 (height x width)")
    return int(sides[0]), int(sides[-1])


ImageSize = Annotated[
    Any,
    typer.Option(
        parser=image_size, metavar="S|HxW", help="Side of the images, or height x width (zoo).", show_default=False
    ),
]
Channels = Annotated[int | None, typer.Option(min=1, help="Channels of the images (zoo).", show_default=False)]
Classes = Annotated[int | None, typer.Option(min=1, help="Classes (zoo).", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A metaparameter of a zoo network: KEY=VALUE, repeatable.",
        metavar="KEY=VALUE",
        show_default=False,
    ),
]


Weights = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|timm:NAME|torchvision:NAME",
        help="Values for parameters and statistics: .safetensors, .pt or .pth of torch, or a pretrained network.",
        show_default=False,
    ),
]
SkipHead = Annotated[
    bool,
    typer.Option("--skip-head", help="Leave out the last layer of --weights for another number of classes."),
]
PartialWeights = Annotated[
    bool,
    typer.Option("--partial-weights", help="Take what --weights has of the network, and leave out what it has else."),
]


class Unit(str, enum.Enum):
    """What sizes are shown in."""

    decimal = "decimal"
    binary = "binary"


class RunningVariance(str, enum.Enum):
    """Whose definition running variances follow."""

    onnx = "onnx"
    torch = "torch"


Units = Annotated[Unit, typer.Option(help="MB of 10^6 bytes, or MiB of 2^20.")]


# Of commands that train


class OptimizerName(str, enum.Enum):
    """What updates the parameters."""

    sgd = "sgd"
    adamw = "adamw"
    adam = "adam"
    rmsprop = "rmsprop"
    rmsproptf = "rmsproptf"
    lion = "lion"


OptimizerOption = Annotated[OptimizerName, typer.Option("--optimizer", help="The optimiser in the step.")]
LearningRate = Annotated[float, typer.Option(min=0, help="Learning rate.")]
Momentum = Annotated[float, typer.Option(min=0, help="Momentum (sgd, rmsprop, rmsproptf).")]
Nesterov = Annotated[bool, typer.Option("--nesterov", help="Nesterov's momentum (sgd).")]
WeightDecay = Annotated[float, typer.Option(min=0, help="Weight decay, of all parameters.")]
NoDecay = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Parameters that weight decay leaves alone.", show_default=False),
]
Augment = Annotated[
    str,
    typer.Option(
        metavar="A,...",
        help="none, flip, pad-crop[:pixels], random-resized-crop[:min-scale], jitter:0.4[,0.4,0.4,0.1], "
        "rand-augment[:ops,magnitude], random-erasing[:probability].",
    ),
]


class LastBatchName(str, enum.Enum):
    """What becomes of images that do not fill the last batch of an epoch."""

    drop = "drop"
    train = "train"


LastBatch = Annotated[
    LastBatchName,
    typer.Option(
        "--last-batch",
        help="Images that do not fill the last batch of an epoch: drop leaves them to the next epoch's order, "
        "train makes a smaller batch of them (the step is compiled for it too).",
    ),
]
SkipUnreadable = Annotated[
    bool, typer.Option("--skip-unreadable", help="Leave out files of a folder that cannot be read, and count them.")
]
Stream = Annotated[
    bool,
    typer.Option("--stream", help="Decode images when they are needed; what does not fit into memory is in any case."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Threads that decode images and change their colours (default: the cores that the step leaves).",
        show_default=False,
    ),
]
CropShare = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Take the middle of images, so much of their shorter side (default: 0.875 of folders where training takes "
        "random-resized-crop, else all of each image, squashed).",
        show_default=False,
    ),
]
Mean = Annotated[
    str | None,
    typer.Option(
        metavar="imagenet|M[,M,M]",
        help="What images from 0 to 1 are normalised by, with --std (default: those of the images to train on).",
        show_default=False,
    ),
]
Std = Annotated[str | None, typer.Option(metavar="imagenet|S[,S,S]", help="As --mean.", show_default=False)]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="NAME|DIR|FILE.npz|TARS|hf:NAME",
        help="digits, fashion-mnist, a folder of images, arrays, tars as train-{000..009}.tar, or Hugging Face's.",
    ),
]


# What they come to


def opening(checkpoint: Path | None, data_input: list[str] | None, labels_input: list[str] | None) -> dict[str, Any]:
    """Gather the keywords for opening a file that others wrote."""
    return {"checkpoint": checkpoint, "data_input": data_input, "labels_input": labels_input}


def loading(weights: str | None, skip_head: bool, partial_weights: bool) -> dict[str, Any]:
    """Gather the keywords for initial values that come from elsewhere. Raises BnfuseError for options without any."""
    from bnfuse.fromtorch.initial_state import Loading

    flags = ("--skip-head", "--partial-weights")
    given = [flag for flag, value in zip(flags, (skip_head, partial_weights), strict=True) if value]
    if weights is None and given:
        raise BnfuseError(f"{' and '.join(given)}: of --weights, which is not given")
    return {"weights": weights, "loading": Loading(skip_head, partial_weights, options=flags)}


def zoo(
    batch: int | None, image: Any, channels: int | None, classes: int | None, pairs: list[str] | None
) -> dict[str, Any]:
    """Gather the sizes and metaparameters of a network of the zoo; None where a size was not given."""
    return {"batch": batch, "image": image, "channels": channels, "classes": classes, **settings(pairs)}


def settings(pairs: list[str] | None, option: str = "--set") -> dict[str, str]:
    """Read pairs: ["growth=12"] -> {"growth": "12"}. Raises BnfuseError for what is none."""
    found = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BnfuseError(f"{option} {pair}: write it as KEY=VALUE")
        found[key] = value
    return found
