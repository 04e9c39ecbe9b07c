"""Resample and ResampleGrad (kernels/common/resample.py), with the steps of the operator on the way in and out.

    parallel thread:  for pixel of the result, vectors of channels:    the sum in registers
        for row tap: for column tap:                                   one pixel of the source through the prologue
        the epilogue, the store, the sums

All that a pixel mixes is near in the source, so L1 and L2 have what neighbours read; the prologue is computed again for
each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.common.resample import each_source, is_single, resample_params, result
from bnfuse.runtime.kernels.common.steps import Expr, f32, fma
from bnfuse.runtime.kernels.cpu.pointwise import BackwardEpilogue, ForwardEpilogue
from bnfuse.runtime.kernels.cpu.sweep import Args, Vector, prim_func, sweep
from bnfuse.runtime.kernels.kernel import Kernel, Problem
from bnfuse.runtime.targets.target import CpuTarget

SIDE_BY_SIDE = 4  # vectors that go through the taps together; chosen by hand


def resample_forward(problem: Problem, target: CpuTarget) -> Kernel:
    """Make the kernel of [Normalize][act][Add|AddNormalized][act] Resample [Bias][Relu][Statistics]."""
    plan = ProloguePlan.of_input(problem)

    def emit(args: Args) -> None:
        output = ForwardEpilogue(problem, args)

        def store(pixel: Expr, vector: Vector, total: Any, is_first: Expr) -> None:
            with vector.each() as j:
                output.store(pixel, vector.base + j, total[j], is_first)

        _sweep(problem, target, args, plan, output.reductions, store)

    return _kernel(problem, target, emit)


def resample_backward(problem: Problem, target: CpuTarget) -> Kernel:
    """Make the kernel of [BatchNormGrad][Normalize][act] ResampleGrad and the steps behind it."""
    plan = ProloguePlan.of_gradient(problem)

    def emit(args: Args) -> None:
        output = BackwardEpilogue(problem, args)

        def store(pixel: Expr, vector: Vector, total: Any, is_first: Expr) -> None:
            output.store(pixel, vector, lambda j: total[j])

        _sweep(problem, target, args, plan, output.reductions, store)

    return _kernel(problem, target, emit)


def _kernel(problem: Problem, target: CpuTarget, emit: Callable[[Args], None]) -> Kernel:
    params, name = resample_params(problem), unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, dict(problem.maps), emit))


def _sweep(
    problem: Problem, target: CpuTarget, args: Args, plan: ProloguePlan, reductions: Any, store: Callable[..., None]
) -> None:
    made, single = result(problem), is_single(problem)

    def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
        total = vector.local()
        if not single:
            with vector.each() as j:
                T.buffer_store(total, f32(0.0), [j])

        def tap(place: Expr, weight: Expr | None) -> None:
            with vector.each() as j:
                value = plan.value(args.loader(place, vector.base + j))
                if not single:
                    value = total[j] + value if weight is None else fma(weight, value, total[j])
                T.buffer_store(total, value, [j])

        each_source(problem, pixel, args, T.serial, T.bind, tap)
        store(pixel, vector, total, is_first)

    sweep(made.pixels, made.c, target, visit, reductions, lanes=SIDE_BY_SIDE * target.lanes)
