"""Statistics of a sample of a map, and the terms of their gradient, which lie in the sample alone ([Chen18]).

A sample is a box, (samples, rows, columns) of every channel from an offset on, or a list of points. Where it lies is
read when the kernel runs, so a kernel serves every place. Nothing outside of the sample is read or written; a sample
that would lie outside of the map is moved into it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.norm import Extent, NormProblem, inside
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr, to_f32
from bnfuse.runtime.kernels.cpu.sweep import Args, Moments, Vector, prim_func, sweep
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param
from bnfuse.runtime.targets.target import CpuTarget

SHARE = 1 << 13  # elements that are worth a thread; chosen by hand


def sampled_statistics(x: MapType, extent: Extent, target: CpuTarget) -> Kernel:
    """Make the kernel x, offset (int64 [3]: sample, row, column) -> mean, variance (biased) of the box, [c] float32."""
    problem = NormProblem("SampledStatistics", (("x", x),), (("extent", extent),))
    return _statistics(problem, x, _box(x, extent), target)


def point_statistics(x: MapType, count: int, target: CpuTarget) -> Kernel:
    """Make the kernel x, points (int64 [count]) -> mean, variance (biased) of the points, [c] float32.

    Points are flat indices into n, h, w.
    """
    problem = NormProblem("PointStatistics", (("x", x),), (("count", count),))
    return _statistics(problem, x, _points(x, count), target)


def add_sampled(x: MapType, dx: MapType, extent: Extent, target: CpuTarget) -> Kernel:
    """Make the kernel x, q, w, offset (int64 [3]), dx updated in place: dx + q*x + w in the box.

    `acc` is no parameter.
    """
    problem = NormProblem("AddSampled", (("x", x), ("dx", dx)), (("extent", extent),))
    return _addition(problem, x, dx, _box(x, extent), target)


def add_at_points(x: MapType, dx: MapType, count: int, target: CpuTarget) -> Kernel:
    """Make the kernel x, q, w, points (int64 [count]), dx updated in place: dx + q*x + w at the points.

    `acc` is no parameter.
    """
    problem = NormProblem("AddAtPoints", (("x", x), ("dx", dx)), (("count", count),))
    return _addition(problem, x, dx, _points(x, count), target)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Which pixels of a map a kernel visits: how many, the operand that says where, and the i-th of them.

    `begin` emits what all pixels have in common, once, outside of all loops.
    """

    count: int
    place: Param
    begin: Callable[[Args], Callable[[Expr], Expr]]


def _box(x: MapType, extent: Extent) -> Sample:
    """Visit sample by sample, row by row. Whole rows, and whole samples, are one run of pixels."""
    samples, rows, columns = extent

    def begin(args: Args) -> Callable[[Expr], Expr]:
        last = (x.n - samples, x.h - rows, x.w - columns)
        image, row, column = (inside(args["offset"][i], end) for i, end in enumerate(last))
        base = T.bind((image * x.h + row) * x.w + column)

        def pixel(i: Expr) -> Expr:
            if columns == x.w and (rows == x.h or samples == 1):
                return base + i
            if columns == x.w:
                return base + tirx.floordiv(i, rows * columns) * (x.h * x.w) + tirx.floormod(i, rows * columns)
            line = tirx.floordiv(i, columns)
            image_rows = line if samples == 1 else tirx.floordiv(line, rows) * x.h + tirx.floormod(line, rows)
            return base + image_rows * x.w + tirx.floormod(i, columns)

        return pixel

    return Sample(samples * rows * columns, Param("offset", "in", 3, "int64"), begin)


def _points(x: MapType, count: int) -> Sample:
    def begin(args: Args) -> Callable[[Expr], Expr]:
        return lambda i: inside(args["points"][i], x.pixels - 1)

    return Sample(count, Param("points", "in", count, "int64"), begin)


def _statistics(problem: NormProblem, x: MapType, sample: Sample, target: CpuTarget) -> Kernel:
    def emit(args: Args) -> None:
        def finish(channel: Expr, mean: Expr, variance: Expr) -> None:
            T.buffer_store(args["mean"], to_f32(mean), [channel])
            T.buffer_store(args["variance"], to_f32(variance), [channel])

        moments, place = Moments(finish), sample.begin(args)

        def visit(index: Expr, vector: Vector, is_first: Expr) -> None:
            pixel = place(index)
            with vector.each() as j:
                moments.add(vector.base + j, args.read("x", pixel, vector.base + j), is_first)

        sweep(sample.count, x.c, _few_threads(target, sample.count * x.c), visit, [moments])

    params = (
        Param("x", "in", x.elements, x.dtype, is_map=True),
        sample.place,
        Param("mean", "out", x.c),
        Param("variance", "out", x.c),
    )
    return _kernel(problem, target, params, emit)


def _addition(problem: NormProblem, x: MapType, dx: MapType, sample: Sample, target: CpuTarget) -> Kernel:
    def emit(args: Args) -> None:
        place = sample.begin(args)

        def visit(index: Expr, vector: Vector, is_first: Expr) -> None:
            pixel = place(index)
            with vector.each() as j:
                channel = vector.base + j
                term = steps.fma(args["q"][channel], args.read("x", pixel, channel), args["w"][channel])
                args.write("dx", pixel, channel, args.read("dx", pixel, channel) + term)

        sweep(sample.count, x.c, _few_threads(target, sample.count * x.c), visit)

    params = (
        Param("x", "in", x.elements, x.dtype, is_map=True),
        Param("q", "in", x.c),
        Param("w", "in", x.c),
        sample.place,
        Param("dx", "inout", dx.elements, dx.dtype, is_map=True),
    )
    return _kernel(problem, target, params, emit)


def _few_threads(target: CpuTarget, elements: int) -> CpuTarget:
    """Give the target with as many threads as the work is worth."""
    return dataclasses.replace(target, threads=max(1, min(target.threads, elements // SHARE)))


def _kernel(problem: NormProblem, target: CpuTarget, params: tuple[Param, ...], emit: Callable[[Args], Any]) -> Kernel:
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, dict(problem.maps), emit))
