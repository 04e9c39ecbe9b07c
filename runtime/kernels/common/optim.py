"""The update of all parameters by the formulas of bnfuse/runtime/program/optim.py.

Parameters, gradients and moments are flat float32 buffers of one length, element for element. What is a parameter's
own (weight decay, a factor of the learning rate) is a number per block of 16 elements, for parameters start at
multiples of 64 bytes. Scalar arguments follow the buffers.

    gradient:   g/divisor  * clip[0]  into [-bound, bound]         each where the options ask for it
    formula:    parameter and moments, in place
    average:    average + share*(parameter - average)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.steps import Expr, f32, f64, fma, to_f32
from bnfuse.runtime.kernels.kernel import Param

BLOCK = 16  # elements that share one weight decay
NORM_ADDEND = 1e-6  # torch's: what a norm is raised by before it divides
Buffers = Mapping[str, Any]  # by parameter name
Known = Mapping[str, Expr]  # numbers that are the same for all elements
Emit = Callable[[Expr, Expr, Expr, Expr], None]  # (element, its gradient, its weight decay, its factor of the rate)
Update = Callable[[Expr, Expr, Expr, Expr | None], None]


@dataclasses.dataclass(frozen=True)
class Options:
    """What an update does besides its formula.

    rates      a factor of the learning rate for each block: buffer `rates`
    divided    gradients are a multiple of what they should be: scalar `divisor` (accumulated ones, fp16)
    clipped    all gradients are multiplied by the number in buffer `clip`
    bound      elements of gradients are brought into [-bound, bound]
    averaged   an average of the parameters beside them: buffer `average`, scalar `share`
    """

    rates: bool = False
    divided: bool = False
    clipped: bool = False
    bound: float | None = None
    averaged: bool = False


PLAIN = Options()


@dataclasses.dataclass(frozen=True)
class UpdateProblem:
    """An optimiser for so many parameters, with the constants of its formula."""

    op: str
    elements: int
    constants: tuple[tuple[str, float], ...]
    options: Options = PLAIN

    @property
    def blocks(self) -> int:
        """Count the elements of the weight decay; the last may be that of fewer than 16 parameters."""
        return -(-self.elements // BLOCK)


@dataclasses.dataclass(frozen=True)
class FlatProblem:
    """What else sweeps over flat buffers in an update: GradientNorm, Accumulate, Average."""

    op: str
    elements: int
    constants: tuple[tuple[str, Any], ...] = ()


# -- the problems ---------------------------------------------------------------------------------------------------


def sgd_problem(elements: int, momentum: float, nesterov: bool, options: Options = PLAIN) -> UpdateProblem:
    """Describe SGD; without momentum it has no state."""
    return UpdateProblem("SGD", elements, (("momentum", momentum), ("nesterov", float(nesterov))), options)


def adam_problem(
    op: str, elements: int, betas: tuple[float, float], epsilon: float, options: Options = PLAIN
) -> UpdateProblem:
    """Describe Adam or AdamW; `betas` are of its first and its second moment."""
    return UpdateProblem(op, elements, (("beta1", betas[0]), ("beta2", betas[1]), ("epsilon", epsilon)), options)


def rmsprop_problem(
    elements: int, alpha: float, epsilon: float, momentum: float, tensorflow: bool, options: Options = PLAIN
) -> UpdateProblem:
    """Describe RMSprop, torch's or TensorFlow's."""
    constants = (("alpha", alpha), ("epsilon", epsilon), ("momentum", momentum), ("tensorflow", float(tensorflow)))
    return UpdateProblem("RMSprop", elements, constants, options)


def lion_problem(elements: int, betas: tuple[float, float], options: Options = PLAIN) -> UpdateProblem:
    """Describe Lion; `betas` are of the direction and of the momentum that is kept."""
    return UpdateProblem("Lion", elements, (("beta1", betas[0]), ("beta2", betas[1])), options)


def norm_problem(elements: int, limit: float, divided: bool) -> FlatProblem:
    """Describe the norm of all gradients, and the factor that brings it down to `limit`."""
    return FlatProblem("GradientNorm", elements, (("limit", limit), ("divided", divided)))


# -- arguments ------------------------------------------------------------------------------------------------------


def moments_of(problem: UpdateProblem) -> tuple[str, ...]:
    """Name the buffers of the optimiser's state, in the order of its `moments`."""
    has_momentum = problem.op == "Lion" or bool(dict(problem.constants).get("momentum"))
    if problem.op in ("Adam", "AdamW"):
        return ("first_moment", "second_moment")
    return (*(("second_moment",) if problem.op == "RMSprop" else ()), *(("momentum",) if has_momentum else ()))


