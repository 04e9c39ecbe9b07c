"""A linear map along one axis of a map whose matrix is sparse: Resize, Pad, a dilated mean, and their gradients.

y[.., o, ..] = sum over t < taps of  weight[o, t] * x[.., index[o, t], ..]

Along channels it picks: a channel shuffle has one tap and no weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tvm import tirx

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common.params import INT32_LIMIT
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.common.windows import coordinates
from bnfuse.runtime.kernels.kernel import MapType, Param

UNROLLED = 8  # taps that are written out one by one: chosen by hand


@dataclasses.dataclass(frozen=True)
class TapsProblem:
    """Rows ("h") or columns ("w") of y [n, h, w, c] as mixtures of those of x, `taps` of them each.

    Where not `weighted` there is one tap, taken as it is; so are channels ("c").
    """

    x: MapType
    y: MapType
    axis: Literal["h", "w", "c"]
    taps: int
    weighted: bool

    @property
    def picks_channels(self) -> bool:
        """Tell whether channels are taken in another order."""
        return self.axis == "c"

    @property
    def out(self) -> int:
        """Count the rows, columns or channels that are made."""
        return {"h": self.y.h, "w": self.y.w, "c": self.y.c}[self.axis]

    def place(self, pixel: Expr) -> tuple[Expr, Expr, Expr]:
        """Write image, row and column of a pixel of y."""
        return coordinates(pixel, self.y)

    def made(self, place: tuple[Expr, Expr, Expr]) -> Expr:
        """Write which of `out` a pixel of y belongs to."""
        return place[1] if self.axis == "h" else place[2]

    def source(self, place: tuple[Expr, Expr, Expr], at: Expr) -> Expr:
        """Write the pixel of x that has `at` for the row, or column, of a pixel of y."""
        image, row, column = place
        row, column = (at, column) if self.axis == "h" else (row, at)
        return (image * self.x.h + row) * self.x.w + column


def taps_params(problem: TapsProblem) -> tuple[Param, ...]:
    """List x, index [out, taps] int32, [weight [out, taps]] and y.

    Raises BnfuseError where a map has more elements than int32 can index.
    """
    x, y, table = problem.x, problem.y, problem.out * problem.taps
    if max(x.elements, y.elements, table) >= INT32_LIMIT:
        raise BnfuseError(f"Taps: {x.elements} elements to {y.elements} are more than int32 can index")
    params = [Param("x", "in", x.elements, x.dtype, is_map=True), Param("index", "in", table, "int32")]
    if problem.weighted:
        params.append(Param("weight", "in", table))
    return (*params, Param("y", "out", y.elements, y.dtype, is_map=True))


def most_taps(matrix: npt.NDArray[Any]) -> int:
    """Count the entries other than 0 of the fullest row of a matrix [out, in], at least 1."""
    return int(np.count_nonzero(matrix, axis=1).max(initial=1))


def taps_of(matrix: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32] | None]:
    """Give the places [out, taps] of the entries other than 0 of a matrix [out, in], and their values.

    A shorter row ends in a place of its own with the value 0. The values are None where each row picks one place.
    """
    taps = most_taps(matrix)
    counts = np.count_nonzero(matrix, axis=1)
    order = np.argsort(matrix == 0, axis=1, kind="stable")[:, :taps]
    order = np.where(np.arange(taps) < counts[:, None], order, order[:, :1])
    values = np.where(np.arange(taps) < counts[:, None], np.take_along_axis(matrix, order, 1), 0)
    if taps == 1 and (values == 1).all():
        return order.astype(np.int32), None
    return order.astype(np.int32), values.astype(np.float32)


def each_tap(taps: int, loop: Any, body: Any) -> None:
    """Emit `body(t)` for t < taps: written out, or within `loop(taps)` where they are many."""
    if taps <= UNROLLED:
        for t in range(taps):
            body(t)
    else:
        with loop(0, taps) as t:
            body(t)


def first_of(problem: TapsProblem, place: tuple[Expr, Expr, Expr]) -> Expr:
    """Write where the table has the first tap of a pixel of y."""
    return problem.made(place) * tirx.const(problem.taps, "int32")
