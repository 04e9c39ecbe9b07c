"""Pooling and its gradient, with the prologue and epilogue steps of bnfuse/opset/spec.py.

    forward    for pixel of y, vector of channels:    over the window's rows and columns inside the map: max or sum
    backward   for pixel of x, vector of channels:    over the windows that cover it: their share of dy

The backward gathers, so no two threads write one element and masks, reductions and accumulation follow in place.
A prologue is recomputed for each window that reads a pixel: cheap beside a store and a load of the map.

Windows are those of ONNX: window o covers o*stride - pad + k*dilation, k in [0, kernel).
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.common.steps import Expr, f32, f64, to_f32
from bnfuse.runtime.kernels.common.windows import Windows, coordinates, source_pixel, weight_of, windows_of
from bnfuse.runtime.kernels.cpu.pointwise import BackwardEpilogue, ForwardEpilogue
from bnfuse.runtime.kernels.cpu.sweep import Args, Vector, map_kernel, sweep
from bnfuse.runtime.kernels.kernel import Kernel, Problem
from bnfuse.runtime.targets.target import CpuTarget

SIDE_BY_SIDE = 4  # vectors that go through a window's loops together; chosen by hand


# Forward


def pool_forward(problem: Problem, target: CpuTarget) -> Kernel:
    """Make the kernel of [prologue] MaxPool|AveragePool|GlobalAveragePool [Bias][Statistics].

    Indices of a MaxPool: position in the window, of the first of equal maxima, dtype `index_dtype`, a map like y.
    Raises BnfuseError for StoreInput.
    """
    core = problem.spec.core
    if "StoreInput" in problem.spec.epilogue:
        raise BnfuseError(f"{problem.op}: a pool reads its input more than once, so no kernel of it stores the input")
    if core == "GlobalAveragePool":
        return _global_forward(problem, target)
    windows = windows_of(problem, "y")
    emit_pixel = _max_pixel if core == "MaxPool" else _average_pixel

    def emit(args: Args) -> None:
        output = ForwardEpilogue(problem, args)

        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            emit_pixel(problem, windows, args, output, pixel, vector, is_first)

        sweep(windows.y.pixels, windows.y.c, target, visit, output.reductions, SIDE_BY_SIDE * target.lanes)

    return map_kernel(problem, target, emit)


def _max_pixel(
    problem: Problem,
    windows: Windows,
    args: Args,
    output: ForwardEpilogue,
    pixel: Expr,
    vector: Vector,
    is_first: Expr,
) -> None:
    image, row, column = coordinates(pixel, windows.y)
    best, place, value = vector.local(), vector.local("int32"), vector.local()
    first_row, stop_row = windows.rows.inside(row)
    first_column, stop_column = windows.columns.inside(column)
    with vector.each() as j:
        T.buffer_store(best, f32(float("-inf")), [j])
        T.buffer_store(place, first_row * windows.columns.kernel + first_column, [j])
    for r in _span(first_row, stop_row):
        for s in _span(first_column, stop_column):
            read = source_pixel(windows, image, row, column, r, s)
            with vector.each() as j:
                T.buffer_store(value, _activated(problem, args, read, vector.base + j), [j])
                # a NaN is a maximum; of equal values the first stays
                wins = tirx.Or(value[j] > best[j], tirx.isnan(value[j]))
                T.buffer_store(place, tirx.Select(wins, r * windows.columns.kernel + s, place[j]), [j])
                T.buffer_store(best, tirx.Select(wins, value[j], best[j]), [j])
    with vector.each() as j:
        args.write("indices", pixel, vector.base + j, tirx.Cast(windows.index_dtype, place[j]))
        output.store(pixel, vector.base + j, best[j], is_first)


def _average_pixel(
    problem: Problem,
    windows: Windows,
    args: Args,
    output: ForwardEpilogue,
    pixel: Expr,
    vector: Vector,
    is_first: Expr,
) -> None:
    image, row, column = coordinates(pixel, windows.y)
    total = vector.local()
    with vector.each() as j:
        T.buffer_store(total, f32(0.0), [j])
    for r in _span(*windows.rows.inside(row)):
        for s in _span(*windows.columns.inside(column)):
            read = source_pixel(windows, image, row, column, r, s)
            with vector.each() as j:
                T.buffer_store(total, total[j] + _activated(problem, args, read, vector.base + j), [j])
    with vector.each() as j:
        output.store(pixel, vector.base + j, total[j] * weight_of(problem, windows, row, column), is_first)


def _global_forward(problem: Problem, target: CpuTarget) -> Kernel:
    x, y = problem.map("x"), problem.map("y")
    area = x.h * x.w

    def emit(args: Args) -> None:
        output = ForwardEpilogue(problem, args)

        def visit(image: Expr, vector: Vector, is_first: Expr) -> None:
            total = vector.local("float64")
            with vector.each() as j:
                T.buffer_store(total, f64(0.0), [j])
            with T.serial(0, area) as i, vector.each() as j:
                value = _activated(problem, args, image * area + i, vector.base + j)
                T.buffer_store(total, total[j] + f64(value), [j])
            with vector.each() as j:
                output.store(image, vector.base + j, to_f32(total[j] / f64(float(area))), is_first)

        sweep(y.pixels, y.c, target, visit, output.reductions, lanes=SIDE_BY_SIDE * target.lanes)

    return map_kernel(problem, target, emit)


def _activated(problem: Problem, args: Args, pixel: Expr, channel: Expr) -> Expr:
    """Write the pool's input at a pixel of x, after the prologue."""
    return ProloguePlan.of_input(problem).value(args.loader(pixel, channel))


