"""The halves of a BatchNorm that stand alone (PLAIN_OPS of bnfuse/opset/spec.py): over maps, and per channel.

Per-channel kernels are serial loops of microseconds. Their length is a run-time value taken from the buffers, so one
compiled kernel serves every BN of a network; a range of channels of a longer vector is that vector and an offset,
passed like a map's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.spec import PLAIN_OPS
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.steps import Expr
from bnfuse.runtime.kernels.cpu.sweep import (
    Args,
    Moments,
    Sum,
    Vector,
    f64,
    prim_func,
    sweep,
    to_f32,
    unique_name,
)
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param, Target


@dataclasses.dataclass(frozen=True)
class NormProblem:
    """A plain operator: the maps it reads and what else its code depends on (never the number of channels alone)."""

    op: str
    maps: tuple[tuple[str, MapType], ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()


# Sweeps over maps


def batch_norm_statistics(x: MapType, target: Target, sweeps: int = 1) -> Kernel:
    """x -> mean, variance (biased), [c] float32.

    `sweeps=2` reads the map twice, for the mean and then for the variance: the baseline that mvf improves on.
    """
    assert sweeps in (1, 2), sweeps
    problem = NormProblem("BatchNormStatistics", (("x", x),), (("sweeps", sweeps),))
    return _map_kernel(problem, target, x.c, _emit_moments(x, target) if sweeps == 1 else _emit_two_sweeps(x, target))


def _emit_moments(x: MapType, target: Target) -> Callable[[Args], None]:
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


def _emit_two_sweeps(x: MapType, target: Target) -> Callable[[Args], None]:
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


def batch_norm_grad_reduce(dz: MapType, x: MapType, target: Target) -> Kernel:
    """dz, x, mean, inv_std -> dbeta, dgamma, [c] float32."""

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

    return _map_kernel(NormProblem("BatchNormGradReduce", (("dz", dz), ("x", x))), target, x.c, emit)


def _map_kernel(problem: NormProblem, target: Target, channels: int, emit: Callable[[Args], None]) -> Kernel:
    op, maps = PLAIN_OPS[problem.op], dict(problem.maps)
    params = tuple(
        Param(
            name,
            "in" if name in op.operands else "out",
            maps[name].elements if name in maps else channels,
            is_map=name in maps,
        )
        for name in (*op.operands, *op.results)
    )
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, maps, emit))


# Per-channel work


def batch_norm_finalize(channels: int, epsilon: float, momentum: float, target: Target) -> Kernel:
    """scale, bias, mean, variance, running_mean, running_variance
    -> a, b, inv_std, new_running_mean, new_running_variance.
    """

    def emit(get: Callable[[str], Expr], put: Callable[[str, Expr], None]) -> None:
        inv_std = T.bind(f64(1.0) / tirx.sqrt(f64(get("variance")) + f64(epsilon)))
        a = T.bind(f64(get("scale")) * inv_std)
        put("a", to_f32(a))
        put("b", to_f32(f64(get("bias")) - f64(get("mean")) * a))
        put("inv_std", to_f32(inv_std))
        for name in ("mean", "variance"):
            running, batch = f64(get(f"running_{name}")), f64(get(name))
            put(f"new_running_{name}", to_f32(running * f64(momentum) + batch * f64(1.0 - momentum)))

    problem = NormProblem("BatchNormFinalize", constants=(("epsilon", epsilon), ("momentum", momentum)))
    return _vector_kernel(problem, target, channels, emit)


def batch_norm_grad_terms(channels: int, target: Target) -> Kernel:
    """dbeta, dgamma, a, inv_std -> beta_term, gamma_term."""

    def emit(get: Callable[[str], Expr], put: Callable[[str, Expr], None]) -> None:
        put("beta_term", get("a") * get("dbeta"))
        put("gamma_term", get("a") * get("inv_std") * get("dgamma"))

    return _vector_kernel(NormProblem("BatchNormGradTerms"), target, channels, emit)


def batch_norm_grad_terms_accumulate(channels: int, total: int, target: Target) -> Kernel:
    """dbeta, dgamma, a, inv_std, beta_acc, gamma_acc -> beta_term, gamma_term; the accumulators have `total` channels
    and the offset (of the first channel read) of a map.
    """

    def emit(get: Callable[[str], Expr], put: Callable[[str, Expr], None]) -> None:
        put("beta_term", get("beta_acc") + get("a") * get("dbeta"))
        put("gamma_term", get("gamma_acc") + get("a") * get("inv_std") * get("dgamma"))

    problem = NormProblem("BatchNormGradTermsAccumulate")
    return _vector_kernel(problem, target, channels, emit, {"beta_acc": total, "gamma_acc": total})


def batch_norm_grad_finalize(channels: int, total: int, count: int, target: Target) -> Kernel:
    """beta_term, gamma_term, mean -> q, w; the terms have `total` channels and the offset (`start`) of a map."""

    def emit(get: Callable[[str], Expr], put: Callable[[str, Expr], None]) -> None:
        q = T.bind(f64(0.0) - f64(get("gamma_term")) / f64(float(count)))
        put("q", to_f32(q))
        put("w", to_f32(f64(0.0) - f64(get("beta_term")) / f64(float(count)) - q * f64(get("mean"))))

    problem = NormProblem("BatchNormGradFinalize", constants=(("count", count),))
    return _vector_kernel(problem, target, channels, emit, {"beta_term": total, "gamma_term": total})


EmitChannel = Callable[[Callable[[str], Expr], Callable[[str, Expr], None]], None]


def _vector_kernel(
    problem: NormProblem,
    target: Target,
    channels: int,
    emit_channel: EmitChannel,
    ranges: Mapping[str, int] | None = None,
) -> Kernel:
    """A loop over channels. `ranges` has the operands that are ranges of longer vectors, and those vectors' lengths."""
    op, ranges = PLAIN_OPS[problem.op], ranges or {}
    params = [Param(name, "in", ranges.get(name, channels), is_map=name in ranges) for name in op.operands]
    params += [Param(name, "out", channels) for name in op.results]
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, tuple(params), lambda: _vector_func(name, params, emit_channel))


def _vector_func(name: str, params: Sequence[Param], emit_channel: EmitChannel) -> Any:
    length, longer = tirx.Var("channels", "int32"), tirx.Var("total", "int32")
    symbolic = [dataclasses.replace(p, elements=longer if p.is_map else length) for p in params]
    with tir.function(name, symbolic) as args:

        def place(param: str, channel: Expr) -> Expr:
            return args.offsets[param] + channel if param in args.offsets else channel

        with T.serial(0, length) as channel:
            emit_channel(
                lambda param: args[param][place(param, channel)],
                lambda param, value: T.buffer_store(args[param], value, [channel]),
            )
    return args.result
