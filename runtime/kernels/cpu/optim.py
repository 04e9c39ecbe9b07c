"""The update of all parameters in one sweep over their buffer, by torch's formulas (bnfuse/runtime/program/optim.py).

Parameters, gradients and moments are flat float32 buffers of one length, element for element. Weight decay is a number
per block of 16 elements (parameters start at multiples of 64 bytes), so that some parameters can go without it.
Scalar arguments follow the buffers: the learning rate, and for AdamW the number of this step, from 1 on.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.optim import (
    BLOCK,
    Update,
    UpdateProblem,
    adamw_factors,
    adamw_problem,
    adamw_update,
    scalars_of,
    sgd_problem,
    sgd_update,
    update_params,
)
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import Expr
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.targets.target import CpuTarget


def sgd(elements: int, momentum: float, nesterov: bool, target: CpuTarget) -> Kernel:
    """Make SGD's kernel: parameters (in place), gradients, decay [elements/16], [momentum (in place)]; lr: float32.

    g <- g + decay*w;  v <- momentum*v + g;  w <- w - lr*v, or with Nesterov  w - lr*(g + momentum*v).
    """
    return _kernel(sgd_problem(elements, momentum, nesterov), target)


def adamw(elements: int, betas: tuple[float, float], epsilon: float, target: CpuTarget) -> Kernel:
    """Make AdamW's kernel; lr: float32, step: int64.

    parameters (in place), gradients, decay [elements/16], first_moment, second_moment (in place).

    w <- w*(1 - lr*decay);  m <- m + (1 - beta1)*(g - m);  v <- beta2*v + (1 - beta2)*g*g;
    w <- w - lr/(1 - beta1^step) * m/(sqrt(v)/sqrt(1 - beta2^step) + epsilon).
    """
    return _kernel(adamw_problem(elements, betas, epsilon), target)


def _kernel(problem: UpdateProblem, target: CpuTarget) -> Kernel:
    params = update_params(problem)
    name = unique_name(problem.op, problem, target)

    def make() -> Any:
        with tir.function(name, params) as args:
            scalars = [T.arg(label, getattr(T, dtype)()) for label, dtype in scalars_of(problem)]
            if problem.op == "AdamW":
                factors = [T.bind(factor) for factor in adamw_factors(problem, *scalars)]
                update = adamw_update(problem, args.buffers, [scalars[0], *factors])
            else:
                update = sgd_update(problem, args.buffers, scalars)
            _sweep(problem, target, args, update)
        return args.result

    return Kernel(name, problem, target, params, make)


def _sweep(problem: UpdateProblem, target: CpuTarget, args: tir.Arguments, update: Update) -> None:
    """Emit `update(element, decay)` for all elements, block by block."""

    def block(index: Expr, width: int) -> None:
        decay = T.bind(args["decay"][index])
        with T.vectorized(0, width) as j:
            update(index * BLOCK + j, decay)

    whole = problem.elements // BLOCK
    if whole:
        threads = min(target.threads, whole)
        with T.parallel(0, threads) as thread:
            first, count = tir.share(whole, threads, thread)
            with T.serial(0, count) as i:
                block(first + i, BLOCK)
    if problem.elements % BLOCK:
        block(tirx.const(whole, "int32"), problem.elements % BLOCK)
