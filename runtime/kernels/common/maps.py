"""The problems of kernels that copy maps or add them up."""

from __future__ import annotations

import dataclasses

from bnfuse.runtime.kernels.kernel import MapType


@dataclasses.dataclass(frozen=True)
class CopyProblem:
    op: str
    x: MapType | int
    y: MapType | int
    dtype: str
    value: float = 0.0


@dataclasses.dataclass(frozen=True)
class SumProblem:
    xs: tuple[MapType, ...]
    y: MapType
