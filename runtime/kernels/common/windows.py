"""The windows of a pooling, as expressions of where an element lies.

Windows are those of ONNX: window o covers o*stride - pad + k*dilation, k in [0, kernel).
"""

from __future__ import annotations

import dataclasses

from tvm import tirx

from bnfuse.runtime.kernels.common.geometry import Axis, spatial_axes
from bnfuse.runtime.kernels.common.steps import Expr, f32
from bnfuse.runtime.kernels.kernel import MapType, Problem


@dataclasses.dataclass(frozen=True)
class WindowAxis(Axis):
    """The windows along height or width, as expressions."""

    def start(self, window: Expr) -> Expr:
        """Write the position in x of the window's first element, negative in the padding."""
        return window * self.stride - self.pad

    @property
    def never_cut(self) -> bool:
        """Tell whether all windows lie inside x."""
        last = (self.out - 1) * self.stride - self.pad + self.dilation * (self.kernel - 1)
        return self.pad <= 0 and last < self.size

    def inside(self, window: Expr) -> tuple[Expr, Expr]:
        """Write the k whose positions lie in x: [first, stop)."""
        if self.never_cut:
            return tirx.const(0, "int32"), tirx.const(self.kernel, "int32")
        start = self.start(window)
        first = _at_least(tirx.floordiv(self.dilation - 1 - start, self.dilation), 0)
        stop = _at_most(tirx.floordiv(self.size - start + self.dilation - 1, self.dilation), self.kernel)
        return first, stop

    def padded_elements(self, window: Expr) -> Expr:
        """Count what an average counts where padding counts: not what lies beyond the padding (ceil_mode)."""
        if (self.out - 1) * self.stride - self.pad + self.kernel <= self.size + self.behind:
            return tirx.const(self.kernel, "int32")
        return _at_most(self.size + self.behind - self.start(window), self.kernel)

    def covering(self, position: Expr) -> tuple[Expr, Expr]:
        """Write which windows' span covers a position of x: [first, stop). With a dilation they may still miss it."""
        reach = self.dilation * (self.kernel - 1)
        first = _at_least(tirx.floordiv(position + self.pad - reach + self.stride - 1, self.stride), 0)
        stop = _at_most(tirx.floordiv(position + self.pad, self.stride) + 1, self.out)
        return first, stop


@dataclasses.dataclass(frozen=True)
class Windows:
    """The geometry of a pool from map x to map y."""

    x: MapType
    y: MapType
    rows: WindowAxis
    columns: WindowAxis

    @property
    def positions(self) -> int:
        """Count the positions of a window."""
        return self.rows.kernel * self.columns.kernel

    @property
    def index_dtype(self) -> str:
        """Name the dtype of a MaxPool's indices: row*kernel width + column."""
        return index_dtype((self.rows.kernel, self.columns.kernel))


def windows_of(problem: Problem, y: str) -> Windows:
    """Give the windows of a pooling's problem; `y` is the map at their resolution."""
    rows, columns = (WindowAxis(**dataclasses.asdict(axis)) for axis in spatial_axes(problem))
    return Windows(problem.map("x"), problem.map(y), rows, columns)


def index_dtype(kernel_shape: tuple[int, int]) -> str:
    """Name the dtype of the indices that a MaxPool kernel of this shape stores and its gradient reads."""
    return "uint8" if kernel_shape[0] * kernel_shape[1] <= 256 else "int32"


def source_pixel(windows: Windows, image: Expr, row: Expr, column: Expr, r: Expr, s: Expr) -> Expr:
    """Write the pixel of x at position (r, s) of the window of y's (row, column)."""
    h = windows.rows.start(row) + r * windows.rows.dilation
    w = windows.columns.start(column) + s * windows.columns.dilation
    return (image * windows.x.h + h) * windows.x.w + w


def weight_of(problem: Problem, windows: Windows, row: Expr, column: Expr) -> Expr:
    """Write what an average pool multiplies the sum of this window by: 1/elements."""
    if problem.attribute("count_include_pad"):
        elements = windows.rows.padded_elements(row) * windows.columns.padded_elements(column)
    else:
        (top, bottom), (left, right) = windows.rows.inside(row), windows.columns.inside(column)
        elements = (bottom - top) * (right - left)
    return f32(1.0) / tirx.Cast("float32", elements)


def coordinates(pixel: Expr, kind: MapType) -> tuple[Expr, Expr, Expr]:
    """Write image, row and column of a pixel."""
    image, place = tirx.floordiv(pixel, kind.h * kind.w), tirx.floormod(pixel, kind.h * kind.w)
    return image, tirx.floordiv(place, kind.w), tirx.floormod(place, kind.w)


def _at_least(value: Expr, bound: int) -> Expr:
    return tirx.Max(value, tirx.const(bound, "int32"))


def _at_most(value: Expr, bound: int) -> Expr:
    return tirx.Min(value, tirx.const(bound, "int32"))
