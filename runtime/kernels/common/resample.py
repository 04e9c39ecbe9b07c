"""Resample and ResampleGrad: linear maps along rows and columns whose matrices are sparse, in one go.

    y[n, o, p, c] = sum over i, j of  row_weight[o, i] * column_weight[p, j] * x[n, row[o, i], column[p, j], c]

`rows` and `columns` are operands of the operator; kernels read tables of their entries instead. A gradient has those of
the transposed matrices. An axis that stays as it is has no table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import tirx

from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.expressions import parts_of
from bnfuse.runtime.kernels.common.params import operator_params
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.common.taps import taps_of
from bnfuse.runtime.kernels.common.windows import coordinates
from bnfuse.runtime.kernels.kernel import MapType, Param, Problem

AXES = ("row", "column")
MOST_TAPS = 9  # of a pixel in one go: 4x4 are more reads of the cache than two sweeps are of memory; chosen by hand
COSTLY_TAPS = 2  # the same where each tap computes a function that is no polynomial anew
COSTLY = {"exp", "sigmoid", "tanh", "erf", "softplus", "elu"}
Tables = dict[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class AxisTaps:
    """The taps of each row, or column, that is made; 0 where the axis stays as it is."""

    name: str
    taps: int
    weighted: bool

    @staticmethod
    def of(problem: Problem, name: str) -> AxisTaps:
        """Read what a problem says of an axis."""
        return AxisTaps(name, problem.attribute(f"{name}_taps"), problem.attribute(f"{name}_weighted"))


def tables_of(matrix: npt.NDArray[Any], name: str) -> tuple[dict[str, Any], Tables]:
    """Give what a problem says of an axis with this matrix [out, in], and the tables that its kernel reads."""
    if matrix.shape[0] == matrix.shape[1] and (matrix == np.eye(len(matrix), dtype=matrix.dtype)).all():
        return {f"{name}_taps": 0, f"{name}_weighted": False}, {}
    index, weight = taps_of(matrix)
    tables: Tables = {f"{name}_index": index}
    if weight is not None:
        tables[f"{name}_weight"] = weight
    return {f"{name}_taps": index.shape[1], f"{name}_weighted": weight is not None}, tables


def resample_params(problem: Problem) -> tuple[Param, ...]:
    """List the parameters: those of the operator without its matrices, then the tables."""
    params = list(operator_params(problem, unread=("rows", "columns")))
    made = result(problem)
    for name, size in (("row", made.h), ("column", made.w)):
        axis = AxisTaps.of(problem, name)
        if axis.taps:
            params.append(Param(f"{name}_index", "in", size * axis.taps, "int32"))
        if axis.weighted:
            params.append(Param(f"{name}_weight", "in", size * axis.taps))
    return tuple(params)


def is_one_launch(problem: Problem, taps: Sequence[int]) -> bool:
    """Tell whether both axes, of so many taps (0: stays as it is), go into one launch."""
    return 0 in taps or math.prod(taps) <= most_taps(problem)


def most_taps(problem: Problem) -> int:
    """Tell how many taps a pixel has at most in one go."""
    steps = [step for step in problem.spec.prologue if step in ACTIVATIONS and not problem.spec.is_gradient]
    costly = any(part.operation in COSTLY for step in steps for part in parts_of(ACTIVATIONS[step].value))
    return COSTLY_TAPS if costly else MOST_TAPS


def source(problem: Problem) -> MapType:
    """Give the map that is resampled."""
    return problem.map("dy" if problem.spec.is_gradient else "x")


def result(problem: Problem) -> MapType:
    """Give the map that is made."""
    return problem.map("dx" if problem.spec.is_gradient else "y")


def within(pixel: Expr, problem: Problem) -> Expr:
    """Write the number of a source's pixel. Beside a gate, whose pixel is a quotient of it, TVM has to know that it is
    one: it comes from a table."""
    if all(kind.spread == 1 for _, kind in problem.maps):
        return pixel
    return tirx.Max(tirx.Min(pixel, tirx.const(source(problem).pixels - 1, "int32")), tirx.const(0, "int32"))


Bind = Callable[[Expr], Expr]
Body = Callable[[Expr, "Expr | None"], None]  # of a pixel of the source, and its weight (None: 1)


def each_source(problem: Problem, pixel: Expr, table: Any, loop: Any, bind: Bind, body: Body) -> None:
    """Emit `body` for each pixel that a pixel of the result mixes; `loop(0, count)` where they are many.

    `table[name]` is a table, `bind` keeps a value.
    """
    image, row, column = (bind(at) for at in coordinates(pixel, result(problem)))
    kind = source(problem)
    rows, columns = (AxisTaps.of(problem, name) for name in AXES)

    def along(axis: AxisTaps, place: Expr, visit: Callable[[Expr, Expr | None], None]) -> None:
        if not axis.taps:
            visit(place, None)
            return
        first = bind(place * axis.taps)

        def tap(t: Expr) -> None:
            at = bind(table[f"{axis.name}_index"][first + t])
            visit(at, bind(table[f"{axis.name}_weight"][first + t]) if axis.weighted else None)

        if axis.taps <= UNROLLED:
            for t in range(axis.taps):
                tap(tirx.const(t, "int32"))
        else:
            with loop(0, axis.taps) as t:
                tap(t)

    def at_row(there: Expr, weight: Expr | None) -> None:
        base = bind((image * kind.h + there) * kind.w)

        def at_column(across: Expr, other: Expr | None) -> None:
            both = weight if other is None else other if weight is None else bind(weight * other)
            body(bind(within(base + across, problem)), both)

        along(columns, column, at_column)

    along(rows, row, at_row)


UNROLLED = 4  # taps of an axis that are written out one by one: chosen by hand


def is_single(problem: Problem) -> bool:
    """Tell whether each pixel of the result is one of the source, as it is."""
    axes = [AxisTaps.of(problem, name) for name in AXES]
    return all(axis.taps <= 1 and not axis.weighted for axis in axes)