def state_of(problem: UpdateProblem) -> tuple[str, ...]:
    """Name the buffers that are changed in place."""
    return ("parameters", *moments_of(problem), *(("average",) if problem.options.averaged else ()))


def scalars_of(problem: UpdateProblem) -> tuple[tuple[str, str], ...]:
    """List the arguments behind the buffers: name and dtype."""
    options = problem.options
    found = [("lr", "float32")]
    found += [("step", "int64")] if problem.op in ("Adam", "AdamW") else []
    found += [("share", "float32")] if options.averaged else []
    found += [("divisor", "float32")] if options.divided else []
    return tuple(found)


def update_params(problem: UpdateProblem) -> tuple[Param, ...]:
    """List the buffers, flat float32: parameters (in place), gradients, decay [blocks], what the options ask for, and
    the state (in place)."""
    _, *state = state_of(problem)
    return (
        Param("parameters", "inout", problem.elements),
        Param("gradients", "in", problem.elements),
        Param("decay", "in", problem.blocks),
        *([Param("rates", "in", problem.blocks)] if problem.options.rates else []),
        *([Param("clip", "in", 1)] if problem.options.clipped else []),
        *(Param(name, "inout", problem.elements) for name in state),
    )


def norm_params(problem: FlatProblem, parts: int) -> tuple[Param, ...]:
    """List gradients, norm [1], clip [1], and a sum of squares for each part (float64)."""
    results = (Param("norm", "out", 1), Param("clip", "out", 1), Param("sums", "out", parts, "float64"))
    return (Param("gradients", "in", problem.elements), *results)


def accumulate_params(problem: FlatProblem) -> tuple[Param, ...]:
    """List gradients and what they are added to, in place."""
    return Param("gradients", "in", problem.elements), Param("accumulated", "inout", problem.elements)


def average_params(problem: FlatProblem) -> tuple[Param, ...]:
    """List what is averaged, and the average, in place."""
    return Param("values", "in", problem.elements), Param("average", "inout", problem.elements)


NORM_SCALARS = (("divisor", "float32"),)  # where gradients are divided
ACCUMULATE_SCALARS = (("keep", "int32"), ("factor", "float32"))  # keep 0: these gradients are the first ones
AVERAGE_SCALARS = (("share", "float32"),)


# -- formulas -------------------------------------------------------------------------------------------------------


def factors_of(problem: UpdateProblem, lr: Expr, step: Expr) -> tuple[tuple[str, Expr], ...]:
    """Write what Adam takes besides its rate: 1/(1 - beta1^step) and 1/sqrt(1 - beta2^step), float32, computed in
    float64; the first one times the rate."""
    constants = dict(problem.constants)
    rate = to_f32(f64(lr) / (f64(1.0) - tirx.pow(f64(constants["beta1"]), f64(step))))
    root = to_f32(f64(1.0) / tirx.sqrt(f64(1.0) - tirx.pow(f64(constants["beta2"]), f64(step))))
    return ("rate", rate), ("root", root)


def gradient_of(options: Options, value: Expr, known: Known) -> Expr:
    """Write the gradient that the formula takes. What is not a number stays so."""
    if options.divided:
        value = value * known["unscale"]
    if options.clipped:
        value = value * known["clip"]
    if options.bound is not None:
        low, high = f32(-options.bound), f32(options.bound)
        value = tirx.Select(value > high, high, tirx.Select(value < low, low, value))
    return value


def update_of(problem: UpdateProblem, buffers: Buffers, known: Known) -> Update:
    """Give the update of one element: of its index, its gradient as `gradient_of` has it (read several times), its
    weight decay, and its factor of the learning rate (None: 1)."""
    formula = FORMULAS[problem.op](problem, buffers, known)

    def update(i: Expr, g: Expr, decay: Expr, factor: Expr | None) -> None:
        formula(i, g, decay, f32(1.0) if factor is None else factor)
        if problem.options.averaged:
            average, w = buffers["average"], buffers["parameters"]
            T.buffer_store(average, fma(known["share"], w[i] - average[i], average[i]), [i])

    return update


def sgd_update(problem: UpdateProblem, buffers: Buffers, known: Known) -> Emit:
    """Give SGD's formula."""
    constants, w = dict(problem.constants), buffers["parameters"]
    momentum, nesterov = constants["momentum"], bool(constants["nesterov"])

    def update(i: Expr, g: Expr, decay: Expr, factor: Expr) -> None:
        g = fma(decay, w[i], g)
        if momentum:
            v = buffers["momentum"]
            T.buffer_store(v, fma(f32(momentum), v[i], g), [i])
            g = fma(f32(momentum), v[i], g) if nesterov else v[i]  # g reads what the store of v leaves alone
        T.buffer_store(w, fma(f32(0.0) - known["lr"] * factor, g, w[i]), [i])

    return update


