"""The halves of a BatchNorm that stand alone and sweep maps (PLAIN_OPS of bnfuse/opset/plain.py).

What is computed per channel is in coefficients.py.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.runtime.kernels.common.norm import NormProblem
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr, f64, to_f32
from bnfuse.runtime.kernels.cpu.sweep import Args, Moments, Sum, Vector, prim_func, sweep
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param
from bnfuse.runtime.targets.target import CpuTarget

# Sweeps over maps


def batch_norm_statistics(x: MapType, target: CpuTarget, sweeps: int = 1) -> Kernel:
    """Make the kernel x -> mean, variance (biased), [c] float32.

    `sweeps=2` reads the map twice, for the mean and then for the variance: the baseline that mvf improves on.
    """
    assert sweeps in (1, 2), sweeps
    problem = NormProblem("BatchNormStatistics", (("x", x),), (("sweeps", sweeps),))
    return map_sweep(problem, target, x.c, _emit_moments(x, target) if sweeps == 1 else _emit_two_sweeps(x, target))


def _emit_moments(x: MapType, target: CpuTarget) -> Callable[[Args], None]:
    def emit(args: Args) -> None:
        def finish(channel: Expr, mean: Expr, variance: Expr) -> None:
            T.buffer_store(args["mean"], to_f32(mean), [channel])
            T.buffer_store(args["variance"], to_f32(variance), [channel])

        moments = Moments(finish)

        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                moments.add(vector.base + j, args.read("x", pixel, vector.base + j), is_first)

        sweep(x.pixels, x.c, target, visit, [moments])

    return emit


def _emit_two_sweeps(x: MapType, target: CpuTarget) -> Callable[[Args], None]:
    def emit(args: Args) -> None:
        def mean_of(result: str) -> Sum:
            return Sum(lambda c, total: T.buffer_store(args[result], to_f32(total / f64(float(x.pixels))), [c]))

        def total_of(result: str, value: Callable[[Expr, Expr], Expr]) -> None:
            reduction = mean_of(result)

            def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
                with vector.each() as j:
                    reduction.add(vector.base + j, value(pixel, vector.base + j))

            sweep(x.pixels, x.c, target, visit, [reduction])

        def squared_difference(pixel: Expr, channel: Expr) -> Expr:
            d = args.read("x", pixel, channel) - args["mean"][channel]
            return d * d

        total_of("mean", lambda pixel, channel: args.read("x", pixel, channel))
        total_of("variance", squared_difference)

    return emit


def batch_norm_grad_reduce(dz: MapType, x: MapType, target: CpuTarget) -> Kernel:
    """Make the kernel dz, x, mean, inv_std -> dbeta, dgamma, [c] float32."""

    def emit(args: Args) -> None:
        dbeta = Sum(lambda c, total: T.buffer_store(args["dbeta"], to_f32(total), [c]))
        dgamma = Sum(lambda c, total: T.buffer_store(args["dgamma"], to_f32(total * f64(args["inv_std"][c])), [c]))

        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                channel = vector.base + j
                d = args.read("dz", pixel, channel)
                dbeta.add(channel, d)
                dgamma.add(channel, d * (args.read("x", pixel, channel) - args["mean"][channel]))

        sweep(x.pixels, x.c, target, visit, [dbeta, dgamma])

    return map_sweep(NormProblem("BatchNormGradReduce", (("dz", dz), ("x", x))), target, x.c, emit)


def map_sweep(problem: NormProblem, target: CpuTarget, channels: int, emit: Callable[[Args], None]) -> Kernel:
    """Make the kernel of a plain operator: what is no map of the problem is a float32 vector of `channels`."""
    op, maps = PLAIN_OPS[problem.op], dict(problem.maps)
    params = tuple(
        Param(
            name,
            "in" if name in op.operands else "out",
            maps[name].elements if name in maps else channels,
            maps[name].dtype if name in maps else "float32",
            is_map=name in maps,
        )
        for name in (*op.operands, *op.results)
    )
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, maps, emit))
