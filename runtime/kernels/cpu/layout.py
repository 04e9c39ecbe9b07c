"""Copies between layouts: NCHW and NHWC, slot and slot, and a constant into a buffer.

A transposition moves 16 pixels of one channel as a vector, channel by channel, so that the 16 pixels' lines of
the NHWC side stay in L1 while their channels are filled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.steps import Expr
from bnfuse.runtime.kernels.cpu.sweep import Args, Vector, prim_func, sweep, unique_name
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param, Target


@dataclasses.dataclass(frozen=True)
class CopyProblem:
    op: str
    x: MapType | int
    y: MapType | int
    dtype: str
    value: float = 0.0


def nchw_to_nhwc(y: MapType, target: Target, dtype: str = "float32") -> Kernel:
    """x, dense [n, c, h, w] -> the map y."""
    params = (Param("x", "in", y.pixels * y.c, dtype), Param("y", "out", y.elements, dtype, is_map=True))
    problem = CopyProblem("NchwToNhwc", y.pixels * y.c, y, dtype)

    def move(args: Args, dense: Expr, pixel: Expr, channel: Expr) -> None:
        args.write("y", pixel, channel, args["x"][dense])

    return _kernel(problem, target, params, {"y": y}, lambda args: _transpose(args, y, target, move))


def nhwc_to_nchw(x: MapType, target: Target, dtype: str = "float32") -> Kernel:
    """The map x -> y, dense [n, c, h, w]."""
    params = (Param("x", "in", x.elements, dtype, is_map=True), Param("y", "out", x.pixels * x.c, dtype))
    problem = CopyProblem("NhwcToNchw", x, x.pixels * x.c, dtype)

    def move(args: Args, dense: Expr, pixel: Expr, channel: Expr) -> None:
        T.buffer_store(args["y"], args.read("x", pixel, channel), [dense])

    return _kernel(problem, target, params, {"x": x}, lambda args: _transpose(args, x, target, move))


def copy_map(x: MapType, y: MapType, target: Target, dtype: str = "float32") -> Kernel:
    """The map x -> the map y, of the same size but perhaps in another slot."""
    params = (
        Param("x", "in", x.elements, dtype, is_map=True),
        Param("y", "out", y.elements, dtype, is_map=True),
    )

    def emit(args: Args) -> None:
        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                args.write("y", pixel, vector.base + j, args.read("x", pixel, vector.base + j))

        sweep(y.pixels, y.c, target, visit)

    return _kernel(CopyProblem("CopyMap", x, y, dtype), target, params, {"x": x, "y": y}, emit)


def copy(elements: int, target: Target, dtype: str = "float32") -> Kernel:
    """x -> y, dense."""
    params = (Param("x", "in", elements, dtype), Param("y", "out", elements, dtype))
    problem = CopyProblem("Copy", elements, elements, dtype)

    def emit(args: Args) -> None:
        flat(elements, target, lambda i: T.buffer_store(args["y"], args["x"][i], [i]))

    return _kernel(problem, target, params, {}, emit)


def fill(elements: int, value: float, target: Target, dtype: str = "float32") -> Kernel:
    """-> y, every element of which is `value`."""
    params = (Param("y", "out", elements, dtype),)
    problem = CopyProblem("Fill", 0, elements, dtype, value)

    def emit(args: Args) -> None:
        flat(elements, target, lambda i: T.buffer_store(args["y"], tirx.const(value, dtype), [i]))

    return _kernel(problem, target, params, {}, emit)


def flat(elements: int, target: Target, emit: Callable[[Expr], None]) -> None:
    """`emit(i)` for every i in [0, elements): vectorised, the vectors dealt to the threads in runs."""
    lanes = target.lanes
    whole = elements // lanes
    if whole:
        threads = min(target.threads, max(1, whole // 256))  # a parallel region costs as much as 4096 elements
        with T.parallel(0, threads) as thread:
            first, count = tir.share(whole, threads, thread)
            with T.serial(0, count) as i, T.vectorized(0, lanes) as j:
                emit((first + i) * lanes + j)
    if elements % lanes:
        with T.vectorized(0, elements % lanes) as j:
            emit(whole * lanes + j)


def _transpose(args: Args, kind: MapType, target: Target, move: Callable[[Args, Expr, Expr, Expr], None]) -> None:
    area = kind.h * kind.w
    blocks = -(-area // target.lanes)
    threads = min(target.threads, kind.n * blocks)
    with T.parallel(0, threads) as thread:
        first, count = tir.share(kind.n * blocks, threads, thread)
        with T.serial(0, count) as i:
            image, block = tirx.floordiv(first + i, blocks), tirx.floormod(first + i, blocks)
            start = block * target.lanes
            if area < target.lanes:
                _channels(args, kind, image, start, area, move)
            elif area % target.lanes == 0:
                _channels(args, kind, image, start, target.lanes, move)
            else:  # the last block is moved back: it repeats some pixels, and nothing is left over
                last = tirx.const(area - target.lanes, "int32")
                _channels(args, kind, image, tirx.Min(start, last), target.lanes, move)


def _channels(
    args: Args,
    kind: MapType,
    image: Expr,
    start: Expr,
    pixels: int,
    move: Callable[[Args, Expr, Expr, Expr], None],
) -> None:
    with T.serial(0, kind.c) as channel, T.vectorized(0, pixels) as j:
        dense = (image * kind.c + channel) * (kind.h * kind.w) + start + j
        move(args, dense, image * (kind.h * kind.w) + start + j, channel)


def _kernel(
    problem: CopyProblem,
    target: Target,
    params: tuple[Param, ...],
    maps: dict[str, MapType],
    emit: Callable[[Args], None],
) -> Kernel:
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, maps, emit))
