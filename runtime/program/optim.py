"""Optimisers: what a user writes down, and the scalars that the update launches take.

They follow torch's definitions (Lion its paper's). The update is one sweep over all parameters (kernels/cpu/optim.py),
in place. What all optimisers have in common is a `Recipe`: groups, clipping, accumulation, an average of the weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import check_real, check_whole, is_number
from bnfuse.runtime.program.groups import Group


@dataclasses.dataclass(frozen=True)
class EMA:
    """An average of parameters and running statistics over the updates:  average <- decay*average + (1 - decay)*value.

    It begins at the values that the step begins with. With `warm_up` the decay of update t is at most (1 + t)/(10 + t).
    """

    decay: float = 0.9998
    warm_up: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.decay) or not 0 <= self.decay < 1:
            raise BnfuseError(f"EMA: decay={self.decay!r} must be a number, at least 0 and below 1")

    def share(self, update: int) -> float:
        """Give 1 - decay, the share of the new values in update number `update`, from 1 on."""
        return 1 - (min(self.decay, (1 + update) / (10 + update)) if self.warm_up else self.decay)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """What is asked of an update beside its formula. All of it is by keyword.

    groups       rates and weight decay of their own by glob (groups.py); `layer_decay` d makes the rate of the i-th
                 layer from the end d^i of the last one's
    clip_norm    gradients are multiplied by min(1, clip_norm/(norm + 1e-6)), of the norm of all of them together;
                 infinity clips nothing, and has the norm measured (`step.gradient_norm`)
    clip_value   each element of a gradient is brought into [-clip_value, clip_value]
    accumulate   an update for so many backward passes, by the mean of their gradients
    ema          an average of the weights beside them, an EMA or its decay
    """

    groups: tuple[Group, ...] = ()
    layer_decay: float = 1.0
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    ema: EMA | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if is_number(self.ema):
            object.__setattr__(self, "ema", EMA(float(self.ema)))  # type: ignore[arg-type]
        object.__setattr__(self, "groups", tuple(self.groups))
        if not all(isinstance(group, Group) for group in self.groups):
            raise BnfuseError(f'{name}: groups={self.groups!r} must be of bnfuse.Group("head.*", lr=10)')
        if self.ema is not None and not isinstance(self.ema, EMA):
            raise BnfuseError(f"{name}: ema={self.ema!r} must be a decay such as 0.9998, or bnfuse.EMA(decay, warm_up)")
        if not is_number(self.layer_decay) or not 0 < self.layer_decay <= 1:
            raise BnfuseError(f"{name}: layer_decay={self.layer_decay!r} must be a number above 0, 1 at most")
        for what, value in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if value is None or (what == "clip_norm" and value == math.inf):
                continue
            check_real(f"{name}: {what}", value)
            if not value:
                raise BnfuseError(f"{name}: {what}=0 leaves nothing of the gradients: leave it out, or raise it")
        if self.clip_norm is not None and self.clip_value is not None:
            raise BnfuseError(f"{name}: clip_norm and clip_value are two ways to clip: give one of them")
        check_whole(f"{name}: accumulate", self.accumulate, 1)

    def __repr__(self) -> str:
        """Show the optimiser's own fields, and of a recipe what differs from none."""
        common = {field.name: field.default for field in dataclasses.fields(Recipe)}
        own = [field.name for field in dataclasses.fields(self) if field.name not in common]
        shown = [*own, *(name for name, default in common.items() if getattr(self, name) != default)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def moments(self) -> Mapping[str, float]:
        """Name the optimiser's buffers, each as long as the parameters, and say what they begin with."""
        raise NotImplementedError

    @property
    def has_rates(self) -> bool:
        """Whether some parameters may have another learning rate than others."""
        return self.layer_decay != 1 or any(group.lr not in (None, 1) for group in self.groups)


@dataclasses.dataclass(frozen=True, repr=False)
class SGD(Recipe):
    """g <- g + weight_decay*w;  v <- momentum*v + g;  w <- w - lr*v, or with Nesterov  w - lr*(g + momentum*v).

    `no_decay` has globs of the parameter names that weight decay leaves alone; what is by keyword is a `Recipe`.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "lr", "momentum", "weight_decay")
        if self.nesterov and not self.momentum:
            raise BnfuseError("SGD: nesterov=True needs a momentum above 0")

    @property
    def moments(self) -> Mapping[str, float]:
        """Name the optimiser's buffers, each as long as the parameters, and say what they begin with."""
        return {"momentum": 0.0} if self.momentum else {}


@dataclasses.dataclass(frozen=True, repr=False)
class Adam(Recipe):
    """Adam whose weight decay is a part of the gradient:  g <- g + weight_decay*w;  w <- w - lr*m_hat/(sqrt(v_hat) +
    epsilon)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "lr", "epsilon", "weight_decay")
        check_betas(self, self.betas)

    @property
    def moments(self) -> Mapping[str, float]:
        """Name the optimiser's buffers, each as long as the parameters, and say what they begin with."""
        return {"first_moment": 0.0, "second_moment": 0.0}


@dataclasses.dataclass(frozen=True, repr=False)
class AdamW(Adam):
    """Adam with decoupled weight decay:  w <- w*(1 - lr*weight_decay) - lr*m_hat/(sqrt(v_hat) + epsilon)."""

    weight_decay: float = 1e-2


@dataclasses.dataclass(frozen=True, repr=False)
class RMSprop(Recipe):
    """g <- g + weight_decay*w;  v <- alpha*v + (1 - alpha)*g*g;  b <- momentum*b + g/(sqrt(v) + epsilon);
    w <- w - lr*b.

    That is torch's. `tensorflow` is what recipes of EfficientNet and MnasNet mean (timm's RMSpropTF): v begins at 1,
    g/sqrt(v + epsilon), and b has the learning rate of its time in it:  b <- momentum*b + lr*g/...;  w <- w - b.
    """

    lr: float
    alpha: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    tensorflow: bool = False
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "lr", "epsilon", "momentum", "weight_decay")
        if not is_number(self.alpha) or not 0 <= self.alpha < 1:
            raise BnfuseError(f"RMSprop: alpha={self.alpha!r} must be a number, at least 0 and below 1")

    @property
    def moments(self) -> Mapping[str, float]:
        """Name the optimiser's buffers, each as long as the parameters, and say what they begin with."""
        begun = {"second_moment": 1.0 if self.tensorflow else 0.0}
        return {**begun, "momentum": 0.0} if self.momentum else begun


