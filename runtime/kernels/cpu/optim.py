"""The update of all parameters in one sweep over their buffer, by torch's formulas (bnfuse/runtime/program/optim.py).

Parameters, gradients and moments are flat float32 buffers of one length, element for element. Weight decay is a number
per block of 16 elements (parameters start at multiples of 64 bytes), so that some parameters can go without it.
Scalar arguments follow the buffers: the learning rate, and for AdamW the number of this step, from 1 on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.steps import Expr, f32, fma
from bnfuse.runtime.kernels.cpu.sweep import f64, to_f32, unique_name
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CpuTarget

BLOCK = 16  # elements that share one weight decay

Update = Callable[[Expr, Expr], None]  # (element, its weight decay)
Buffers = Mapping[str, Any]  # by parameter name


@dataclasses.dataclass(frozen=True)
class UpdateProblem:
    op: str
    elements: int
    constants: tuple[tuple[str, float], ...]

    @property
    def blocks(self) -> int:
        return -(-self.elements // BLOCK)


def sgd_problem(elements: int, momentum: float, nesterov: bool) -> UpdateProblem:
    return UpdateProblem("SGD", elements, (("momentum", momentum), ("nesterov", float(nesterov))))


def sgd(elements: int, momentum: float, nesterov: bool, target: CpuTarget) -> Kernel:
    """parameters (in place), gradients, decay [elements/16], [momentum (in place)]; lr: float32.

    g <- g + decay*w;  v <- momentum*v + g;  w <- w - lr*v, or with Nesterov  w - lr*(g + momentum*v).
    """
    return _kernel(sgd_problem(elements, momentum, nesterov), target)


def sgd_update(problem: UpdateProblem, buffers: Buffers, scalars: Sequence[Expr]) -> Update:
    constants, (lr,) = dict(problem.constants), scalars

    def update(i: Expr, decay: Expr) -> None:
        g = fma(decay, buffers["parameters"][i], buffers["gradients"][i])
        if constants["momentum"]:
            g = _momentum(buffers["momentum"], i, g, constants["momentum"], bool(constants["nesterov"]))
        T.buffer_store(buffers["parameters"], fma(f32(0.0) - lr, g, buffers["parameters"][i]), [i])

    return update


def _momentum(buffer: Any, i: Expr, g: Expr, momentum: float, nesterov: bool) -> Expr:
    """Update v and return the direction of the step. `g` is read from memory that the store of v leaves alone."""
    T.buffer_store(buffer, fma(f32(momentum), buffer[i], g), [i])
    return fma(f32(momentum), buffer[i], g) if nesterov else buffer[i]


def adamw_problem(elements: int, betas: tuple[float, float], epsilon: float) -> UpdateProblem:
    return UpdateProblem("AdamW", elements, (("beta1", betas[0]), ("beta2", betas[1]), ("epsilon", epsilon)))


def adamw(elements: int, betas: tuple[float, float], epsilon: float, target: CpuTarget) -> Kernel:
    """parameters (in place), gradients, decay [elements/16], first_moment, second_moment (in place); lr: float32,
    step: int64.

    w <- w*(1 - lr*decay);  m <- m + (1 - beta1)*(g - m);  v <- beta2*v + (1 - beta2)*g*g;
    w <- w - lr/(1 - beta1^step) * m/(sqrt(v)/sqrt(1 - beta2^step) + epsilon).
    """
    return _kernel(adamw_problem(elements, betas, epsilon), target)


def adamw_factors(problem: UpdateProblem, lr: Expr, step: Expr) -> tuple[Expr, Expr]:
    """lr/(1 - beta1^step) and 1/sqrt(1 - beta2^step)."""
    constants = dict(problem.constants)
    rate = to_f32(f64(lr) / (f64(1.0) - tirx.pow(f64(constants["beta1"]), f64(step))))
    return rate, to_f32(f64(1.0) / tirx.sqrt(f64(1.0) - tirx.pow(f64(constants["beta2"]), f64(step))))


def adamw_update(problem: UpdateProblem, buffers: Buffers, scalars: Sequence[Expr]) -> Update:
    """`scalars`: lr and the two of `adamw_factors`."""
    constants, (lr, rate, root) = dict(problem.constants), scalars
    w, g, m, v = (buffers[name] for name in ("parameters", "gradients", "first_moment", "second_moment"))
    beta1, beta2, epsilon = (constants[name] for name in ("beta1", "beta2", "epsilon"))

    def update(i: Expr, decay: Expr) -> None:
        T.buffer_store(m, fma(f32(1.0 - beta1), g[i] - m[i], m[i]), [i])
        T.buffer_store(v, fma(f32(1.0 - beta2) * g[i], g[i], f32(beta2) * v[i]), [i])
        shrunk = w[i] * (f32(1.0) - lr * decay)
        divisor = fma(tirx.sqrt(v[i]), root, f32(epsilon))
        T.buffer_store(w, shrunk - rate * m[i] / divisor, [i])

    return update


def moments_of(problem: UpdateProblem) -> tuple[str, ...]:
    """The optimiser's state."""
    if problem.op == "AdamW":
        return ("first_moment", "second_moment")
    return ("momentum",) if dict(problem.constants)["momentum"] else ()


def scalars_of(problem: UpdateProblem) -> tuple[tuple[str, str], ...]:
    return (("lr", "float32"), ("step", "int64"))[: 2 if problem.op == "AdamW" else 1]


def update_params(problem: UpdateProblem) -> tuple[Param, ...]:
    return (
        Param("parameters", "inout", problem.elements),
        Param("gradients", "in", problem.elements),
        Param("decay", "in", problem.blocks),
        *(Param(name, "inout", problem.elements) for name in moments_of(problem)),
    )


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
    """`update(element, decay)` for all elements, block by block."""

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
