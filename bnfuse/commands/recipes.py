"""Options of `bnfuse train` that make up a recipe: rates, labels, mixed images, when to stop."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

Schedule = Annotated[
    str,
    typer.Option(
        metavar="S",
        help="Learning rates: cosine, constant, step:30,60,80[@0.1], poly[:power], exp:FACTOR, one-cycle[:SHARE], "
        "restarts:EPOCHS[xFACTOR].",
    ),
]
WarmUp = Annotated[
    float, typer.Option(min=0, metavar="EPOCHS", help="The rate climbs linearly, step by step, for so long.")
]
WarmUpRate = Annotated[
    float | None,
    typer.Option(
        "--warm-up-lr", min=0, help="The rate that a warm-up begins at (default: near 0).", show_default=False
    ),
]
MinRate = Annotated[float, typer.Option("--min-lr", min=0, help="The rate that the schedule falls to.")]


class By(str, enum.Enum):
    """When the rate changes."""

    step = "step"
    epoch = "epoch"


ScheduleBy = Annotated[By, typer.Option(help="Change the rate from step to step, or from epoch to epoch.")]
LabelSmoothing = Annotated[
    float, typer.Option(min=0, max=1, metavar="S", help="Spread this share of each label over all classes.")
]
ClassWeights = Annotated[
    str | None,
    typer.Option(
        metavar="balanced|FILE",
        help="Weights of the classes in the loss: .npy, or a text of numbers.",
        show_default=False,
    ),
]
Mixup = Annotated[float, typer.Option(min=0, metavar="ALPHA", help="mixup of the images of a batch (0: none).")]
Cutmix = Annotated[float, typer.Option(min=0, metavar="ALPHA", help="cutmix of the images of a batch (0: none).")]
MixupProb = Annotated[float, typer.Option(min=0, max=1, metavar="P", help="How often a batch is mixed.")]
MixupSwitchProb = Annotated[
    float, typer.Option(min=0, max=1, metavar="P", help="How often by cutmix, where both are asked for.")
]
MixupOffEpoch = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="After epoch N nothing is mixed.", show_default=False)
]
Patience = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Stop after N evaluations without a gain.", show_default=False),
]
MinDelta = Annotated[
    float, typer.Option(min=0, max=1, metavar="X", help="A gain in accuracy counts where it is larger (--patience).")
]
Metrics = Annotated[
    Path | None,
    typer.Option(metavar="FILE.jsonl|csv", help="Write a line for each epoch.", show_default=False),
]
TensorBoard = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard", metavar="DIR", help="Write scalars for TensorBoard (bnfuse[tensorboard]).", show_default=False
    ),
]
