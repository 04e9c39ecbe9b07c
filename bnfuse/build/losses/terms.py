"""What a loss is made of: terms, each of a kind, of an output, with options and a weight.

cross-entropy                                           of the only output
cross-entropy(ignore_index=255,label_smoothing=0.1)
cross-entropy@main + 0.4*cross-entropy@aux              a weighted sum over several outputs
none                                                    no loss: the gradients of the outputs are inputs

A loss that is a graph (`own`, FILE.onnx) has no terms: bnfuse/build/own_losses.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bnfuse.core.errors import BnfuseError

from .formulas import LOSSES

NONE = "none"

_TERM = re.compile(
    r"\s*(?:(?P<weight>[0-9.eE+-]+)\s*\*\s*)?(?P<kind>[a-z0-9-]+)\s*(?:\((?P<options>[^)]*)\))?\s*(?:@(?P<output>.+?))?\s*"
)
_BETWEEN = re.compile(r"\s\+\s")


@dataclasses.dataclass(frozen=True)
class Term:
    """One term of a loss: `weight` times a loss of this kind over an output, None where the network has only one."""

    kind: str
    output: str | None = None
    weight: float = 1.0
    options: Mapping[str, float | np.ndarray] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise BnfuseError(f"loss '{self.kind}' is unknown: it is {', '.join(LOSSES)}, {NONE}, own or FILE.onnx")
        unknown = [name for name in self.options if name not in LOSSES[self.kind].options]
        if unknown:
            known = ", ".join(LOSSES[self.kind].options) or "none"
            raise BnfuseError(f"loss '{self.kind}' has no option '{unknown[0]}': there are {known}")
        if not math.isfinite(self.weight):
            raise BnfuseError(f"the weight {self.weight} of loss '{self.kind}' is no number")
        LOSSES[self.kind].check(self.options)


def with_options(terms: Sequence[Term], **options: float | np.ndarray | None) -> tuple[Term, ...]:
    """Give the terms with options of all their cross-entropies; None is none. Raises BnfuseError where there is no
    cross-entropy, or it has the option already."""
    given = {name: value for name, value in options.items() if value is not None}
    chosen = [term for term in terms if term.kind == "cross-entropy"]
    for name in given:
        option = f"--{name.replace('_', '-')}"
        if not chosen:
            raise BnfuseError(f"{option} is an option of --loss cross-entropy: there is none")
        if any(name in term.options for term in chosen):
            raise BnfuseError(f"{option} is in --loss already: give it once")
    return tuple(
        dataclasses.replace(term, options={**term.options, **given}) if term.kind == "cross-entropy" else term
        for term in terms
    )


def parse_loss(text: str) -> tuple[Term, ...]:
    """Read a loss as it is written on the command line; none gives no terms. Raises BnfuseError with what is wrong."""
    if text.strip() == NONE:
        return ()
    return tuple(_term(part) for part in _BETWEEN.split(text))


def _term(text: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        raise BnfuseError(
            f"loss '{text}' is not [WEIGHT*]KIND[(option=value,...)][@OUTPUT]: the kinds are {', '.join(LOSSES)}"
        )
    options = dict(_option(part, text) for part in (match["options"] or "").split(",") if part.strip())
    weight = 1.0 if match["weight"] is None else _number(match["weight"], text)
    return Term(match["kind"], match["output"], weight, options)


def _option(part: str, text: str) -> tuple[str, float | np.ndarray]:
    name, equals, value = (each.strip() for each in part.partition("="))
    if not equals or not value:
        raise BnfuseError(f"option '{part.strip()}' of loss '{text}' is not name=value")
    return name, _vector(value, text) if value.endswith(".npy") else _number(value, text)


def _number(value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise BnfuseError(f"'{value}' in loss '{text}' is neither a number nor the name of an .npy file") from None


def _vector(path: str, text: str) -> np.ndarray:
    if not Path(path).is_file():
        raise BnfuseError(f"'{path}' in loss '{text}' is no file")
    try:
        return np.load(path, allow_pickle=False)
    except ValueError as error:
        raise BnfuseError(f"'{path}' in loss '{text}' cannot be read: {error}") from None
