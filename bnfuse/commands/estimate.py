"""The command that estimates: `bnfuse estimate`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from bnfuse.commands.options import (
    Channels,
    Checkpoint,
    Classes,
    DataInput,
    ImageSize,
    Json,
    LabelsInput,
    Settings,
    opening,
    settings,
)
from bnfuse.commands.output import Progress, require_text_writable, show, show_json, write_text
from bnfuse.core.files import require_apart


class Order(str, enum.Enum):
    file = "file"
    dfs = "dfs"


class Optimizer(str, enum.Enum):
    none = "none"
    sgd = "sgd"
    momentum = "momentum"
    adamw = "adamw"


class Reduce(str, enum.Enum):
    tree = "tree"
    server = "server"


class Scaling(str, enum.Enum):
    strong = "strong"
    weak = "weak"


def estimate(
    source: Annotated[
        str,
        typer.Argument(metavar="NAME|TRAIN.ONNX", help="A zoo network or a training graph.", show_default=False),
    ],
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="i9-10980xe, rtx2080ti, rx6900xt, a100, h100 (the default), host (this machine, as measured), or a "
            "ReRAM/GPU stack: 2r2g, 3r1g.",
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        str | None, typer.Option(metavar="B", help="Its cache: 24MB (of 2^20).", show_default=False)
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="B/s", help="Its memory bandwidth: 616GB/s.", show_default=False)
    ] = None,
    flops: Annotated[
        str | None, typer.Option(metavar="FLOP/s", help="Its rate of computing: 13.45TFLOP/s.", show_default=False)
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the host again.")] = False,
    level: Annotated[
        list[str] | None,
        typer.Option(metavar="L,...", help="Levels to compare: none,rcf,mvf,bnff,icf.", show_default=False),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=A:B:STEP",
            help="An estimate for each value of cache, bandwidth, flops, batch: cache=24MB:1000MB:2MB, batch=8,16.",
            show_default=False,
        ),
    ] = None,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Where bytes are reused: the five scopes, and the cache that each needs.")
    ] = False,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="FLOP for each byte of the layers, and what they attain at that.")
    ] = False,
    workers: Annotated[
        str | None,
        typer.Option(metavar="P,...", help="Data-parallel steps on so many workers: 1,2,4,8.", show_default=False),
    ] = None,
    network: Annotated[str, typer.Option(metavar="B/s", help="Bandwidth between workers: 6GB/s, 100Gbit/s.")] = "6GB/s",
    reduce: Annotated[Reduce, typer.Option(help="How gradients are summed.")] = Reduce.tree,
    scaling: Annotated[
        Scaling, typer.Option(help="Whether workers share a batch (strong) or have one each (weak).")
    ] = Scaling.strong,
    overlap: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the backward pass that communication hides behind.")
    ] = 0.0,
    remove: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="BatchNorms to take out, as of `bnfuse rewrite`.", show_default=False),
    ] = None,
    order: Annotated[Order, typer.Option(help="The file's order, or depth first to the joins.")] = Order.file,
    optimizer: Annotated[Optimizer, typer.Option(help="Count the update of a training graph's parameters.")] = (
        Optimizer.none
    ),
    views: Annotated[bool, typer.Option("--views", help="Count concatenations and reshapes as copies.")] = False,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="A modelling choice (docs/estimate.md), repeatable.", show_default=False
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images in a batch (zoo).", show_default=False)] = None,
    image: ImageSize = None,
    channels: Channels = None,
    classes: Classes = None,
    set_: Settings = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Write a picture.", show_default=False)
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE.csv", help="Write layers, or points, as CSV.", show_default=False),
    ] = None,
    json: Json = False,
    checkpoint: Checkpoint = None,
    data_input: DataInput = None,
    labels_input: LabelsInput = None,
) -> None:
    """Time and memory traffic of a training step on hardware that need not be here (docs/estimate.md).

    \b
    bnfuse estimate train.onnx --hardware a100
    bnfuse estimate train.onnx --hardware host --level none,rcf,mvf,bnff,icf
    bnfuse estimate resnet50 --batch 32 --hardware rtx2080ti --sweep cache=24MB:1000MB:2MB --plot cache.png
    bnfuse estimate train.onnx --cache 96MB --bandwidth 1.5TB/s --flops 30TFLOP/s --reuse
    bnfuse estimate googlenet --batch 1024 --workers 1,2,4,8,16,32 --network 6GB/s
    bnfuse estimate vgg16 --image 32 --hardware 3r1g --remove paper
    """
    from bnfuse import api

    require_apart(source, plot, csv)
    if csv:
        require_text_writable(csv)
    progress = Progress()
    found = api.estimate(
        source,
        hardware=hardware,
        cache=cache,
        bandwidth=bandwidth,
        flops=flops,
        measure=measure,
        levels=level or (),
        sweep=sweep,
        reuse=reuse,
        roofline=roofline,
        workers=workers,
        network=network,
        reduce=reduce.value,
        scaling=scaling.value,
        overlap=overlap,
        remove=remove,
        order=order.value,
        optimizer=optimizer.value,
        views=views,
        assume=settings(assume, "--assume"),
        zoo={"batch": batch, "image": image, "channels": channels, "classes": classes, **settings(set_)},
        plot=plot,
        progress=progress,
        **opening(checkpoint, data_input, labels_input),
    )
    progress.clear()
    if csv:
        write_text(csv, found.to_csv().rstrip("\n"))
    show_json(found.to_json()) if json else show(found.sections())


COMMANDS = (estimate,)
