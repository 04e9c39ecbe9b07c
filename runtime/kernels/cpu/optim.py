"""The update of all parameters in one sweep over their buffers, by the formulas of kernels/common/optim.py.

    parallel threads:  blocks of 16 elements, one vector after the other

The norm of all gradients is the same for any number of threads: sums of squares of runs of 4096 elements, in float64,
by lanes and then over the lanes; then these in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.optim import (
    ACCUMULATE_SCALARS,
    AVERAGE_SCALARS,
    BLOCK,
    NORM_SCALARS,
    FlatProblem,
    UpdateProblem,
    accumulate_params,
    average_params,
    factors_of,
    gradient_of,
    norm_and_factor,
    norm_params,
    norm_problem,
    scalars_of,
    update_of,
    update_params,
)
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr, f32, f64, fma
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets.target import CpuTarget

RUN = 256  # blocks whose squares are added up before they meet those of others


def update(problem: UpdateProblem, target: CpuTarget) -> Kernel:
    """Make the kernel of an optimiser's formula: parameters, gradients, decay, what the options ask for, and the state,
    as `update_params` lists them; then the scalars of `scalars_of`."""
    params = update_params(problem)
    name = unique_name(problem.op, problem, target)

    def make() -> Any:
        with tir.function(name, params) as args:
            known = {label: T.arg(label, getattr(T, dtype)()) for label, dtype in scalars_of(problem)}
            if "step" in known:
                factors = factors_of(problem, known["lr"], known["step"])
                known |= {label: T.bind(factor) for label, factor in factors}
            if problem.options.divided:
                known["unscale"] = T.bind(f32(1.0) / known["divisor"])
            if problem.options.clipped:
                known["clip"] = T.bind(args["clip"][0])
            emit = update_of(problem, args.buffers, known)

            def block(index: Expr, width: int) -> None:
                decay = T.bind(args["decay"][index])
                rate = T.bind(args["rates"][index]) if problem.options.rates else None
                with T.vectorized(0, width) as j:
                    i = index * BLOCK + j
                    emit(i, gradient_of(problem.options, args["gradients"][i], known), decay, rate)

            _sweep(problem.elements, target, block)
        return args.result

    return Kernel(name, problem, target, params, make)


def _sweep(elements: int, target: CpuTarget, block: Callable[[Expr, int], None]) -> None:
    """Emit `block(index, width)` for all blocks of 16 elements; the last may be narrower."""
    whole = elements // BLOCK
    if whole:
        threads = min(target.threads, whole)
        with T.parallel(0, threads) as thread:
            first, count = tir.share(whole, threads, thread)
            with T.serial(0, count) as i:
                block(first + i, BLOCK)
    if elements % BLOCK:
        block(tirx.const(whole, "int32"), elements % BLOCK)


# -- what goes before and beside it ----------------------------------------------------------------------------------


def gradient_norm(elements: int, limit: float, divided: bool, target: CpuTarget) -> Kernel:
    """Make the kernel gradients -> norm [1], clip [1]: the norm of all, and min(1, limit/(norm + 1e-6)).

    Gradients are `divided` by the scalar `divisor`, float32. Scratch: sums, float64.
    """
    problem = norm_problem(elements, limit, divided)
    whole = elements // BLOCK
    runs = max(1, -(-whole // RUN))
    params = norm_params(problem, runs)
    name = unique_name(problem.op, problem, target)

    def make() -> Any:
        with tir.function(name, params) as args:
            divisor = T.arg(NORM_SCALARS[0][0], T.float32()) if divided else None
            _squares_of_runs(args, whole, runs, target)
            total = tir.registers(1, "float64")
            T.buffer_store(total, f64(0.0), [0])
            with T.serial(0, runs) as run:
                T.buffer_store(total, total[0] + args["sums"][run], [0])
            for i in range(whole * BLOCK, elements):
                T.buffer_store(total, total[0] + _square(args["gradients"][i]), [0])
            norm, factor = norm_and_factor(problem, total[0], divisor)
            T.buffer_store(args["norm"], norm, [0])
            T.buffer_store(args["clip"], factor(args["norm"][0]), [0])
        return args.result

    return Kernel(name, problem, target, params, make)


def _squares_of_runs(args: tir.Arguments, whole: int, runs: int, target: CpuTarget) -> None:
    """Emit the sum of the squares of each run of blocks."""
    threads = min(target.threads, runs)
    with T.parallel(0, threads) as thread:
        first, count = tir.share(runs, threads, thread)
        lanes = tir.registers(BLOCK, "float64")
        with T.serial(0, count) as i:
            run = T.bind(first + i)
            with T.vectorized(0, BLOCK) as j:
                T.buffer_store(lanes, f64(0.0), [j])
            with T.serial(0, tir.at_most(whole - run * RUN, RUN)) as b, T.vectorized(0, BLOCK) as j:
                value = args["gradients"][(run * RUN + b) * BLOCK + j]
                T.buffer_store(lanes, lanes[j] + _square(value), [j])
            T.buffer_store(args["sums"], f64(0.0), [run])
            with T.serial(0, BLOCK) as j:
                T.buffer_store(args["sums"], args["sums"][run] + lanes[j], [run])


def _square(value: Expr) -> Expr:
    wide = f64(value)
    return wide * wide


def accumulate(elements: int, target: CpuTarget) -> Kernel:
    """Make the kernel  accumulated <- accumulated + factor*gradients, in place.

    Scalars keep: int32, factor: float32; where keep is 0, what is there is not read.
    """
    problem = FlatProblem("Accumulate", elements)
    params = accumulate_params(problem)
    name = unique_name(problem.op, problem, target)

    def make() -> Any:
        with tir.function(name, params) as args:
            keep, factor = (T.arg(label, getattr(T, dtype)()) for label, dtype in ACCUMULATE_SCALARS)
            gradients, accumulated = args["gradients"], args["accumulated"]

            def block(index: Expr, width: int, add: bool) -> None:
                with T.vectorized(0, width) as j:
                    i = index * BLOCK + j
                    own = accumulated[i] if add else f32(0.0)
                    T.buffer_store(accumulated, fma(factor, gradients[i], own), [i])

            with T.If(keep != 0):
                with T.Then():
                    _sweep(elements, target, lambda index, width: block(index, width, True))
                with T.Else():
                    _sweep(elements, target, lambda index, width: block(index, width, False))
        return args.result

    return Kernel(name, problem, target, params, make)


def average(elements: int, target: CpuTarget) -> Kernel:
    """Make the kernel  average <- average + share*(values - average), in place; share: float32."""
    problem = FlatProblem("Average", elements)
    params = average_params(problem)
    name = unique_name(problem.op, problem, target)

    def make() -> Any:
        with tir.function(name, params) as args:
            share = T.arg(AVERAGE_SCALARS[0][0], T.float32())
            held, values = args["average"], args["values"]

            def block(index: Expr, width: int) -> None:
                with T.vectorized(0, width) as j:
                    i = index * BLOCK + j
                    T.buffer_store(held, fma(share, values[i] - held[i], held[i]), [i])

            _sweep(elements, target, block)
        return args.result

    return Kernel(name, problem, target, params, make)
