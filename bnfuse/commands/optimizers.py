"""Options of commands that train: the optimiser's, its rates, the data and what is done to them."""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class OptimizerName(str, enum.Enum):
    sgd = "sgd"
    adamw = "adamw"


OptimizerOption = Annotated[OptimizerName, typer.Option("--optimizer", help="The optimiser in the step.")]
LearningRate = Annotated[float, typer.Option(min=0, help="Learning rate.")]
Momentum = Annotated[float, typer.Option(min=0, help="Momentum (sgd).")]
Nesterov = Annotated[bool, typer.Option("--nesterov", help="Nesterov's momentum (sgd).")]
WeightDecay = Annotated[float, typer.Option(min=0, help="Weight decay, of all parameters.")]
NoDecay = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Parameters that weight decay leaves alone.", show_default=False),
]
Schedule = Annotated[
    str, typer.Option(metavar="S", help="Learning rates: cosine, constant, step:30,60,80[@0.1], poly[:power].")
]
WarmUp = Annotated[
    float, typer.Option(min=0, metavar="EPOCHS", help="The rate climbs linearly, step by step, for so long.")
]
Augment = Annotated[str, typer.Option(metavar="A", help="none, flip, pad-crop[:pixels], or flip,pad-crop.")]
SkipUnreadable = Annotated[
    bool, typer.Option("--skip-unreadable", help="Leave out files of a folder that cannot be read, and count them.")
]
Data = Annotated[
    str,
    typer.Option("--data", metavar="NAME|DIR|FILE.npz", help="digits, fashion-mnist, a folder of images, or arrays."),
]
