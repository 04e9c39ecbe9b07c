"""Which elements of a map a sampler takes: pure functions of a spec and a shape ([Chen18], section 4).

The rows of a batch are the virtual samples, [0, virtual), and the real ones after them. Samples of the batch are drawn
from the real rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.sampling import MAX_INDEX, MAX_POINTS, Box, Points
from bnfuse.passes.sampling.spec import LayerSample

ASPECT = 0.2  # how much a rectangle's aspect counts beside its area, both as logarithms (docs/decisions.md, D20)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a batch: a box of `extent` (samples, rows, columns), or points where there is none.

    Where `place` has one member only, as a fixed box has, nothing is drawn.
    """

    place: Box | Points
    extent: tuple[int, int, int] | None
    weight: float = 1.0
    drawn: bool = True

    @property
    def elements(self) -> int:
        """Count the elements per channel."""
        return math.prod(self.extent) if self.extent is not None else self.place.count  # type: ignore[union-attr]


def effective_elements(parts: Sequence[tuple[int, float]]) -> float:
    """Give the n for which n/(n - 1) makes the mixed variance of parts (elements, weight) unbiased.

    A part's variance about its own mean is too small by 1/elements of itself, the mixture by the mean of these. 0 where
    one element is all.
    """
    if len(parts) == 1:
        return parts[0][0]
    return 1 / sum(weight / elements for elements, weight in parts)


def parts_of(spec: LayerSample, shape: tuple[int, ...], virtual: int) -> tuple[Part, ...] | None:
    """Give the parts that a spec takes of a map [N, C, H, W], the virtual one first; None for the whole map."""
    n, _, h, w = shape
    if n * h * w >= MAX_INDEX:
        raise BnfuseError(f"sample spec '{spec.text}': a map of {list(shape)} is too large: use a smaller batch")
    parts: list[Part] = []
    if spec.virtual:
        parts.append(fixed(0, (spec.virtual, h, w)))
    if spec.kind is not None:
        if spec.kind == "bn" and not virtual:
            return None
        parts.append(real_part(spec, (n - virtual, h, w), virtual))
    if len(parts) == 2:
        weights = (spec.weight, 1 - spec.weight)
        parts = [dataclasses.replace(part, weight=weight) for part, weight in zip(parts, weights, strict=True)]
    return tuple(parts)


def fixed(first: int, extent: tuple[int, int, int]) -> Part:
    """Make a part that is always at the same place: from sample `first` on, of `extent` (samples, rows, columns)."""
    return Part(Box((first, 0, 0), (first, 0, 0)), extent, drawn=False)


def real_part(spec: LayerSample, real: tuple[int, int, int], virtual: int) -> Part:
    """Make the part of the real rows: `real` are their number, height and width."""
    n, h, w = real
    if spec.kind == "bn":
        return fixed(virtual, real)
    if spec.kind in ("ns", "bs"):
        count = samples_of(spec, n)
        if spec.kind == "ns":
            return fixed(virtual, (count, h, w))
        return Part(Box((virtual, 0, 0), (virtual + n - count, 0, 0)), (count, h, w))
    assert isinstance(spec.amount, Fraction)
    if spec.kind == "fs":
        rows, columns = rectangle(h, w, spec.amount)
        return Part(Box((virtual, 0, 0), (virtual, h - rows, w - columns)), (n, rows, columns))
    count = max(1, round(spec.amount * n * h * w))
    if count > MAX_POINTS:
        raise BnfuseError(f"sample spec '{spec.text}': {count} points are too many: take a smaller ratio, or fs")
    return Part(Points(count, virtual * h * w, (virtual + n) * h * w), None)


def samples_of(spec: LayerSample, batch: int) -> int:
    """Count the samples that a spec takes of a batch, at least 1. Raises BnfuseError where the batch has fewer."""
    if isinstance(spec.amount, int):
        if spec.amount > batch:
            raise BnfuseError(f"sample spec '{spec.text}': the batch has {batch} samples: take at most {batch}")
        return spec.amount
    assert spec.amount is not None
    return max(1, round(spec.amount * batch))


@functools.lru_cache(maxsize=256)
def rectangle(h: int, w: int, ratio: Fraction) -> tuple[int, int]:
    """Choose rows and columns of about ratio*h*w elements and about the map's aspect."""
    if h > w:
        return rectangle(w, h, ratio)[::-1]
    rows = np.arange(1, h + 1)[:, None]
    wanted = float(ratio) * h * w
    # with so many rows the area decides how many columns, for it weighs more than the aspect
    columns = np.clip(np.concatenate([np.floor(wanted / rows), np.ceil(wanted / rows)], axis=1), 1, w)
    area, aspect = np.abs(np.log(rows * columns / wanted)), np.abs(np.log(rows * w / (columns * h)))
    best, of_two = divmod(int(np.argmin(area + ASPECT * aspect)), 2)
    return best + 1, int(columns[best, of_two])
