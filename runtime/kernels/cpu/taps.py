"""A sparse linear map along the rows or columns of a map (kernels/common/taps.py).

    parallel thread:  for pixel of y, vectors of channels:    the sum in registers
        for tap:                                              one pixel of x, the weight in every lane

All that a pixel of y mixes is near in x, so L1 and L2 have what neighbours read.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr, f32, fma
from bnfuse.runtime.kernels.common.taps import TapsProblem, each_tap, first_of, taps_params
from bnfuse.runtime.kernels.cpu.sweep import Args, Vector, prim_func, sweep
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets.target import CpuTarget

SIDE_BY_SIDE = 4  # vectors that go through the taps together; chosen by hand


def taps(problem: TapsProblem, target: CpuTarget) -> Kernel:
    """Make the kernel x, index, [weight] -> y. Raises BnfuseError as `taps_params` does."""
    params = taps_params(problem)
    name = unique_name("Taps", problem, target)

    def emit(args: Args) -> None:
        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            if problem.picks_channels:
                with vector.each() as j:
                    channel = vector.base + j
                    args.write("y", pixel, channel, args.read("x", pixel, args["index"][channel]))
                return
            place = tuple(T.bind(at) for at in problem.place(pixel))
            first = T.bind(first_of(problem, place))
            total = vector.local()
            if problem.weighted:
                with vector.each() as j:
                    T.buffer_store(total, f32(0.0), [j])

            def tap(t: Expr) -> None:
                source = T.bind(problem.source(place, args["index"][first + t]))
                weight = T.bind(args["weight"][first + t]) if problem.weighted else None
                with vector.each() as j:
                    value = args.read("x", source, vector.base + j)
                    T.buffer_store(total, value if weight is None else fma(weight, value, total[j]), [j])

            each_tap(problem.taps, T.serial, tap)
            with vector.each() as j:
                args.write("y", pixel, vector.base + j, total[j])

        sweep(problem.y.pixels, problem.y.c, target, visit, lanes=SIDE_BY_SIDE * target.lanes)

    maps = {"x": problem.x, "y": problem.y}
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, maps, emit))
