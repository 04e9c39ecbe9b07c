"""Pointwise and PointwiseGrad: sweeps over a map that no convolution or pooling can take along (bnfuse/opset/spec.py).

Forward stores Normalize, activation and Add of a map, with its statistics; backward stores the input gradient of a BN,
masks, sums dbeta and dgamma, and scales or accumulates in place. Both run at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from bnfuse.opset.spec import ACTIVATION_GRADS
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.steps import Expr, f64, to_f32
from bnfuse.runtime.kernels.cpu.sweep import Args, Moments, Sum, Vector, map_kernel, sweep
from bnfuse.runtime.kernels.kernel import Kernel, Problem
from bnfuse.runtime.targets.target import CpuTarget


def pointwise_forward(problem: Problem, target: CpuTarget) -> Kernel:
    """[Normalize][act][Add|AddNormalized][act] Pointwise [Bias][StoreInput][Statistics], maps [pixels, c] float32."""
    y = problem.map("y")

    def emit(args: Args) -> None:
        output = ForwardEpilogue(problem, args)

        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                load = args.loader(pixel, vector.base + j)
                value, _ = steps.forward_prologue(problem.spec, dict(problem.attributes), load)
                if "StoreInput" in problem.spec.epilogue:
                    args.write("stored", pixel, vector.base + j, value)
                output.store(pixel, vector.base + j, value, is_first)

        sweep(y.pixels, y.c, target, visit, output.reductions)

    return map_kernel(problem, target, emit)


def pointwise_backward(problem: Problem, target: CpuTarget) -> Kernel:
    """[BatchNormGrad][Normalize][act] PointwiseGrad and the steps behind it, in the order of the grammar."""
    dx = problem.map("dx")

    def emit(args: Args) -> None:
        output = BackwardEpilogue(problem, args)

        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            output.store(
                pixel, vector, lambda j: steps.gradient_prologue(problem.spec, args.loader(pixel, vector.base + j))
            )

        sweep(dx.pixels, dx.c, target, visit, output.reductions)

    return map_kernel(problem, target, emit)


class ForwardEpilogue:
    """Bias and Statistics of a forward operator. `store` is called inside a vectorised loop, once per element of y."""

    def __init__(self, problem: Problem, args: Args) -> None:
        self.spec, self.args = problem.spec, args
        self.reductions = [Moments(self._finish)] if "Statistics" in self.spec.epilogue else []

    def store(self, pixel: Expr, channel: Expr, value: Expr, is_first: Expr) -> None:
        if "Bias" in self.spec.epilogue:
            value = value + self.args["bias"][channel]
        self.args.write("y", pixel, channel, value)
        for moments in self.reductions:
            moments.add(channel, self.args.read("y", pixel, channel), is_first)

    def _finish(self, channel: Expr, mean: Expr, variance: Expr) -> None:
        T.buffer_store(self.args["mean"], to_f32(mean), [channel])
        T.buffer_store(self.args["variance"], to_f32(variance), [channel])


class BackwardEpilogue:
    """What happens to a gradient on its way to dx. `store` emits it for one vector of a pixel."""

    def __init__(self, problem: Problem, args: Args) -> None:
        self.spec, self.args, self.attributes = problem.spec, args, dict(problem.attributes)
        suffixes = [""] if "Reduce" in self.spec.epilogue else []
        suffixes += [f"_{i}" for i in range(1, self.spec.others + 1)]
        # the sum of dx is the dbeta of every BN that shares dx
        self.sum_of_d = [Sum(self._finish([f"dbeta{s}" for s in suffixes]))] if suffixes else []
        self.sum_of_products = {s: Sum(self._finish([f"dgamma{s}"], f"inv_std{s}")) for s in suffixes}
        self.bias = [Sum(self._finish(["dbias"]))] if "BiasGrad" in self.spec.epilogue else []
        self.reductions = [*self.bias, *self.sum_of_d, *self.sum_of_products.values()]

    def _finish(self, results: list[str], factor: str | None = None) -> Callable[[Expr, Expr], None]:
        def finish(channel: Expr, total: Expr) -> None:
            scaled = total * f64(self.args[factor][channel]) if factor else total
            for result in results:
                T.buffer_store(self.args[result], to_f32(scaled), [channel])

        return finish

    def store(self, pixel: Expr, vector: Vector, gradient: Callable[[Expr], Expr]) -> None:
        """`gradient(j)` is what the core made of dy, for lane j."""
        value = vector.local()
        with vector.each() as j:
            channel = vector.base + j
            load = self.args.loader(pixel, channel)
            T.buffer_store(value, gradient(j), [j])
            for total in self.bias:
                total.add(channel, value[j])
            if "AddGradient" in self.spec.epilogue or {*ACTIVATION_GRADS} & {*self.spec.epilogue}:
                T.buffer_store(value, self._masked(load, value[j]), [j])
            for total in self.sum_of_d:
                total.add(channel, value[j])
            for suffix, total in self.sum_of_products.items():
                total.add(channel, value[j] * (load(f"x{suffix}", False) - load(f"mean{suffix}", True)))
            self.args.write("dx", pixel, channel, self._placed(load, value[j]))

    def _masked(self, load: steps.Load, d: Expr) -> Expr:
        if "AddGradient" in self.spec.epilogue:
            d = d + load("other", False)
        for step in self.spec.epilogue:
            if step in ACTIVATION_GRADS:
                _, z = steps.forward_prologue(self.spec, self.attributes, load)
                d = steps.activation_grad(step, d, z, self.attributes)
        return d

    def _placed(self, load: steps.Load, d: Expr) -> Expr:
        if "Scale" in self.spec.epilogue:
            return load("acc_p", True) * d
        if "Accumulate" in self.spec.epilogue:
            return steps.fma(load("acc_p", True), d, load("dx", False))
        return d
