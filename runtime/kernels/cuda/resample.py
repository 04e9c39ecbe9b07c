"""Resample and ResampleGrad (kernels/common/resample.py), with the steps of the operator on the way in and out.

    thread: a pixel of the result and a vector of channels; the source's pixels one after the other through the
    prologue, weighed and added in float32, then the epilogue

All threads of a pixel read the same entries of the tables. What neighbouring pixels share comes from the caches. With
Statistics or Reduce a second stage merges the tiles.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.common.resample import each_source, is_single, resample_params, result
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Expr
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.cuda.sweep import Sweep, operator_kernel, operator_sweep
from bnfuse.runtime.kernels.cuda.vector import Epilogue, Reader
from bnfuse.runtime.kernels.kernel import Kernel, Problem
from bnfuse.runtime.targets.target import CudaTarget

NO_UNROLL = 9  # maps read at a pixel: a thread takes one pixel at a time
BLOCKS = 2  # beside each other: without a number ptxas spills a word or two to have more


def resample_forward(problem: Problem, target: CudaTarget) -> Kernel:
    """Make the kernel: [Normalize][act][Add|AddNormalized][act] Resample [Bias][Relu][Statistics], NHWC."""
    return _resample(problem, target, Operand(problem, gradient=False))


def resample_backward(problem: Problem, target: CudaTarget) -> Kernel:
    """Make the kernel: [BatchNormGrad][Normalize][act] ResampleGrad and the steps behind it, as in the grammar."""
    return _resample(problem, target, Operand(problem, gradient=True))


def _resample(problem: Problem, target: CudaTarget, operand: Operand) -> Kernel:
    sweep = operator_sweep(problem, target, result(problem), NO_UNROLL)
    assert "stored" not in EpiloguePlan(problem).spec.results

    def emit(block: Block, epilogue: Epilogue) -> None:
        _emit(block, problem, sweep, operand, epilogue)

    return operator_kernel(problem, target, sweep, resample_params(problem), emit, min_blocks=BLOCKS)


def _emit(block: Block, problem: Problem, sweep: Sweep, operand: Operand, epilogue: Epilogue) -> None:
    width, single = sweep.team.width, is_single(problem)
    inlet = Reader(block, operand.maps, operand.vectors, width)
    total = d.registers(width)
    channel, left = sweep.channel(block)
    epilogue.open(channel, left)
    inlet.open(channel, left, sweep.channels % 4 == 0)

    def tap(place: Expr, weight: Expr | None) -> None:
        inlet.fetch(0, place)
        inlet.unpack(0)
        for j in range(width):
            value = operand.value(inlet.load(j))
            if not single:
                value = total[j] + value if weight is None else d.fma(weight, value, total[j])
            d.put(total, j, value)

    def run(i: int, pixel: Expr) -> None:
        for j in range(width):
            d.put(total, j, T.float32(0))
        each_source(problem, pixel, block, T.serial, T.bind, tap)
        epilogue.finish(i, total, pixel)

    sweep.run(block, left, epilogue.fetch, lambda i, pixel, valid: d.when(valid, lambda: run(i, T.bind(pixel))))
