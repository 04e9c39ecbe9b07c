"""The update of all parameters by torch's formulas (bnfuse/runtime/program/optim.py).

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

from bnfuse.runtime.kernels.common.steps import Expr, f32, f64, fma, to_f32
from bnfuse.runtime.kernels.kernel import Param

BLOCK = 16  # elements that share one weight decay
Update = Callable[[Expr, Expr], None]  # (element, its weight decay)
Buffers = Mapping[str, Any]  # by parameter name


@dataclasses.dataclass(frozen=True)
class UpdateProblem:
    """An optimiser, SGD or AdamW, for so many parameters, with the constants of its formula."""

    op: str
    elements: int
    constants: tuple[tuple[str, float], ...]

    @property
    def blocks(self) -> int:
        """Count the elements of the weight decay; the last may be that of fewer than 16 parameters."""
        return -(-self.elements // BLOCK)


def sgd_problem(elements: int, momentum: float, nesterov: bool) -> UpdateProblem:
    """Describe SGD; without momentum it has no state."""
    return UpdateProblem("SGD", elements, (("momentum", momentum), ("nesterov", float(nesterov))))


def sgd_update(problem: UpdateProblem, buffers: Buffers, scalars: Sequence[Expr]) -> Update:
    """Give SGD's update of one element. `scalars`: lr, float32."""
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
    """Describe AdamW; `betas` are of its first and its second moment."""
    return UpdateProblem("AdamW", elements, (("beta1", betas[0]), ("beta2", betas[1]), ("epsilon", epsilon)))


def adamw_factors(problem: UpdateProblem, lr: Expr, step: Expr) -> tuple[Expr, Expr]:
    """Write lr/(1 - beta1^step) and 1/sqrt(1 - beta2^step): float32, computed in float64."""
    constants = dict(problem.constants)
    rate = to_f32(f64(lr) / (f64(1.0) - tirx.pow(f64(constants["beta1"]), f64(step))))
    return rate, to_f32(f64(1.0) / tirx.sqrt(f64(1.0) - tirx.pow(f64(constants["beta2"]), f64(step))))


def adamw_update(problem: UpdateProblem, buffers: Buffers, scalars: Sequence[Expr]) -> Update:
    """Give AdamW's update of one element. `scalars`: lr and the two of `adamw_factors`, float32."""
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
    """Name the buffers of the optimiser's state."""
    if problem.op == "AdamW":
        return ("first_moment", "second_moment")
    return ("momentum",) if dict(problem.constants)["momentum"] else ()


def scalars_of(problem: UpdateProblem) -> tuple[tuple[str, str], ...]:
    """List the arguments behind the buffers: name and dtype."""
    return (("lr", "float32"), ("step", "int64"))[: 2 if problem.op == "AdamW" else 1]


def update_params(problem: UpdateProblem) -> tuple[Param, ...]:
    """List parameters (in place), gradients, decay [blocks] and the state (in place), flat float32."""
    return (
        Param("parameters", "inout", problem.elements),
        Param("gradients", "in", problem.elements),
        Param("decay", "in", problem.blocks),
        *(Param(name, "inout", problem.elements) for name in moments_of(problem)),
    )
