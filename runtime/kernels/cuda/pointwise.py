"""Pointwise and PointwiseGrad: sweeps over a map that no convolution or pooling can take along (bnfuse/opset/spec.py).

The tile of a block is that of sweep.py; a thread fetches its vectors of all maps at up to four pixels, then computes.
With Statistics or Reduce a second stage merges the tiles. Both run at the speed of memory.
"""

from __future__ import annotations

from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.common.tails import params_with_tail
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Expr
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.cuda.sweep import Sweep, operator_kernel, operator_sweep
from bnfuse.runtime.kernels.cuda.vector import Epilogue, Reader, Writer
from bnfuse.runtime.kernels.kernel import Kernel, Problem
from bnfuse.runtime.targets.target import CudaTarget


def pointwise_forward(problem: Problem, target: CudaTarget) -> Kernel:
    """Make the kernel: the prologue of the grammar, Pointwise, [Bias][Relu][StoreInput][Statistics]; NHWC."""
    return _map(problem, target, "y", Operand(problem, gradient=False))


def pointwise_backward(problem: Problem, target: CudaTarget) -> Kernel:
    """Make the kernel: [GateGrad][BatchNormGrad][Normalize][act] PointwiseGrad and the steps behind it."""
    return _map(problem, target, "dx", Operand(problem, gradient=True))


def _map(problem: Problem, target: CudaTarget, result: str, operand: Operand) -> Kernel:
    kind = problem.map(result)
    reads = len(operand.maps) + len(EpiloguePlan(problem).maps)
    sweep = operator_sweep(problem, target, kind, reads)

    def emit(block: Block, epilogue: Epilogue) -> None:
        _emit(block, problem, sweep, operand, epilogue)

    return operator_kernel(problem, target, sweep, params_with_tail(problem), emit)


def _emit(block: Block, problem: Problem, sweep: Sweep, operand: Operand, epilogue: Epilogue) -> None:
    width = sweep.team.width
    inlet = Reader(block, operand.maps, operand.vectors, width, sweep.unroll)
    stored = None
    if "StoreInput" in problem.spec.epilogue:
        stored = Writer(block, "stored", problem.map("stored"), width)
    values = d.registers(width)
    channel, left = sweep.channel(block)
    epilogue.open(channel, left)
    inlet.open(channel, left, sweep.channels % 4 == 0)

    def fetch(i: int, pixel: Expr, valid: Expr) -> None:
        inlet.fetch(i, pixel, valid)
        epilogue.fetch(i, pixel, valid)

    def finish(i: int, pixel: Expr, valid: Expr) -> None:
        def run() -> None:
            inlet.unpack(i)
            for j in range(width):
                d.put(values, j, operand.value(inlet.load(j)))
            if stored is not None:
                stored.store(values, pixel, channel, left)
            epilogue.finish(i, values, pixel)

        d.when(valid, run)

    sweep.run(block, left, fetch, finish)
