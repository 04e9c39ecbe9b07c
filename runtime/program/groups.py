"""Parameters that are updated by their own rule: rates and weight decay by glob, and by depth.

    Group("head.*", lr=10)              ten times the optimiser's learning rate
    Group("*.bias", weight_decay=0)     none of its weight decay
    layer_decay=0.75                    the rate shrinks by that factor from one layer to the one before it

All of it comes to two numbers for each parameter, a factor of the rate and a weight decay.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import check_real
from bnfuse.core.text import some

if TYPE_CHECKING:
    from bnfuse.runtime.program.optim import Optimizer


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters whose names are like `pattern`, a glob: their learning rate is `lr` times the optimiser's, their
    weight decay is `weight_decay`; each where it is given. Of several groups that match a parameter and say one of the
    two, the first counts."""

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise BnfuseError(f"Group: pattern={self.pattern!r} must be a glob of parameter names, such as 'head.*'")
        if self.lr is None and self.weight_decay is None:
            raise BnfuseError(f"Group: '{self.pattern}' is given neither lr nor weight_decay")
        for what, value in (("lr", self.lr), ("weight_decay", self.weight_decay)):
            if value is not None:
                check_real(f"Group: {what}", value)


def decay_of(optimizer: Optimizer, name: str) -> float:
    """Give the weight decay of a parameter: none where `no_decay` matches, else its group's, else the optimiser's."""
    if any(fnmatch.fnmatchcase(name, glob) for glob in optimizer.no_decay):
        return 0.0
    group = first_of(optimizer.groups, name, "weight_decay")
    return optimizer.weight_decay if group is None else float(group.weight_decay or 0.0)


def rate_of(optimizer: Optimizer, name: str) -> float:
    """Give the factor of the learning rate that a parameter's group says."""
    group = first_of(optimizer.groups, name, "lr")
    return 1.0 if group is None else float(group.lr or 0.0)


def first_of(groups: Iterable[Group], name: str, what: str) -> Group | None:
    """Find the first group that matches a parameter and says `what` of it."""
    saying = (group for group in groups if getattr(group, what) is not None)
    return next((group for group in saying if fnmatch.fnmatchcase(name, group.pattern)), None)


def rates_of(optimizer: Optimizer, order: Sequence[str], ranks: Mapping[str, int]) -> dict[str, float]:
    """Give the factor of the learning rate of each parameter: its group's times its layer's.

    `order` has the parameters as the graph first reads them, `ranks` their numbers of dimensions.
    """
    shares = layer_factors(order, ranks, optimizer.layer_decay)
    return {name: rate_of(optimizer, name) * shares[name] for name in order}


def layer_factors(order: Sequence[str], ranks: Mapping[str, int], decay: float) -> dict[str, float]:
    """Give decay^(layers behind a parameter's own), for each parameter.

    A layer is a weight (of two dimensions or more) with the vectors that follow it before the next one: its bias, the
    scale and bias of its BatchNorm. Vectors before all weights belong to the first layer.
    """
    layer, found = -1, {}
    for name in order:
        layer += ranks[name] > 1
        found[name] = max(layer, 0)
    last = max(found.values(), default=0)
    return {name: decay ** (last - index) for name, index in found.items()}


def check_globs(optimizer: Optimizer, names: Iterable[str]) -> None:
    """Raise BnfuseError for a glob that matches no parameter, a spelling mistake most likely, and for a group that
    others before it leave nothing to."""
    names = list(names)
    given = [("no_decay", glob) for glob in optimizer.no_decay]
    for what, glob in (*given, *(("group", group.pattern) for group in optimizer.groups)):
        if not any(fnmatch.fnmatchcase(name, glob) for name in names):
            raise BnfuseError(f"{what}: no parameter is named like '{glob}' (there are {some(names)})")
    for what in ("lr", "weight_decay"):
        saying = [group for group in optimizer.groups if getattr(group, what) is not None]
        used = {id(first_of(saying, name, what)) for name in names}
        for group in saying:
            if id(group) not in used:
                raise BnfuseError(
                    f"group: groups before it say {what} of all parameters named like '{group.pattern}': put it in "
                    "front of those"
                )