def adam_update(problem: UpdateProblem, buffers: Buffers, known: Known) -> Emit:
    """Give the formula of Adam or AdamW."""
    constants, decoupled = dict(problem.constants), problem.op == "AdamW"
    w, m, v = (buffers[name] for name in ("parameters", "first_moment", "second_moment"))
    beta1, beta2, epsilon = (constants[name] for name in ("beta1", "beta2", "epsilon"))

    def update(i: Expr, g: Expr, decay: Expr, factor: Expr) -> None:
        if not decoupled:
            g = fma(decay, w[i], g)
        T.buffer_store(m, fma(f32(1.0 - beta1), g - m[i], m[i]), [i])
        T.buffer_store(v, fma(f32(1.0 - beta2) * g, g, f32(beta2) * v[i]), [i])
        shrunk = w[i] * (f32(1.0) - known["lr"] * factor * decay) if decoupled else w[i]
        divisor = fma(tirx.sqrt(v[i]), known["root"], f32(epsilon))
        T.buffer_store(w, shrunk - known["rate"] * factor * m[i] / divisor, [i])

    return update


def rmsprop_update(problem: UpdateProblem, buffers: Buffers, known: Known) -> Emit:
    """Give RMSprop's formula."""
    constants, w, v = dict(problem.constants), buffers["parameters"], buffers["second_moment"]
    alpha, epsilon, momentum = (constants[name] for name in ("alpha", "epsilon", "momentum"))
    tensorflow = bool(constants["tensorflow"])

    def update(i: Expr, g: Expr, decay: Expr, factor: Expr) -> None:
        g = fma(decay, w[i], g)
        lr = known["lr"] * factor
        if tensorflow:
            T.buffer_store(v, fma(f32(1.0 - alpha), g * g - v[i], v[i]), [i])
            direction = g / tirx.sqrt(v[i] + f32(epsilon))
        else:
            T.buffer_store(v, fma(f32(1.0 - alpha) * g, g, f32(alpha) * v[i]), [i])
            direction = g / (tirx.sqrt(v[i]) + f32(epsilon))
        if momentum:
            b = buffers["momentum"]
            T.buffer_store(b, fma(f32(momentum), b[i], lr * direction if tensorflow else direction), [i])
            direction = b[i]
        T.buffer_store(w, w[i] - (direction if momentum and tensorflow else lr * direction), [i])

    return update


def lion_update(problem: UpdateProblem, buffers: Buffers, known: Known) -> Emit:
    """Give Lion's formula. The sign of what is no number is none either."""
    constants, w, m = dict(problem.constants), buffers["parameters"], buffers["momentum"]
    beta1, beta2 = constants["beta1"], constants["beta2"]

    def update(i: Expr, g: Expr, decay: Expr, factor: Expr) -> None:
        lr = known["lr"] * factor
        mixed = fma(f32(1.0 - beta1), g - m[i], m[i])
        sign = tirx.Select(mixed > f32(0.0), f32(1.0), tirx.Select(mixed < f32(0.0), f32(-1.0), mixed))
        T.buffer_store(w, w[i] * (f32(1.0) - lr * decay) - lr * sign, [i])
        T.buffer_store(m, fma(f32(1.0 - beta2), g - m[i], m[i]), [i])

    return update


FORMULAS: Mapping[str, Callable[[UpdateProblem, Buffers, Known], Emit]] = {
    "SGD": sgd_update,
    "Adam": adam_update,
    "AdamW": adam_update,
    "RMSprop": rmsprop_update,
    "Lion": lion_update,
}


def norm_and_factor(problem: FlatProblem, squares: Expr, divisor: Expr | None) -> tuple[Expr, Callable[[Expr], Expr]]:
    """Write the norm of a sum of squares (float64), as float32, and what gives the factor of the gradients of it:
    min(1, limit/(norm + 1e-6)), which is no number where the norm is none."""
    limit = dict(problem.constants)["limit"]
    root = tirx.sqrt(squares)
    norm = to_f32(root if divisor is None else root / f64(divisor))

    def factor(norm: Expr) -> Expr:
        if limit == float("inf"):
            return f32(1.0)
        ratio = f32(limit) / (norm + f32(NORM_ADDEND))
        return tirx.Select(ratio > f32(1.0), f32(1.0), ratio)

    return norm, factor
