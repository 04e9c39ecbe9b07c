"""The command that sweeps the zoo's metaparameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bnfuse.commands import options
from bnfuse.commands.graphs import Level
from bnfuse.commands.output import Progress, show, show_json
from bnfuse.core.errors import BnfuseError


def explore(
    network: Annotated[
        str | None,
        typer.Argument(metavar="[NETWORK]", help="A network of the zoo; a preset has its own.", show_default=False),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="A metaparameter, or batch, image, channels, classes: A,B,C or FIRST:LAST:STEP; repeatable.",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A sweep of the papers: squeeze-ratio, pct3x3, bypass, nin-changes, densenet-growth, densenet-depth.",
            show_default=False,
        ),
    ] = None,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="One change of the base at a time, not every combination.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many points may be (default: 200).", show_default=False)
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images in a batch.", show_default=False)] = None,
    image: options.ImageSize = None,
    channels: options.Channels = None,
    classes: options.Classes = None,
    set_: options.Settings = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What step times are estimated on (default: h100).", show_default=False),
    ] = None,
    level: Annotated[
        Level | None, typer.Option(help="How far the second time is fused (default: icf).", show_default=False)
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate/--no-estimate", help="Step times, which need a training graph of each point.")
    ] = True,
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A modelling choice of the estimate, repeatable.", show_default=False),
    ] = None,
    pareto: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="What the front is of, min: or max: before a name: parameters, model, flops, outputs, sweeps, moved, "
            "bn-share, time, time-before, speedup, throughput, accuracy (default: parameters,time).",
            show_default=False,
        ),
    ] = None,
    accuracy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv", help="Accuracies to join: a column each for settings and accuracy.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png|svg", help="Write a picture of the front's first two.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.csv", help="Write the points as CSV.", show_default=False),
    ] = None,
    units: options.Units = options.Unit.decimal,
    json: options.Json = False,
) -> None:
    """Sweep a network's metaparameters: sizes, work, time before and after fusion.

    Every point has its parameters, FLOPs, output bytes and sweeps, and its estimated step time from the training graph
    and from its rewrite. A point that cannot be built says why, and the others go on.

    \b
    bnfuse explore squeezenet --vary squeeze=0.125,0.5,1 --vary bypass=none,simple,complex
    bnfuse explore densenet40 --vary growth=12:48:12 --vary depth=6,12 --plot growth.png -o growth.csv
    bnfuse explore --preset nin-changes --no-estimate
    bnfuse explore resnet50 --vary batch=8,16,32 --vary image=160,224 --hardware a100 --one-at-a-time
    """
    from bnfuse import api

    if not estimate and (hardware or level or assume):
        raise BnfuseError("--hardware, --level and --assume are about step times: leave them or --no-estimate out")
    base = options.zoo(batch, image, channels, classes, set_)
    found = api.explore(
        network,
        vary or (),
        base={key: value for key, value in base.items() if value is not None},
        preset_name=preset,
        separately=one_at_a_time,
        limit=limit,
        hardware=("h100" if hardware is None else hardware) if estimate else None,
        level=(level or Level.icf).value,
        assume=options.settings(assume, "--assume"),
        pareto=pareto,
        accuracy=accuracy,
        plot=plot,
        output=output,
        progress=Progress(),
    )
    show_json(found.to_json()) if json else show(found.sections(units.value))


COMMANDS = (explore,)
