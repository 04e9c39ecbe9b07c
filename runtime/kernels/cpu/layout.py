"""Copies between layouts: NCHW and NHWC, slot and slot, and a constant into a buffer."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.maps import CopyProblem
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.sweep import Args, Vector, prim_func, sweep
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param
from bnfuse.runtime.targets.target import CpuTarget

# vectors for each thread: a parallel region costs as much as 4096 elements (of vectors of 16); chosen by hand
WORTH_A_THREAD = 256
FLOATS = ("float32", tir.HALF)


def nchw_to_nhwc(y: MapType, target: CpuTarget, dtype: str = "float32") -> Kernel:
    """Make the kernel x, dense [n, c, h, w] of `dtype` -> the map y."""
    params = (Param("x", "in", y.pixels * y.c, dtype), Param("y", "out", y.elements, stored(y, dtype), is_map=True))
    problem = CopyProblem("NchwToNhwc", y.pixels * y.c, y, dtype)

    def move(args: Args, dense: Expr, pixel: Expr, channel: Expr) -> None:
        args.write("y", pixel, channel, args["x"][dense])

    emit = _by_channels if y.c >= target.lanes else _by_pixels
    return _kernel(problem, target, params, {"y": y}, lambda args: emit(args, y, target, move))


def nhwc_to_nchw(x: MapType, target: CpuTarget, dtype: str = "float32") -> Kernel:
    """Make the kernel of the map x -> y, dense [n, c, h, w] of `dtype`."""
    params = (Param("x", "in", x.elements, stored(x, dtype), is_map=True), Param("y", "out", x.pixels * x.c, dtype))
    problem = CopyProblem("NhwcToNchw", x, x.pixels * x.c, dtype)

    def move(args: Args, dense: Expr, pixel: Expr, channel: Expr) -> None:
        T.buffer_store(args["y"], args.read("x", pixel, channel), [dense])

    return _kernel(problem, target, params, {"x": x}, lambda args: _by_pixels(args, x, target, move))


def copy_map(x: MapType, y: MapType, target: CpuTarget, dtype: str = "float32") -> Kernel:
    """Make the kernel of the map x -> the map y, of the same size but perhaps in another slot.

    `dtype` is the type of maps that are no floats.
    """
    params = (
        Param("x", "in", x.elements, stored(x, dtype), is_map=True),
        Param("y", "out", y.elements, stored(y, dtype), is_map=True),
    )

    def emit(args: Args) -> None:
        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                args.write("y", pixel, vector.base + j, args.read("x", pixel, vector.base + j))

        sweep(y.pixels, y.c, target, visit)

    return _kernel(CopyProblem("CopyMap", x, y, dtype), target, params, {"x": x, "y": y}, emit)


def stored(kind: MapType, dtype: str) -> str:
    """Name the type in which a map of the file's `dtype` lies: its own, where it is one of floats."""
    return kind.dtype if dtype in FLOATS else dtype


def copy(elements: int, target: CpuTarget, dtype: str = "float32") -> Kernel:
    """Make the kernel x -> y, dense, `elements` of each."""
    params = (Param("x", "in", elements, dtype), Param("y", "out", elements, dtype))
    problem = CopyProblem("Copy", elements, elements, dtype)

    def emit(args: Args) -> None:
        flat(elements, target, lambda i: T.buffer_store(args["y"], args["x"][i], [i]))

    return _kernel(problem, target, params, {}, emit)


def fill(elements: int, value: float, target: CpuTarget, dtype: str = "float32") -> Kernel:
    """Make the kernel -> y, dense, every element of which is `value`."""
    params = (Param("y", "out", elements, dtype),)
    problem = CopyProblem("Fill", 0, elements, dtype, value)

    def emit(args: Args) -> None:
        flat(elements, target, lambda i: T.buffer_store(args["y"], tirx.const(value, dtype), [i]))

    return _kernel(problem, target, params, {}, emit)


def flat(elements: int, target: CpuTarget, emit: Callable[[Expr], None]) -> None:
    """Emit `emit(i)` for every i in [0, elements): vectorised, the vectors dealt to the threads in runs."""
    lanes = target.lanes
    whole = elements // lanes
    if whole:
        threads = min(target.threads, max(1, whole // WORTH_A_THREAD))
        with T.parallel(0, threads) as thread:
            first, count = tir.share(whole, threads, thread)
            with T.serial(0, count) as i, T.vectorized(0, lanes) as j:
                emit((first + i) * lanes + j)
    if elements % lanes:
        with T.vectorized(0, elements % lanes) as j:
            emit(whole * lanes + j)


Move = Callable[[Args, Expr, Expr, Expr], None]  # (args, index in NCHW, pixel, channel)


def _by_channels(args: Args, kind: MapType, target: CpuTarget, move: Move) -> None:
    """Move vectors of channels: as many streams are read from NCHW, and whole lines are written to NHWC."""
    area, blocks = kind.h * kind.w, -(-kind.c // target.lanes)
    last = tirx.const(kind.c - target.lanes, "int32")  # the last block is moved back: it repeats some channels

    def task(at: Expr) -> None:
        image = T.bind(tirx.floordiv(at, blocks))
        start = T.bind(tirx.Min(tirx.floormod(at, blocks) * target.lanes, last))
        with T.serial(0, area) as place, T.vectorized(0, target.lanes) as j:
            dense = (image * kind.c + start + j) * area + place
            move(args, dense, image * area + place, start + j)

    _deal(kind.n * blocks, target, task)


def _by_pixels(args: Args, kind: MapType, target: CpuTarget, move: Move) -> None:
    """Move vectors of pixels, one channel after the other: for writing to NCHW, and for few channels."""
    area = kind.h * kind.w
    width = min(area, target.lanes)
    blocks = -(-area // width)
    last = tirx.const(area - width, "int32")

    def task(at: Expr) -> None:
        image = T.bind(tirx.floordiv(at, blocks))
        start = T.bind(tirx.Min(tirx.floormod(at, blocks) * width, last))
        with T.serial(0, kind.c) as channel, T.vectorized(0, width) as j:
            dense = (image * kind.c + channel) * area + start + j
            move(args, dense, image * area + start + j, channel)

    _deal(kind.n * blocks, target, task)


def _deal(tasks: int, target: CpuTarget, emit: Callable[[Expr], None]) -> None:
    threads = min(target.threads, tasks)
    with T.parallel(0, threads) as thread:
        first, count = tir.share(tasks, threads, thread)
        with T.serial(0, count) as i:
            emit(first + i)


def _kernel(
    problem: CopyProblem,
    target: CpuTarget,
    params: tuple[Param, ...],
    maps: dict[str, MapType],
    emit: Callable[[Args], None],
) -> Kernel:
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, maps, emit))
