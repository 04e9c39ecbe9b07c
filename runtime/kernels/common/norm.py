"""The halves of a BatchNorm that are no steps: the problem of each, and where a sample lies."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm import tirx

from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.kernel import MapType


@dataclasses.dataclass(frozen=True)
class NormProblem:
    """A plain operator: the maps it reads and what else its code depends on (never the number of channels alone)."""

    op: str
    maps: tuple[tuple[str, MapType], ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()


Extent = tuple[int, int, int]  # samples, rows, columns


def inside(place: Expr, last: int) -> Expr:
    """Clamp an int64 coordinate to [0, last], as int32. The session checks what it sends, but by the word of a file."""
    return tirx.Cast("int32", tirx.Max(tirx.const(0, "int64"), tirx.Min(place, tirx.const(last, "int64"))))
