"""Pointwise and PointwiseGrad: sweeps over a map that no convolution or pooling can take along (bnfuse/opset/spec.py).

Forward stores Normalize, activation and Add of a map, with its statistics; backward stores the input gradient of a BN,
masks, sums dbeta and dgamma, and scales or accumulates in place. Both run at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan, Total
from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.common.steps import Expr, Load, f64, to_f32
from bnfuse.runtime.kernels.cpu.sweep import Args, Moments, Sum, Vector, map_kernel, sweep
from bnfuse.runtime.kernels.kernel import Kernel, Problem
from bnfuse.runtime.targets.target import CpuTarget


def pointwise_forward(problem: Problem, target: CpuTarget) -> Kernel:
    """Make the kernel of a sweep: what it reads and stores are maps [pixels, c], float32.

    [Normalize][act][Gate][Add|AddNormalized][act] Pointwise [Bias][Relu][StoreInput][Statistics].
    """
    y, prologue = problem.map("y"), ProloguePlan.of_input(problem)

    def emit(args: Args) -> None:
        output = ForwardEpilogue(problem, args)

        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                load = args.loader(pixel, vector.base + j)
                value = prologue.value(load)
                if "StoreInput" in problem.spec.epilogue:
                    args.write("stored", pixel, vector.base + j, value)
                output.store(pixel, vector.base + j, value, is_first)

        sweep(y.pixels, y.c, target, visit, output.reductions)

    return map_kernel(problem, target, emit)


def pointwise_backward(problem: Problem, target: CpuTarget) -> Kernel:
    """Make the kernel of a backward sweep, the steps in the order of the grammar.

    [GateGrad][BatchNormGrad][Normalize][act] PointwiseGrad and the steps behind it.
    """
    dx, prologue = problem.map("dx"), ProloguePlan.of_gradient(problem)

    def emit(args: Args) -> None:
        output = BackwardEpilogue(problem, args)

        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            output.store(pixel, vector, lambda j: prologue.value(args.loader(pixel, vector.base + j)))

        sweep(dx.pixels, dx.c, target, visit, output.reductions)

    return map_kernel(problem, target, emit)


class ForwardEpilogue:
    """Bias, Relu and Statistics of an operator. `store` is called inside a vectorised loop, once per element of y."""

    def __init__(self, problem: Problem, args: Args) -> None:
        self.plan, self.args = EpiloguePlan(problem), args
        self.reductions = [Moments(self._finish)] if self.plan.statistics else []

    def store(self, pixel: Expr, channel: Expr, value: Expr, is_first: Expr) -> None:
        """Store an element of y, and take it into the statistics as it is stored."""
        self.args.write("y", pixel, channel, self.plan.finished(value, self.args.loader(pixel, channel)))
        for moments in self.reductions:
            moments.add(channel, self.args.read("y", pixel, channel), is_first)

    def _finish(self, channel: Expr, mean: Expr, variance: Expr) -> None:
        T.buffer_store(self.args["mean"], to_f32(mean), [channel])
        T.buffer_store(self.args["variance"], to_f32(variance), [channel])


class BackwardEpilogue:
    """What happens to a gradient on its way to dx. `store` emits it for one vector of a pixel."""

    def __init__(self, problem: Problem, args: Args) -> None:
        self.plan, self.args = EpiloguePlan(problem), args
        self.sums = [(total, Sum(self._finish(total))) for total in self.plan.totals]
        self.reductions = [total for _, total in self.sums]

    def _finish(self, total: Total) -> Callable[[Expr, Expr], None]:
        def finish(channel: Expr, found: Expr) -> None:
            scaled = found * f64(self.args[total.factor][channel]) if total.factor else found
            for result in total.results:
                T.buffer_store(self.args[result], to_f32(scaled), [channel])

        return finish

    def store(self, pixel: Expr, vector: Vector, gradient: Callable[[Expr], Expr]) -> None:
        """Store a vector of dx and add to its sums; `gradient(j)` is what the core made of dy, for lane j."""
        value = vector.local()
        with vector.each() as j:
            channel = vector.base + j
            load = self.args.loader(pixel, channel)
            T.buffer_store(value, gradient(j), [j])
            self._add(channel, value[j], load, of_bias=True)
            if self.plan.changes:
                T.buffer_store(value, self.plan.changed(value[j], load), [j])
            self._add(channel, value[j], load, of_bias=False)
            self.args.write("dx", pixel, channel, self.plan.placed(value[j], load))

    def _add(self, channel: Expr, value: Expr, load: Load, *, of_bias: bool) -> None:
        for total, sums in self.sums:
            if total.of_bias == of_bias:
                summed = self.plan.summed(total, value, load)
                sums.add(channel, summed if total.suffix is None else summed * total.centred(load))
