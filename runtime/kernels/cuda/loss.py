"""SoftmaxCrossEntropyLoss and SoftmaxCrossEntropyGrad on a GPU: the formulas of kernels/common/loss.py.

    rows:    log_prob, and each row's loss and weight as float64                       (scratch: losses, weights)
    sums:    blocks sum up to 4096 rows each, in a fixed order; where there are several, a last block joins them

A label that is no class never becomes an index: it makes the loss NaN, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.loss import (
    LossGradProblem,
    LossProblem,
    grad_params,
    loss_params,
    row_gradient,
    row_loss,
)
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.rows import At
from bnfuse.runtime.kernels.common.steps import f64, to_f32
from bnfuse.runtime.kernels.cuda.device import Block, Expr, Stage, put, registers, stage, when
from bnfuse.runtime.kernels.cuda.rows import BlockRows, join_threads
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CudaTarget

SUM_THREADS = 256
SUM_ROWS = 4096  # of a block: chosen by hand


def softmax_loss(problem: LossProblem, target: CudaTarget) -> Kernel:
    """Make the kernel: scores, labels, [weights] -> loss, log_prob.

    Scratch, float64, unless the reduction is none: row_losses, row_weights [rows]; of several blocks sums [2][blocks].
    """
    params = loss_params(problem)
    if problem.reduction != "none":
        params += tuple(Param(name, "out", problem.rows, "float64") for name in ("row_losses", "row_weights"))
        if _blocks(problem) > 1:
            params += (Param("sums", "out", 2 * _blocks(problem), "float64"),)
    name = unique_name("SoftmaxCrossEntropyLoss", problem, target)
    return Kernel(name, problem, target, params, lambda: _loss_stages(name, problem, target, params))


def softmax_loss_grad(problem: LossGradProblem, target: CudaTarget) -> Kernel:
    """Make the kernel: dlosses, log_prob, labels -> dscores."""
    params = grad_params(problem)
    name = unique_name("SoftmaxCrossEntropyGrad", problem, target)

    def build() -> tuple[Stage, ...]:
        return (_gradient(name, problem, target, params),)

    return Kernel(name, problem, target, params, build)


def _rows(problem: LossProblem | LossGradProblem) -> BlockRows:
    return BlockRows.of(problem.along_classes)


def _blocks(problem: LossProblem) -> int:
    """Count the blocks that sum over rows."""
    return -(-problem.rows // SUM_ROWS)


def _named(params: Sequence[Param], *names: str) -> list[Param]:
    return [param for param in params if param.name in names]


# -- the loss ------------------------------------------------------------------------------------------------------


def _loss_stages(name: str, problem: LossProblem, target: CudaTarget, params: Sequence[Param]) -> tuple[Stage, ...]:
    stages = [_row_losses(name, problem, target, params)]
    if problem.reduction == "none":
        return tuple(stages)
    blocks = _blocks(problem)
    used = _named(params, "row_losses", "row_weights", "sums" if blocks > 1 else "loss")
    with stage(f"{name}_sum", used, grid=(blocks, 1, 1), threads=SUM_THREADS) as block:
        loss = _sum(block, problem, lambda row: block["row_losses"][row])
        weight = _sum(block, problem, lambda row: block["row_weights"][row])

        def finish() -> None:
            if blocks == 1:
                put(block["loss"], 0, _reduced(problem, loss, weight))
            else:
                put(block["sums"], block.x, loss)
                put(block["sums"], blocks + block.x, weight)

        when(block.tid == 0, finish)
    stages.append(block.stage)
    if blocks > 1:
        with stage(f"{name}_join", _named(params, "sums", "loss"), grid=(1, 1, 1), threads=1) as block:
            loss, weight = (_serial_sum(block, blocks, first) for first in (0, blocks))
            put(block["loss"], 0, _reduced(problem, loss, weight))
        stages.append(block.stage)
    return tuple(stages)


def _reduced(problem: LossProblem, loss: Expr, weight: Expr) -> Expr:
    return to_f32(loss / weight if problem.reduction == "mean" else loss)


def _row_losses(name: str, problem: LossProblem, target: CudaTarget, params: Sequence[Param]) -> Stage:
    rows = _rows(problem)
    none = problem.reduction == "none"
    used = [p for p in params if p.name != "sums" and (none or p.name != "loss")]
    with stage(name, used, grid=rows.grid, threads=rows.threads) as block:
        own = rows.within(block)

        def emit(row: Expr, at: At) -> None:
            loss, weight = row_loss(problem, target, block, own, row, at)

            def store() -> None:
                if none:
                    put(block["loss"], row, to_f32(loss))
                else:
                    put(block["row_losses"], row, loss)
                    put(block["row_weights"], row, weight)

            own.once(store)

        own.each(target, emit)
    return block.stage


def _sum(block: Block, problem: LossProblem, value: Callable[[Expr], Expr]) -> Expr:
    """Add up `value(row)` over the rows of this block, in float64."""
    total = registers(1, "float64")
    put(total, 0, f64(0.0))

    def add(i: Expr) -> None:
        row = T.bind(block.x * SUM_ROWS + i)
        when(row < problem.rows, lambda: put(total, 0, total[0] + value(row)))

    block.each(min(SUM_ROWS, problem.rows), add)
    return join_threads(block, total[0], "float64", tirx.Add)


def _serial_sum(block: Block, count: int, first: int) -> Expr:
    total = registers(1, "float64")
    put(total, 0, f64(0.0))
    with T.serial(0, count) as i:
        put(total, 0, total[0] + block["sums"][first + i])
    return total[0]


# -- its gradient --------------------------------------------------------------------------------------------------


def _gradient(name: str, problem: LossGradProblem, target: CudaTarget, params: Sequence[Param]) -> Stage:
    rows = _rows(problem)
    with stage(name, params, grid=rows.grid, threads=rows.threads) as block:
        own = rows.within(block)
        own.each(target, lambda row, at: row_gradient(problem, target, block, own, row, at))
    return block.stage
