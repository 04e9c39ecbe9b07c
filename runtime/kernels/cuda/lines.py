"""Lines of a map of few channels, such as an image, in shared memory: whole ones, between zeros that stay there.

    zeros | pixel 0 | pixel 1 | ... | last pixel | zeros        for each line that the window's rows meet

The pixels' elements lie side by side, so what a row of the window reads of them, taps and channels as one axis, is a
run of elements: each element is brought once and read in place for all taps. Lines outside of the image are zeros.
"""

from __future__ import annotations

import dataclasses
import math

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.correlation import Correlation
from bnfuse.runtime.kernels.cuda.device import Block, Expr, Map
from bnfuse.runtime.kernels.cuda.operand import Operand, element_size
from bnfuse.runtime.targets.target import CudaTarget


@dataclasses.dataclass(frozen=True)
class Lines:
    """Those under `rows` output rows: of each `pixels` pixels, which read `columns` elements from their first tap on.

    Several rows need taps that are neighbours.
    """

    correlation: Correlation
    pixels: int
    columns: int
    rows: int = 1

    @property
    def count(self) -> int:
        """Count the lines. The one under row r of the window is, for output row i, the i*stride + r-th."""
        return (self.rows - 1) * self.correlation.vertical.mult + self.correlation.vertical.window

    @property
    def width(self) -> int:
        """Count the elements of a line."""
        return self.correlation.horizontal.source * self.correlation.inputs

    @property
    def access(self) -> int:
        """Count the bytes of a copy: lines lie one behind the other from the start of a buffer on."""
        return math.gcd(self.width * 2, d.VECTOR_BYTES)

    @property
    def apart(self) -> int:
        """Count the elements from a pixel's first tap to that of the next one."""
        return self.correlation.horizontal.mult * self.correlation.inputs

    @property
    def first(self) -> int:
        """Give the element of a line, zeros before it counted in, that is the first pixel's first tap."""
        return self.before // 2 + self.correlation.horizontal.phases[0].base * self.correlation.inputs

    @property
    def before(self) -> int:
        """Count the bytes of zeros before a line: of what taps reach there, or more."""
        reach = -self.correlation.horizontal.phases[0].base * self.correlation.inputs * 2
        return -(-max(reach, 0) // d.VECTOR_BYTES) * d.VECTOR_BYTES

    @property
    def line_bytes(self) -> int:
        """Count the bytes of a line, zeros before it, and behind it as far as the last pixel's columns go."""
        h = self.correlation.horizontal
        reached = ((self.pixels - 1) * h.mult + h.phases[0].base) * self.correlation.inputs + self.columns
        return self.before + -(-max(self.width, reached) * 2 // d.VECTOR_BYTES) * d.VECTOR_BYTES

    @property
    def bytes(self) -> int:
        """Count the bytes of all lines."""
        return self.count * self.line_bytes

    def bring(self, block: Block, source: Map, to: Expr, row: Expr, exists: Expr) -> None:
        """Start copying the lines under output rows from `row` on, counted over all images, to the address `to`.

        They are of one image. Where they do not exist zeros come.
        """
        v = self.correlation.vertical
        image, y = T.bind(row // v.destination), T.bind(row % v.destination * v.mult + v.phases[0].base)
        vectors = self.width * 2 // self.access

        def copy(i: Expr) -> None:
            line, vector = T.bind(i // vectors), T.bind(i % vectors)
            own = T.bind(y + line * v.step)
            there = d.all_of(exists, d.within(own, v.source))
            at = source.offset + (image * v.source + own) * self.width + vector * (self.access // 2)
            at = tirx.Select(there, at, T.int32(0))
            place = tirx.Cast("uint32", self.before + line * self.line_bytes + vector * self.access)
            d.copy_async(to + place, source.buffer.ptr_to([at]), self.access, there)

        block.each(self.count * vectors, copy)


def suit(c: Correlation, source: Operand, target: CudaTarget) -> bool:
    """Tell whether a map can be read by lines: an image, or what else has few channels, lies densely, goes through no
    prologue, and is stored as products of 16 bits take it."""
    kind = source.kind
    dense = kind.stride == kind.c and not kind.whole and kind.dtype == target.map_dtype
    plain = not source.plan.steps and dense and c.groups == 1 and c.horizontal.step == 1
    return plain and element_size(target.precision) == 2 and Lines(c, 1, 1).access >= 4