# Backward


def pool_backward(problem: Problem, target: CpuTarget) -> Kernel:
    """Make the kernel of a pool's gradient. dx is that of the pool's input, at the resolution of x.

    [BatchNormGrad][Normalize][act] MaxPoolGrad|AveragePoolGrad|GlobalAveragePoolGrad [AddGradient][mask]
    [Reduce][ReduceOther]*[Scale|Accumulate]. Raises BnfuseError for BiasGrad.
    """
    if "BiasGrad" in problem.spec.epilogue:
        raise BnfuseError(f"{problem.op}: a pool has no bias; sum its dy by a PointwiseGradBiasGrad")
    dx = problem.map("dx")
    is_global = problem.spec.core == "GlobalAveragePoolGrad"
    windows = None if is_global else windows_of(problem, "dy")

    def emit(args: Args) -> None:
        output = BackwardEpilogue(problem, args)

        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            if windows is None:
                image = tirx.floordiv(pixel, dx.h * dx.w)
                area = float(dx.h * dx.w)
                output.store(pixel, vector, lambda j: _dy(problem, args, image, vector.base + j) / f32(area))
            else:
                total = _gathered(problem, windows, args, pixel, vector)
                output.store(pixel, vector, lambda j: total[j])

        sweep(dx.pixels, dx.c, target, visit, output.reductions, SIDE_BY_SIDE * target.lanes)

    return map_kernel(problem, target, emit)


def _gathered(problem: Problem, windows: Windows, args: Args, pixel: Expr, vector: Vector) -> Any:
    """Gather in registers what the windows over this pixel of x give it."""
    image, h, w = coordinates(pixel, windows.x)
    total = vector.local()
    with vector.each() as j:
        T.buffer_store(total, f32(0.0), [j])
    for row in _span(*windows.rows.covering(h)):
        for column in _span(*windows.columns.covering(w)):
            r, s = h - windows.rows.start(row), w - windows.columns.start(column)
            with _reached(windows, r, s):
                place = tirx.floordiv(r, windows.rows.dilation) * windows.columns.kernel
                place = place + tirx.floordiv(s, windows.columns.dilation)
                window = (image * windows.y.h + row) * windows.y.w + column
                with vector.each() as j:
                    share = _share(problem, windows, args, (row, column), place, window, vector.base + j)
                    T.buffer_store(total, total[j] + share, [j])
    return total


def _share(
    problem: Problem,
    windows: Windows,
    args: Args,
    window_at: tuple[Expr, Expr],
    place: Expr,
    window: Expr,
    channel: Expr,
) -> Expr:
    """Write what one window gives to its element at `place`."""
    dy = _dy(problem, args, window, channel)
    if problem.spec.core == "MaxPoolGrad":
        index = tirx.Cast("int32", args.read("indices", window, channel))
        return tirx.Select(index == place, dy, f32(0.0))
    return dy * weight_of(problem, windows, *window_at)


def _reached(windows: Windows, r: Expr, s: Expr) -> Any:
    """Open a block that runs if a window with holes has an element at distance (r, s) from its first one."""
    conditions = [
        tirx.floormod(distance, axis.dilation) == 0
        for distance, axis in ((r, windows.rows), (s, windows.columns))
        if axis.dilation > 1
    ]
    if not conditions:
        return _Nested()
    condition = conditions[0] if len(conditions) == 1 else tirx.And(*conditions)
    return _Nested(T.If(condition), T.Then())


class _Nested:
    """Frames that open and close together."""

    def __init__(self, *frames: Any) -> None:
        self.frames = frames

    def __enter__(self) -> None:
        for frame in self.frames:
            frame.__enter__()

    def __exit__(self, *error: Any) -> None:
        for frame in reversed(self.frames):
            frame.__exit__(*error)


def _dy(problem: Problem, args: Args, pixel: Expr, channel: Expr) -> Expr:
    return ProloguePlan.of_gradient(problem).value(args.loader(pixel, channel))


def _span(first: Expr, stop: Expr) -> Any:
    """Emit the loop over [first, stop), by `for k in _span(first, stop):`."""
    with T.serial(0, stop - first) as k:
        yield first + k
