"""Placements: which BatchNorms a network keeps.

A placement is a tuple of C ones and zeros in the order of the network's BatchNorms: 1 keeps the BatchNorm, 0 removes
it. In files and tables it is written as text, "1101".
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from bnfuse.core.errors import BnfuseError

Placement = tuple[int, ...]

MAX_ENUMERATED = 16  # BatchNorms of which all placements may be listed


@dataclasses.dataclass(frozen=True)
class Space:
    """The BatchNorms that may be removed: their names and what each costs (in any unit)."""

    names: tuple[str, ...]
    costs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise BnfuseError("the graph has no BatchNorm that could be removed: there is nothing to search")
        if len(self.names) != len(self.costs) or min(self.costs) < 0 or not sum(self.costs) > 0:
            raise BnfuseError("every BatchNorm needs a cost, none of them negative and not all of them 0")

    @property
    def size(self) -> int:
        """How many BatchNorms there are."""
        return len(self.names)

    @property
    def everything(self) -> Placement:
        """All BatchNorms kept: the reference."""
        return (1,) * self.size

    def weights(self) -> np.ndarray:
        """Costs of mean 1, float64 [C]: summed over a placement, its number of BatchNorms where all cost the same."""
        costs = np.array(self.costs, np.float64)
        return costs / costs.mean()

    def cost(self, placement: Placement) -> float:
        """Give the share of the cost of all BatchNorms that remains: 0 to 1."""
        return float(np.dot(self.weights(), placement)) / self.size

    def removed(self, placement: Placement) -> tuple[int, ...]:
        """List the numbers of the BatchNorms that are removed, counted from 1."""
        return tuple(number for number, kept in enumerate(placement, 1) if not kept)

    def all_placements(self) -> Iterable[Placement]:
        """Go through every placement, from all BatchNorms to none."""
        if self.size > MAX_ENUMERATED:
            raise BnfuseError(
                f"{self.size} BatchNorms have 2^{self.size} placements: an exhaustive search takes at most "
                f"{MAX_ENUMERATED} BatchNorms. Use --method bo."
            )
        return itertools.product((1, 0), repeat=self.size)


def to_text(placement: Placement) -> str:
    """Write a placement as zeros and ones."""
    return "".join(str(bit) for bit in placement)


def from_text(text: str) -> Placement:
    """Give the reverse of `to_text`; ValueError where the text is none."""
    if not text or set(text) - {"0", "1"}:
        raise ValueError(f"'{text}' is no placement")
    return tuple(int(bit) for bit in text)


def random_placement(size: int, taken: set[Placement], rng: np.random.Generator) -> Placement:
    """Draw one that is not in `taken`, all of the others equally likely."""
    if size <= MAX_ENUMERATED:
        left = [p for p in itertools.product((1, 0), repeat=size) if p not in taken]
        if not left:
            raise BnfuseError(f"all {2**size} placements are evaluated: nothing is left to search")
        return left[int(rng.integers(len(left)))]
    while True:  # at most a few evaluations of 2^17: it ends at once
        found = tuple(int(bit) for bit in rng.integers(0, 2, size))
        if found not in taken:
            return found
