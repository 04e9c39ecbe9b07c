"""The command that estimates: `bnfuse estimate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bnfuse.commands import options
from bnfuse.commands.derived import taking
from bnfuse.commands.output import Progress, require_text_writable, show, show_json, write_text
from bnfuse.core.files import require_apart
from bnfuse.estimating.options import Request


@taking(Request)
def estimate(
    source: Annotated[
        str,
        typer.Argument(metavar="NAME|TRAIN.ONNX", help="A zoo network or a training graph.", show_default=False),
    ],
    *,
    batch: Annotated[int | None, typer.Option(min=1, help="Images in a batch (zoo).", show_default=False)] = None,
    image: options.ImageSize = None,
    channels: options.Channels = None,
    classes: options.Classes = None,
    set_: options.Settings = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Write a picture.", show_default=False)
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE.csv", help="Write layers, or points, as CSV.", show_default=False),
    ] = None,
    json: options.Json = False,
    checkpoint: options.Checkpoint = None,
    data_input: options.DataInput = None,
    labels_input: options.LabelsInput = None,
    **asked: Any,
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
        zoo=options.zoo(batch, image, channels, classes, set_),
        plot=plot,
        progress=progress,
        **asked,
        **options.opening(checkpoint, data_input, labels_input),
    )
    progress.clear()
    if csv:
        write_text(csv, found.to_csv().rstrip("\n"))
    show_json(found.to_json()) if json else show(found.sections())


COMMANDS = (estimate,)
