"""SoftmaxCrossEntropyLoss, and SoftmaxCrossEntropyGrad of ai.bnfuse.

Scores are [n, classes, inner...]: a row is one image and one inner position. Rows are dealt to the threads;
exponentials are vectorised over the classes, sums are float64. A label that is no class makes the loss NaN rather than
read beyond the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from bnfuse.runtime.kernels.common.steps import Expr, f64, to_f32
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.rows import ThreadRows
from bnfuse.runtime.kernels.cpu.sweep import Args, prim_func
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CpuTarget


def softmax_loss(problem: LossProblem, target: CpuTarget) -> Kernel:
    """Make the kernel scores, labels, [weights] -> loss, log_prob; all float32 but the labels."""
    return _kernel(
        "SoftmaxCrossEntropyLoss", problem, target, loss_params(problem), lambda args: _emit_loss(problem, target, args)
    )


def softmax_loss_grad(problem: LossGradProblem, target: CpuTarget) -> Kernel:
    """Make the kernel dlosses, log_prob, labels -> dscores; all float32 but the labels."""
    params = grad_params(problem)
    return _kernel("SoftmaxCrossEntropyGrad", problem, target, params, lambda args: _emit_grad(problem, target, args))


def _kernel(
    op: str, problem: LossProblem | LossGradProblem, target: CpuTarget, params: tuple[Param, ...], emit: Any
) -> Kernel:
    name = unique_name(op, problem, target)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, {}, emit))


def _emit_loss(problem: LossProblem, target: CpuTarget, args: Args) -> None:
    losses, weights = (tir.workspace(problem.rows, "float64") for _ in range(2))
    rows = ThreadRows.of(problem.along_classes)

    def emit(row: Expr, at: At) -> None:
        loss, weight = row_loss(problem, target, args, rows, row, at)
        T.buffer_store(losses, loss, [row])
        T.buffer_store(weights, weight, [row])
        if problem.reduction == "none":
            T.buffer_store(args["loss"], to_f32(losses[row]), [row])

    rows.each(target, emit)
    if problem.reduction != "none":
        total_loss, total_weight = _sum_rows(problem, lambda row: losses[row]), None
        if problem.reduction == "mean":
            total_weight = _sum_rows(problem, lambda row: weights[row])
        T.buffer_store(args["loss"], to_f32(total_loss / total_weight if total_weight is not None else total_loss), [0])


def _emit_grad(problem: LossGradProblem, target: CpuTarget, args: Args) -> None:
    rows = ThreadRows.of(problem.along_classes)
    rows.each(target, lambda row, at: row_gradient(problem, target, args, rows, row, at))


def _sum_rows(problem: LossProblem, value: Callable[[Expr], Expr]) -> Expr:
    total = tir.workspace(1, "float64")
    T.buffer_store(total, f64(0.0), [0])
    with T.serial(0, problem.rows) as row:
        T.buffer_store(total, total[0] + value(row), [0])
    return T.bind(total[0])
