"""Optimisers: what a user writes down, and the scalars that the update launches take.

Both follow torch's definitions. The update is one sweep over all parameters (kernels/cpu/optim.py), in place.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import check_real, is_number


@dataclasses.dataclass(frozen=True)
class SGD:
    """g <- g + weight_decay*w;  v <- momentum*v + g;  w <- w - lr*v, or with Nesterov  w - lr*(g + momentum*v).

    `no_decay` has globs of the parameter names that weight decay leaves alone.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self, "lr", "momentum", "weight_decay")
        if self.nesterov and not self.momentum:
            raise BnfuseError("SGD: nesterov=True needs a momentum above 0")

    @property
    def moments(self) -> tuple[str, ...]:
        """Name the optimiser's buffers, each as long as the parameters."""
        return ("momentum",) if self.momentum else ()


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay:  w <- w*(1 - lr*weight_decay) - lr*m_hat/(sqrt(v_hat) + epsilon)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    no_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self, "lr", "epsilon", "weight_decay")
        pair = self.betas if isinstance(self.betas, Sequence) and len(self.betas) == 2 else (None,)
        if not all(is_number(beta) and 0 <= beta < 1 for beta in pair):
            raise BnfuseError(f"AdamW: betas {self.betas} must be two numbers, at least 0 and below 1")

    @property
    def moments(self) -> tuple[str, ...]:
        """Name the optimiser's buffers, each as long as the parameters."""
        return ("first_moment", "second_moment")


Optimizer = SGD | AdamW


def decays(optimizer: Optimizer, name: str) -> bool:
    """Tell whether weight decay reaches this parameter."""
    return not any(fnmatch.fnmatchcase(name, glob) for glob in optimizer.no_decay)


def unused_globs(optimizer: Optimizer, names: Iterable[str]) -> list[str]:
    """List the globs of `no_decay` that match no parameter: a spelling mistake, most likely."""
    names = list(names)
    return [glob for glob in optimizer.no_decay if not fnmatch.filter(names, glob)]


def to_data(optimizer: Optimizer | None) -> dict[str, Any] | None:
    """Give an optimiser in a form that JSON takes."""
    return None if optimizer is None else {"kind": type(optimizer).__name__, **dataclasses.asdict(optimizer)}


def from_data(data: dict[str, Any] | None) -> Optimizer | None:
    """Read an optimiser that `to_data` wrote, and check it; None for None."""
    if data is None:
        return None
    fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items() if n != "kind"}
    kind: type[Optimizer] = {"SGD": SGD, "AdamW": AdamW}[data["kind"]]
    return kind(**fields)


def check(optimizer: Optimizer, *names: str) -> None:
    """Raise BnfuseError unless these fields are in range."""
    for name in names:
        check_real(f"{type(optimizer).__name__}: {name}", getattr(optimizer, name))


def require_optimizer(given: object) -> None:
    """Raise BnfuseError for anything but one of ours: torch's optimisers know nothing of a step's parameters."""
    if given is not None and not isinstance(given, Optimizer):
        raise BnfuseError(
            f"optimizer={type(given).__module__}.{type(given).__qualname__} is none of ours: use bnfuse.SGD(lr=...) or "
            "bnfuse.AdamW(lr=...)"
        )
