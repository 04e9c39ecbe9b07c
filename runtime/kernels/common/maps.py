"""The problems of kernels that copy maps or add them up."""

from __future__ import annotations

import dataclasses

from bnfuse.runtime.kernels.kernel import MapType


@dataclasses.dataclass(frozen=True)
class CopyProblem:
    """A copy of x to y: each a map, or the number of elements of a dense tensor. Fill has no x but a `value`."""

    op: str
    x: MapType | int
    y: MapType | int
    dtype: str
    value: float = 0.0


@dataclasses.dataclass(frozen=True)
class SumProblem:
    """The sum of maps of one size, each in a slot of its own."""

    xs: tuple[MapType, ...]
    y: MapType
