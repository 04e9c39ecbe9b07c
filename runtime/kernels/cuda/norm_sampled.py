"""Statistics of a sample of a map, and what its input gradient adds to that sample (SAMPLING_OPS of the grammar).

    statistics:    the sweep of norm.py over the sample's pixels; a small sample is one stage, a tile all pixels of 64
                   bytes of channels
    gradient:      dx += q*x + w at the sample's pixels, which alone are read and written

Where the sample lies is read on the device: a box's first element as int64 [3], points as int64 [count]. So no sample
is ever copied, and another epoch's needs no other kernel. One that would lie outside of the map is moved into it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.norm import Extent, NormProblem, inside
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Expr, Stage
from bnfuse.runtime.kernels.cuda.norm import Place, named, statistics_stages, swept
from bnfuse.runtime.kernels.cuda.sweep import Sweep
from bnfuse.runtime.kernels.cuda.vector import Reader, Writer, width_of
from bnfuse.runtime.kernels.kernel import Kernel, MapType
from bnfuse.runtime.targets.target import CudaTarget


@dataclasses.dataclass(frozen=True)
class Sample:
    """Which pixels of a map: those of a box of `extent`, or `points`. `operand` says where they lie."""

    map: MapType
    extent: Extent | None
    points: int = 0

    @property
    def operand(self) -> str:
        """Name the operand that says where the sample lies."""
        return "offset" if self.extent else "points"

    @property
    def constant(self) -> tuple[str, Any]:
        """Give what a problem says of it, as name and value."""
        return ("extent", self.extent) if self.extent else ("count", self.points)

    @property
    def places(self) -> int:
        """Count the elements of the operand."""
        return 3 if self.extent else self.points

    @property
    def count(self) -> int:
        """Count the pixels of the sample."""
        if self.extent is None:
            return self.points
        samples, rows, columns = self.extent
        return samples * rows * columns

    def where(self, block: Block) -> Place:
        """Make the function that finds the pixel of the map that is the i-th of the sample."""
        held = block[self.operand]
        if self.extent is None:
            return lambda i: inside(held[i], self.map.pixels - 1)
        sizes = (self.map.n, self.map.h, self.map.w)
        last = [size - length for size, length in zip(sizes, self.extent, strict=True)]
        sample, row, column = (inside(held[k], end) for k, end in enumerate(last))
        first = T.bind((sample * self.map.h + row) * self.map.w + column)
        return lambda i: first + self._along(i)

    def _along(self, i: Expr) -> Expr:
        """Count the map's pixels from the first pixel of the box to the i-th.

        Nothing is negative: divisions truncate.
        """
        assert self.extent is not None
        _, rows, columns = self.extent
        h, w = self.map.h, self.map.w
        if (rows, columns) == (h, w):
            return i
        if columns == w:
            return _split(i, rows * w, h * w, lambda rest: rest)
        return _split(i, rows * columns, h * w, lambda rest: _split(rest, columns, w, lambda last: last))


def _split(i: Expr, inner: int, stride: int, along: Callable[[Expr], Expr]) -> Expr:
    return tirx.truncdiv(i, inner) * stride + along(tirx.truncmod(i, inner))


def sampled_statistics(x: MapType, extent: Extent, target: CudaTarget) -> Kernel:
    """Make the kernel: x, offset (int64 [3]) -> mean, variance (biased) of the box, [c] float32."""
    return _statistics("SampledStatistics", Sample(x, extent), target)


def point_statistics(x: MapType, count: int, target: CudaTarget) -> Kernel:
    """Make the kernel: x, points (int64) -> mean, variance (biased) of the points, [c] float32."""
    return _statistics("PointStatistics", Sample(x, None, count), target)


def _statistics(op: str, sample: Sample, target: CudaTarget) -> Kernel:
    x = sample.map
    problem = NormProblem(op, (("x", x),), (sample.constant,))
    sweep = Sweep.of_sample(sample.count, x.c, width_of([x]), target)
    name, params = named(problem, target, sweep, 2 if sweep.tiles > 1 else 0, sample.places)

    def build() -> tuple[Stage, ...]:
        return statistics_stages(name, params, sweep, x, sample.where, [sample.operand])

    return Kernel(name, problem, target, params, build)


def add_sampled(x: MapType, dx: MapType, extent: Extent, target: CudaTarget) -> Kernel:
    """Make the kernel: x, q, w, offset (int64 [3]), dx -> dx + q*x + w in the box.

    Nothing else of dx is read or written.
    """
    return _add("AddSampled", Sample(x, extent), dx, target)


def add_at_points(x: MapType, dx: MapType, count: int, target: CudaTarget) -> Kernel:
    """Make the kernel: x, q, w, points (int64, each at most once), dx -> dx + q*x + w at the points.

    Nothing else of dx is read or written.
    """
    return _add("AddAtPoints", Sample(x, None, count), dx, target)


def _add(op: str, sample: Sample, dx: MapType, target: CudaTarget) -> Kernel:
    maps = {"x": sample.map, "dx": dx}
    problem = NormProblem(op, tuple(maps.items()), (sample.constant,))
    sweep = Sweep.of(sample.count, dx.c, width_of(maps.values()), target, reads=2, sums=False)
    name, params = named(problem, target, sweep, places=sample.places)

    def build() -> tuple[Stage, ...]:
        with d.stage(name, params, grid=sweep.grid, threads=sweep.team.threads) as block:
            _emit_add(block, sweep, sample, maps)
        return (block.stage,)

    return Kernel(name, problem, target, params, build)


def _emit_add(block: Block, sweep: Sweep, sample: Sample, maps: dict[str, MapType]) -> None:
    width = sweep.team.width
    reader, writer = Reader(block, maps, ("q", "w"), width, sweep.unroll), Writer(block, "dx", maps["dx"], width)
    channel, left = sweep.channel(block)
    values = d.registers(width)

    def add(pixel: Expr) -> None:
        for j in range(width):
            load = reader.load(j)
            term = steps.fma(load("q", True), load("x", False), load("w", True))
            d.put(values, j, load("dx", False) + term)
        writer.store(values, pixel, channel, left)

    swept(block, sweep, reader, channel, left, add, sample.where(block))