@dataclasses.dataclass(frozen=True, repr=False)
class Lion(Recipe):
    """w <- w*(1 - lr*weight_decay) - lr*sign(beta1*m + (1 - beta1)*g);  m <- beta2*m + (1 - beta2)*g."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "lr", "weight_decay")
        check_betas(self, self.betas)

    @property
    def moments(self) -> Mapping[str, float]:
        """Name the optimiser's buffers, each as long as the parameters, and say what they begin with."""
        return {"momentum": 0.0}


Optimizer = SGD | AdamW | Adam | RMSprop | Lion
KINDS: dict[str, type[Optimizer]] = {kind.__name__: kind for kind in (SGD, AdamW, Adam, RMSprop, Lion)}


NAMES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {  # on the command line; what the name says of the fields
    "sgd": (SGD, {}),
    "adamw": (AdamW, {}),
    "adam": (Adam, {}),
    "rmsprop": (RMSprop, {}),
    "rmsproptf": (RMSprop, {"tensorflow": True, "alpha": 0.9, "epsilon": 1e-10}),
    "lion": (Lion, {}),
}
NOT_EVERYWHERE = ("momentum", "nesterov")  # fields of some, which others are given and leave alone


def named_optimizer(name: str, lr: float, **fields: Any) -> Optimizer:
    """Make an optimiser by its name on the command line. Raises BnfuseError for another name, and for a field that it
    has not."""
    if name not in NAMES:
        raise BnfuseError(f"optimizer '{name}' is unknown: it is one of {', '.join(NAMES)}")
    kind, said = NAMES[name]
    known = {field.name for field in dataclasses.fields(kind)}
    given = {key: value for key, value in fields.items() if key in known or key not in NOT_EVERYWHERE}
    if unknown := sorted(given.keys() - known):
        own = sorted(known - {"lr", *(field.name for field in dataclasses.fields(Recipe))})
        raise BnfuseError(f"optimizer {name} has no '{unknown[0]}': it has {', '.join(own)}")
    return kind(lr, **{**said, **given})


def to_data(optimizer: Optimizer | None) -> dict[str, Any] | None:
    """Give an optimiser in a form that JSON takes."""
    return None if optimizer is None else {"kind": type(optimizer).__name__, **dataclasses.asdict(optimizer)}


def from_data(data: dict[str, Any] | None) -> Optimizer | None:
    """Read an optimiser that `to_data` wrote, and check it; None for None."""
    if data is None:
        return None
    fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items() if n != "kind"}
    fields["groups"] = tuple(Group(**group) for group in fields.get("groups", ()))
    fields["ema"] = None if fields.get("ema") is None else EMA(**fields["ema"])
    return KINDS[data["kind"]](**fields)


def check(optimizer: Recipe, *names: str) -> None:
    """Raise BnfuseError unless these fields are in range."""
    for name in names:
        check_real(f"{type(optimizer).__name__}: {name}", getattr(optimizer, name))


def check_betas(optimizer: Recipe, betas: object) -> None:
    """Raise BnfuseError unless these are two numbers below 1."""
    pair: Sequence[Any] = betas if isinstance(betas, Sequence) and len(betas) == 2 else (None,)
    if not all(is_number(beta) and 0 <= beta < 1 for beta in pair):
        raise BnfuseError(f"{type(optimizer).__name__}: betas {betas} must be two numbers, at least 0 and below 1")


def require_optimizer(given: object) -> None:
    """Raise BnfuseError for anything but one of ours: torch's optimisers know nothing of a step's parameters."""
    if given is not None and not isinstance(given, Optimizer):
        raise BnfuseError(
            f"optimizer={type(given).__module__}.{type(given).__qualname__} is none of ours: use {ours_for(given)} "
            f"(there are {', '.join(KINDS)})"
        )


TORCH_ONLY = (
    "dampening",
    "amsgrad",
    "maximize",
    "centered",
)  # of torch's optimisers: with them nothing here is the same
OURS = {"eps": "epsilon"}


def ours_for(given: object) -> str:
    """Write the optimiser of ours that does what one of torch does, where its defaults tell all of it."""
    said = getattr(given, "defaults", None)
    kind = KINDS.get(type(given).__name__)
    one_group = len(getattr(given, "param_groups", ())) == 1
    if kind is None or not isinstance(said, dict) or not one_group or any(said.get(name) for name in TORCH_ONLY):
        return "bnfuse.SGD(lr=...) or bnfuse.AdamW(lr=...)"
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    named = {OURS.get(name, name): value for name, value in said.items()}
    kept = [f"{name}={named[name]!r}" for name, usual in fields.items() if name in named and named[name] != usual]
    return f"bnfuse.{kind.__name__}({', '.join(kept)})"
