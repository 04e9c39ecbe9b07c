"""Options of updates that `compile` and `train` share: docs/updates.md."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bnfuse.commands.options import settings
from bnfuse.core.errors import BnfuseError

Freeze = Annotated[
    list[str] | None,
    typer.Option(
        "--freeze",
        metavar="GLOB",
        help="Parameters not to train; repeatable (BatchNorms' statistics: build --freeze-bn).",
        show_default=False,
    ),
]
Opt = Annotated[
    list[str] | None,
    typer.Option(
        "--opt",
        metavar="KEY=VALUE",
        help="A further number of the optimiser: epsilon=1e-3, alpha=0.9, betas=0.9,0.99; repeatable.",
        show_default=False,
    ),
]
LrOf = Annotated[
    list[str] | None,
    typer.Option(
        "--lr-of",
        metavar="GLOB=FACTOR",
        help="Learning rate of parameters by name, as a multiple of --lr: 'head.*=10'; repeatable, the first that "
        "matches counts.",
        show_default=False,
    ),
]
DecayOf = Annotated[
    list[str] | None,
    typer.Option(
        "--decay-of",
        metavar="GLOB=DECAY",
        help="Weight decay of parameters by name: 'head.*=0.1'; repeatable.",
        show_default=False,
    ),
]
LayerDecay = Annotated[
    float,
    typer.Option(
        metavar="D", help="Learning rates shrink by this factor from each layer to the one before it (1: they do not)."
    ),
]
ClipNorm = Annotated[
    float | None,
    typer.Option(
        metavar="NORM", help="Scale all gradients down where their norm is above this (inf: only measure it)."
    ),
]
ClipValue = Annotated[float | None, typer.Option(metavar="X", help="Bring each element of the gradients into [-X, X].")]
Accumulate = Annotated[
    int, typer.Option(min=1, metavar="K", help="One update for K batches, by the mean of their gradients.")
]
Ema = Annotated[
    float | None,
    typer.Option("--ema", metavar="DECAY", help="Keep an average of weights and statistics: 0.9998."),
]
EmaWarmUp = Annotated[
    bool, typer.Option("--ema-warm-up", help="The decay of --ema climbs: (1 + t)/(10 + t) in update t at most.")
]

OPTIONS = {  # what --opt does not give, as an option of its own does
    "name": "--optimizer",
    "lr": "--lr",
    "tensorflow": "--optimizer rmsproptf",
    "momentum": "--momentum",
    "nesterov": "--nesterov",
    "weight_decay": "--weight-decay",
    "no_decay": "--no-decay",
    "groups": "--lr-of",
    "layer_decay": "--layer-decay",
    "clip_norm": "--clip-norm",
    "clip_value": "--clip-value",
    "accumulate": "--accumulate",
    "ema": "--ema",
}


def recipe(
    opt: list[str] | None,
    lr_of: list[str] | None,
    decay_of: list[str] | None,
    layer_decay: float,
    clip_norm: float | None,
    clip_value: float | None,
    accumulate: int,
    ema: float | None,
    ema_warm_up: bool,
) -> dict[str, Any]:
    """Gather what is asked of an update, as keywords of `api.optimizer`."""
    from bnfuse.runtime.program.groups import Group
    from bnfuse.runtime.program.optim import EMA

    if ema_warm_up and ema is None:
        raise BnfuseError("--ema-warm-up is of the average that --ema DECAY keeps: give that too")
    given = settings(opt, "--opt")
    for key in given:
        if key in OPTIONS:
            raise BnfuseError(f"--opt {key}: has an option of its own: {OPTIONS[key]}")
    rates = [Group(glob, lr=factor) for glob, factor in numbers(lr_of, "--lr-of")]
    decays = [Group(glob, weight_decay=decay) for glob, decay in numbers(decay_of, "--decay-of")]
    return {
        **{key: values(text, f"--opt {key}") for key, text in given.items()},
        "groups": (*rates, *decays),
        "layer_decay": layer_decay,
        "clip_norm": clip_norm,
        "clip_value": clip_value,
        "accumulate": accumulate,
        "ema": None if ema is None else EMA(ema, ema_warm_up),
    }


def numbers(pairs: list[str] | None, option: str) -> list[tuple[str, float]]:
    """Read pairs in their order: ["head.*=10"] -> [("head.*", 10.0)]. Raises BnfuseError for what is none."""
    found = []
    for pair in pairs or []:
        glob, equals, text = pair.rpartition("=")
        if not equals or not glob:
            raise BnfuseError(f"{option} {pair}: write it as GLOB=NUMBER, such as 'head.*=10'")
        found.append((glob, value(text, f"{option} {glob}")))
    return found


def values(text: str, option: str) -> float | tuple[float, ...]:
    """Read a number, or several: "0.9,0.99" -> (0.9, 0.99)."""
    parts = [value(part, option) for part in text.split(",")]
    return parts[0] if len(parts) == 1 else tuple(parts)


def value(text: str, option: str) -> float:
    """Read a number. Raises BnfuseError where the text is none."""
    try:
        return float(text)
    except ValueError:
        raise BnfuseError(f"{option}: '{text}' is no number") from None
