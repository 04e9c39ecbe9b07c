"""LayerNorms over the channels of each pixel, and their gradients, in one sweep each.

parallel thread:
    for pixel:                          its channels stay in L1
        for vector of channels:         sums, in a register of each lane; then the lanes are joined
        for vector of channels:         the result
    gradient: the sums over pixels are those of sweep.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.layer_norm import forward_problem, gradient_problem, params_of
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr, to_f32
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.sweep import Args, Sum, prim_func, sweep_pixels, vectors
from bnfuse.runtime.kernels.kernel import Kernel, MapType
from bnfuse.runtime.targets.target import CpuTarget

Values = Callable[[Expr], Sequence[Expr]]  # of a channel


def layer_norm(x: MapType, y: MapType, target: CpuTarget, epsilon: float) -> Kernel:
    """Make the kernel x, scale, bias -> y, mean, inv_std; the last two [pixels] float32."""
    problem = forward_problem(x, y, epsilon)
    params, name = params_of(problem), unique_name(problem.op, problem, target)

    def emit(args: Args) -> None:
        def visit(pixel: Expr, is_first: Expr) -> None:
            (total,) = totals(1, x.c, target, lambda c: [args.read("x", pixel, c)])
            mean = T.bind(total / _f32(x.c))

            def squared(channel: Expr) -> list[Expr]:
                gap = args.read("x", pixel, channel) - mean
                return [gap * gap]

            (squares,) = totals(1, x.c, target, squared)
            inv_std = T.bind(_f32(1.0) / tirx.sqrt(squares / _f32(x.c) + _f32(epsilon)))
            T.buffer_store(args["mean"], mean, [pixel])
            T.buffer_store(args["inv_std"], inv_std, [pixel])
            for vector in vectors(x.c, target.lanes):
                with vector.each() as j:
                    c = vector.base + j
                    normalised = (args.read("x", pixel, c) - mean) * inv_std
                    args.write("y", pixel, c, normalised * args["scale"][c] + args["bias"][c])

        sweep_pixels(x.pixels, x.c, target, visit)

    return Kernel(name, problem, target, params, lambda: prim_func(name, params, dict(problem.maps), emit))


def layer_norm_grad(dy: MapType, x: MapType, dx: MapType, target: CpuTarget) -> Kernel:
    """Make the kernel dy, x, scale, mean, inv_std -> dx, dscale, dbias; the last two [c] float32."""
    problem = gradient_problem(dy, x, dx)
    params, name = params_of(problem), unique_name(problem.op, problem, target)

    def emit(args: Args) -> None:
        dscale = Sum(lambda c, total: T.buffer_store(args["dscale"], to_f32(total), [c]))
        dbias = Sum(lambda c, total: T.buffer_store(args["dbias"], to_f32(total), [c]))

        def visit(pixel: Expr, is_first: Expr) -> None:
            mean, inv_std = T.bind(args["mean"][pixel]), T.bind(args["inv_std"][pixel])

            def normalised(c: Expr) -> Expr:
                return (args.read("x", pixel, c) - mean) * inv_std

            def sums(c: Expr) -> list[Expr]:
                gradient = args.read("dy", pixel, c)
                dbias.add(c, gradient)
                dscale.add(c, gradient * normalised(c))
                scaled = gradient * args["scale"][c]
                return [scaled, scaled * normalised(c)]

            plain, along = (T.bind(total / _f32(x.c)) for total in totals(2, x.c, target, sums))
            for vector in vectors(x.c, target.lanes):
                with vector.each() as j:
                    c = vector.base + j
                    own = args.read("dy", pixel, c) * args["scale"][c] - plain - normalised(c) * along
                    args.write("dx", pixel, c, own * inv_std)

        sweep_pixels(x.pixels, x.c, target, visit, [dscale, dbias])

    return Kernel(name, problem, target, params, lambda: prim_func(name, params, dict(problem.maps), emit))


def totals(count: int, channels: int, target: CpuTarget, values: Values) -> list[Expr]:
    """Emit the sums over a pixel's channels of the `count` terms `values(channel)`, lane by lane, then of the lanes."""
    lanes = target.lanes
    sums = [tir.registers(lanes) for _ in range(count)]
    for total in sums:
        tir.store(total, tir.span(0, lanes), tir.splat(0.0, lanes))
    for vector in vectors(channels, lanes):
        with vector.each() as j:
            for total, value in zip(sums, values(vector.base + j), strict=True):
                T.buffer_store(total, total[j] + value, [j])
    return [joined(total, lanes) for total in sums]


def joined(values: Expr, lanes: int) -> Expr:
    """Emit the sum over the lanes, halving their number each time."""
    while lanes > 1:
        lanes //= 2
        tir.store(values, tir.span(0, lanes), values[tir.span(0, lanes)] + values[tir.span(lanes, lanes)])
    return T.bind(values[0])


def _f32(value: float) -> Expr:
    return tirx.const(float(value), "float32")
