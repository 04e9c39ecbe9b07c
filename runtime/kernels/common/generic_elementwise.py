"""Elementwise operators, with broadcasting: one formula each, as a TIR expression of its operands.

`exp` in activations is the polynomial of steps.py for float32; the rest (log, erf, pow, ...) is the C library's, called
for each lane.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx

from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.generic import (
    Buffers,
    Emit,
    GenericProblem,
    broadcast_view,
    dense_view,
    dtype_of,
    nest,
    store,
)
from bnfuse.runtime.kernels.common.steps import Expr

Attributes = Mapping[str, Any]


def elementwise(formula: Callable[..., Expr]) -> Emit:
    """Emit `formula(attributes, *operands)` at each point of the first output; operands broadcast.

    To the attributes `dtype` is added, that of the first output.
    """

    def emit(problem: GenericProblem, args: Buffers) -> None:
        space = problem.out_shape
        views = [dense_view(space), *(broadcast_view(shape, space) for shape, _ in problem.inputs)]
        attributes = {**dict(problem.attributes), "dtype": problem.out_dtype}

        def point(out: Expr, *places: Expr) -> None:
            values = [args[f"in{i}"][place] for i, place in enumerate(places)]
            store(args, "out0", out, formula(attributes, *values))

        nest(space, views, point)

    return emit


def like(x: Expr, value: float) -> Expr:
    """Write a constant of the dtype of x."""
    return tirx.const(value, dtype_of(x))


def exp(x: Expr) -> Expr:
    """Write e**x, for a formula that keeps x in the range of steps.exp, or does not tell its extremes apart."""
    return steps.exp(x) if dtype_of(x) == "float32" else tirx.exp(x)


def sigmoid(x: Expr) -> Expr:
    """Write 1/(1 + e**-x)."""
    return like(x, 1.0) / (like(x, 1.0) + exp(like(x, 0.0) - x))


def clamp(x: Expr, low: float, high: float) -> Expr:
    """Write min(max(x, low), high), NaN where x is NaN."""
    return steps.minimum(steps.maximum(x, like(x, low)), like(x, high))


def softplus(x: Expr) -> Expr:
    """Write log(1 + e**x) = max(x, 0) + log(1 + e**-|x|).

    Both are the C library's: what is called lane by lane does not see variables, which steps.exp binds.
    """
    return steps.maximum(x, like(x, 0.0)) + tirx.log1p(tirx.exp(like(x, 0.0) - tirx.abs(x)))


def normal_distribution(x: Expr) -> Expr:
    """Write the distribution function of the normal distribution at x."""
    return like(x, 0.5) * (like(x, 1.0) + tirx.erf(x * like(x, math.sqrt(0.5))))


def divide(x: Expr, y: Expr) -> Expr:
    """Write x/y; of integers the quotient rounded towards 0."""
    return x / y if dtype_of(x).startswith("float") else tirx.truncdiv(x, y)


def cast(x: Expr, dtype: str) -> Expr:
    """Write x as `dtype`; as a bool, whether it is not 0."""
    if dtype_of(x) == dtype:
        return x
    return x != like(x, 0) if dtype == "bool" else tirx.Cast(dtype, x)


def hard_sigmoid(x: Expr, alpha: float, beta: float) -> Expr:
    """Write alpha*x + beta clamped to [0, 1]."""
    return clamp(like(x, alpha) * x + like(x, beta), 0.0, 1.0)


def select_negative(x: Expr, below: Expr, above: Expr) -> Expr:
    """Write `below` where x < 0, else (and of NaN) `above`."""
    return tirx.Select(x < like(x, 0.0), below, above)


def elu(x: Expr, alpha: float) -> Expr:
    """Write alpha*(e**x - 1) where x < 0, else x."""
    return select_negative(x, like(x, alpha) * (exp(x) - like(x, 1.0)), x)


def larger(x: Expr, y: Expr) -> Expr:
    """Write the larger one, NaN if either is. (TVM takes `x != x` for false.)"""
    return tirx.Select(tirx.Or(x > y, is_nan(x)), x, y)


def smaller(x: Expr, y: Expr) -> Expr:
    """Write the smaller one, NaN if either is."""
    return tirx.Select(tirx.Or(x < y, is_nan(x)), x, y)


def is_nan(x: Expr) -> Expr:
    """Write whether x is NaN; an integer never is."""
    return tirx.isnan(x) if dtype_of(x).startswith("float") else tirx.const(False, "bool")


def libm(name: str, *operands: Expr) -> Expr:
    """Write a call of a function of the C library, in the dtype of the operands."""
    dtype = dtype_of(operands[0])
    return tirx.call_pure_extern(dtype, name + ("f" if dtype == "float32" else ""), *operands)


def modulo(attributes: Attributes, x: Expr, y: Expr) -> Expr:
    """Write the remainder of x/y: of the sign of y, or, where `fmod` is set, of that of x. x mod 0 is NaN, or 0."""
    if dtype_of(x).startswith("float"):
        rest = libm("fmod", x, y)
        if attributes.get("fmod", 0):
            return rest
        other_sign = tirx.Or(tirx.And(rest < like(x, 0), y > like(y, 0)), tirx.And(rest > like(x, 0), y < like(y, 0)))
        return tirx.Select(other_sign, rest + y, rest)
    by = tirx.Select(y == like(y, 0), like(y, 1), y)
    return tirx.truncmod(x, by) if attributes.get("fmod", 0) else tirx.floormod(x, by)


def is_infinite(attributes: Attributes, x: Expr) -> Expr:
    """Write whether x is infinite, of the signs that `detect_positive` and `detect_negative` name: both by default."""
    found: Expr = tirx.const(False, "bool")
    for name, infinity in (("detect_positive", math.inf), ("detect_negative", -math.inf)):
        if attributes.get(name, 1) and dtype_of(x).startswith("float"):
            found = tirx.Or(found, x == like(x, infinity))
    return found


def shrink(attributes: Attributes, x: Expr) -> Expr:
    """Write 0 where |x| <= lambd, else x nearer to 0 by `bias`."""
    bias, limit = like(x, attributes.get("bias", 0.0)), like(x, attributes.get("lambd", 0.5))
    within = tirx.And(x >= like(x, 0) - limit, x <= limit)
    return tirx.Select(within, like(x, 0), tirx.Select(x > limit, x - bias, x + bias))


def thresholded(attributes: Attributes, x: Expr) -> Expr:
    """Write x where it is greater than alpha, else 0."""
    return tirx.Select(x <= like(x, attributes.get("alpha", 1.0)), like(x, 0), x)


def clip(attributes: Attributes, x: Expr, *bounds: Expr) -> Expr:
    """Write x between bounds, given as attributes or as operands: min, then max."""
    for name, bound, limit in zip(("min", "max"), (steps.maximum, steps.minimum), (0, 1), strict=True):
        if attributes.get(name) is not None:
            x = bound(x, like(x, attributes[name]))
        elif limit < len(bounds):
            x = bound(x, bounds[limit])
    return x


def gelu(attributes: Attributes, x: Expr) -> Expr:
    """Write x times the normal distribution function of x, or, where `approximate` is tanh, what is nearly that."""
    if attributes.get("approximate", "none") != "tanh":
        return x * normal_distribution(x)
    inner = like(x, math.sqrt(2 / math.pi)) * (x + like(x, 0.044715) * x * x * x)
    return like(x, 0.5) * x * (like(x, 1.0) + tirx.tanh(inner))


def fold(join: Callable[[Expr, Expr], Expr]) -> Callable[..., Expr]:
    """Give a formula that joins its operands from left to right."""
    return lambda attributes, *values: functools.reduce(join, values)


def mean(attributes: Attributes, *values: Expr) -> Expr:
    """Write the mean of the operands."""
    return functools.reduce(lambda x, y: x + y, values) / like(values[0], float(len(values)))


def _of_libm(name: str) -> Callable[[Attributes, Expr], Expr]:
    return lambda attributes, x: libm(name, x)


SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875  # as ONNX defines them

UNARY: dict[str, Callable[[Attributes, Expr], Expr]] = {
    "Identity": lambda a, x: x,
    "Cast": lambda a, x: cast(x, a["dtype"]),
    "Relu": lambda a, x: steps.maximum(x, like(x, 0)),
    "LeakyRelu": lambda a, x: select_negative(x, like(x, a.get("alpha", 0.01)) * x, x),
    "Elu": lambda a, x: elu(x, a.get("alpha", 1.0)),
    "Selu": lambda a, x: like(x, a.get("gamma", SELU_GAMMA)) * elu(x, a.get("alpha", SELU_ALPHA)),
    "Celu": lambda a, x: select_negative(
        x, like(x, a.get("alpha", 1.0)) * (exp(x / like(x, a.get("alpha", 1.0))) - like(x, 1.0)), x
    ),
    "Sigmoid": lambda a, x: sigmoid(x),
    "HardSigmoid": lambda a, x: hard_sigmoid(x, a.get("alpha", 0.2), a.get("beta", 0.5)),
    "HardSwish": lambda a, x: x * hard_sigmoid(x, 1 / 6, 0.5),
    "Gelu": gelu,
    "Softplus": lambda a, x: softplus(x),
    "Mish": lambda a, x: x * tirx.tanh(softplus(x)),
    "Softsign": lambda a, x: x / (like(x, 1.0) + tirx.abs(x)),
    "Tanh": lambda a, x: tirx.tanh(x),
    "Exp": lambda a, x: tirx.exp(x),
    "Log": lambda a, x: tirx.log(x),
    "Sqrt": lambda a, x: tirx.sqrt(x),
    "Erf": lambda a, x: tirx.erf(x),
    "Sin": lambda a, x: tirx.sin(x),
    "Cos": lambda a, x: tirx.cos(x),
    "Floor": lambda a, x: tirx.floor(x),
    "Ceil": lambda a, x: tirx.ceil(x),
    "Reciprocal": lambda a, x: like(x, 1.0) / x,
    "Neg": lambda a, x: like(x, 0) - x,
    "Abs": lambda a, x: tirx.abs(x),
    "Sign": lambda a, x: tirx.Select(
        x > like(x, 0), like(x, 1), tirx.Select(x < like(x, 0), like(x, -1), x)
    ),  # NaN stays
    "Not": lambda a, x: tirx.Not(x),
    "Round": lambda a, x: tirx.nearbyint(x),  # to even
    "IsNaN": lambda a, x: is_nan(x),
    "IsInf": is_infinite,
    "Shrink": shrink,
    "ThresholdedRelu": thresholded,
    "Swish": lambda a, x: x * sigmoid(like(x, a.get("alpha", 1.0)) * x),
    "BitwiseNot": lambda a, x: tirx.bitwise_not(x),
    **{name: _of_libm(name.lower()) for name in ("Tan", "Sinh", "Cosh", "Asin", "Acos", "Atan")},
    **{name: _of_libm(name.lower()) for name in ("Asinh", "Acosh", "Atanh")},
}

NARY: dict[str, Callable[..., Expr]] = {
    "Add": lambda a, x, y: x + y,
    "Sub": lambda a, x, y: x - y,
    "Mul": lambda a, x, y: x * y,
    "Div": lambda a, x, y: divide(x, y),
    "Pow": lambda a, x, y: tirx.pow(x, cast(y, dtype_of(x))),
    "PRelu": lambda a, x, slope: select_negative(x, slope * x, x),
    "Greater": lambda a, x, y: x > y,
    "GreaterOrEqual": lambda a, x, y: x >= y,
    "Less": lambda a, x, y: x < y,
    "LessOrEqual": lambda a, x, y: x <= y,
    "Equal": lambda a, x, y: x == y,
    "And": lambda a, x, y: tirx.And(x, y),
    "Or": lambda a, x, y: tirx.Or(x, y),
    "Xor": lambda a, x, y: tirx.Or(tirx.And(x, tirx.Not(y)), tirx.And(tirx.Not(x), y)),
    "BitwiseAnd": lambda a, x, y: tirx.bitwise_and(x, y),
    "BitwiseOr": lambda a, x, y: tirx.bitwise_or(x, y),
    "BitwiseXor": lambda a, x, y: tirx.bitwise_xor(x, y),
    "Mod": modulo,
    "Where": lambda a, condition, x, y: tirx.Select(condition, x, y),
    "Sum": fold(lambda x, y: x + y),
    "Max": fold(larger),
    "Min": fold(smaller),
    "Mean": mean,
    "Clip": clip,
    "CastLike": lambda a, x, y: cast(x, a["dtype"]),
}

RENAMED = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")  # the same elements in the same order


def copy_elements(problem: GenericProblem, args: Buffers) -> None:
    """Copy in0 to out0 in the order in which the elements lie."""
    view = dense_view(problem.out_shape)
    nest(problem.out_shape, [view, view], lambda out, place: store(args, "out0", out, args["in0"][place]))


OPS: dict[str, Emit] = {
    **{name: elementwise(formula) for name, formula in {**UNARY, **NARY}.items()},
    "Expand": elementwise(lambda a, x: x),
    **dict.fromkeys(RENAMED, copy_elements),
}
