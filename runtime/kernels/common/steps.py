"""The elementwise steps of `ai.bnfuse` operators (bnfuse/opset/spec.py) as TIR expressions.

Pure functions of scalar float32 expressions. Inside a `T.vectorized` loop TVM widens them, so nothing here may branch:
choices are `Select`, and exponentials and their like are polynomials, because LLVM would call `expf` once per lane.

Forward and backward recompute the value before an activation and must agree about its sign. So every kernel takes it
from `normalize`, whose fused multiply-add leaves the compiler nothing to contract one way here and another way there.

An expression is a tree: what occurs twice is there twice, and so is all within it. TVM takes time by the size of trees,
so functions here read their operand few times, and formulas that are long read a variable for what they are of.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.activations import ACTIVATIONS, GRADIENTS
from bnfuse.opset.expressions import Algebra, Expression, interpret, parts_of

Expr = Any  # a tvm PrimExpr
Load = Callable[[str, bool], Expr]  # (operand, whether it has one value per channel) -> its value here


def f32(value: float) -> Expr:
    """Write a float32 constant."""
    return tirx.const(value, "float32")


Fused = Callable[[Expr, Expr, Expr], Expr]
Wide = Callable[[float], Expr]
Bind = Callable[[Expr], Expr]


def llvm_fma(x: Expr, y: Expr, z: Expr) -> Expr:
    """Write x*y + z, rounded once, by LLVM's intrinsic for float32."""
    return tirx.call_llvm_pure_intrin("float32", "llvm.fma", x, y, z)


def llvm_wide(value: float) -> Expr:
    """Write a float64 constant as LLVM takes it."""
    return tirx.const(value, "float64")


@dataclasses.dataclass(frozen=True)
class Written:
    """How a code generator writes `fma`, float64 constants, what is read often, and operations of activations that it
    has its own functions for."""

    fma: Fused = llvm_fma
    wide: Wide = llvm_wide
    bind: Bind = T.bind
    operations: Algebra = dataclasses.field(default_factory=dict)


_written: contextvars.ContextVar[Written] = contextvars.ContextVar("written", default=Written())  # noqa: B039 (frozen)


@contextlib.contextmanager
def written_as(written: Written) -> Iterator[None]:
    """Have formulas within the block written as another code generator has them."""
    token = _written.set(written)
    try:
        yield
    finally:
        _written.reset(token)


def fma(x: Expr, y: Expr, z: Expr) -> Expr:
    """Write x*y + z, float32, rounded once."""
    return _written.get().fma(x, y, z)


def wide(value: float) -> Expr:
    """Write a float64 constant."""
    return _written.get().wide(value)


def f64(value: Any) -> Expr:
    """Write a number, or the value of an expression, as float64."""
    return wide(float(value)) if isinstance(value, int | float) else tirx.Cast("float64", value)


def to_f32(value: Expr) -> Expr:
    """Write a value rounded to float32."""
    return tirx.Cast("float32", value)


def normalize(x: Expr, a: Expr, b: Expr) -> Expr:
    """Write Normalize: a*x + b."""
    return fma(a, x, b)


def batch_norm_grad(dy: Expr, p: Expr, u: Expr, q: Expr, w: Expr) -> Expr:
    """Write BatchNormGrad: p*dy + q*u + w, the gradient at the input u of a BN."""
    return fma(p, dy, fma(q, u, w))


def exp(x: Expr) -> Expr:
    """Write e**x for x clamped to [-87, 88], where neither it nor its reciprocal leaves the normal floats; error ~1e-7.

    x = n*ln 2 + r with |r| <= ln(2)/2, a Taylor polynomial of degree 7 in r, and n added to the exponent bits.
    """
    return _exp(maximum(minimum(x, f32(88.0)), f32(-87.0)))


def exp_of_small(x: Expr) -> Expr:
    """Write e**x for an x that is at most 88, in half as long an expression."""
    return _exp(maximum(x, f32(-87.0)))


def often(value: Expr) -> Expr:
    """Write what is read many times: a variable, bound where the builder of TIR stands."""
    return _written.get().bind(value)


def _exp(x: Expr) -> Expr:
    r, power = _reduced(x)
    return polynomial(r, [1 / math.factorial(k) for k in range(8)]) * power


def expm1_of_negative(x: Expr) -> Expr:
    """Write e**x - 1 for an x that is not above 0, right to ~1e-7 of itself also where x is small.

    Of e**x = 2**n * (1 + r*q), it is 2**n*r*q + (2**n - 1).
    """
    r, power = _reduced(maximum(x, f32(-87.0)))
    return fma(r * polynomial(r, [1 / math.factorial(k) for k in range(1, 8)]), power, power - f32(1.0))


def _reduced(x: Expr) -> tuple[Expr, Expr]:
    """Write r and 2**n of x = n*ln 2 + r."""
    x = often(x)
    n = often(tirx.floor(fma(x, f32(1 / math.log(2)), f32(0.5))))
    r = fma(n, f32(-0.693359375), x)  # the high bits of ln 2: the product is exact
    r = often(fma(n, f32(0.693359375 - math.log(2)), r))
    return r, tirx.reinterpret("float32", (tirx.Cast("int32", n) + 127) << 23)


def polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Write the sum of coefficients[k]*x**k."""
    *others, last = coefficients
    value = f32(last)
    for coefficient in reversed(others):
        value = fma(value, x, f32(coefficient))
    return value


# Polynomials of least maximal error, found by iterated least squares, to less than half a unit in the last place of the
# function. Up to TANH_SPLIT tanh(x) = x + x*s*p(s), s = x*x; up to ERF_SPLIT erf(x) = x + x*p(s), from there on
# log(1 - erf(x)) = -x + x*p(x); log(1 + u) = u + u*u*p(u) for u from 0 to 1.
TANH_SPLIT, ERF_SPLIT = 0.6, 0.9277
TANH = (-0.3333329800029643, 0.13331924069391343, -0.05378382477561156, 0.020795951169182255, -0.005895132090537879)
ERF_SMALL = (
    *(0.12837914823447483, -0.3761248474778301, 0.11281721028590659),
    *(-0.02676312133752108, 0.004987999770011806, -0.0005964230974077399),
)
ERF_LARGE = (
    *(-0.12865289475800368, -0.6351334515868535, -0.10626638819836094, 0.02378745376448193),
    *(-0.0036544517321969875, 0.00032575055323324034, -1.152544562542079e-05),
)
LOG_1P = (
    *(-0.49999647953105153, 0.3332132232769085, -0.24857160936172507, 0.1915364282812601),
    *(-0.13753773771483854, 0.07920416698874196, -0.030065546911970845, 0.005364758418824641),
)


def with_sign(size: Expr, x: Expr) -> Expr:
    """Write a value that is not negative with the sign of x, by their bits."""
    sign = tirx.reinterpret("uint32", x) & tirx.const(1 << 31, "uint32")
    return tirx.reinterpret("float32", tirx.reinterpret("uint32", size) | sign)


def tanh(x: Expr) -> Expr:
    """Write the hyperbolic tangent: of |x| it is 2/(e**-2|x| + 1) - 1 where it is not small."""
    square, size = x * x, tirx.abs(x)
    small = fma(polynomial(square, TANH) * square, x, x)
    large = f32(2.0) / (exp_of_small(f32(-2.0) * size) + f32(1.0)) - f32(1.0)
    return tirx.Select(size > f32(TANH_SPLIT), with_sign(large, x), small)


def erf(x: Expr, exp: Bind = exp_of_small) -> Expr:
    """Write the error function, by an exponential."""
    x = often(x)
    size = tirx.abs(x)
    small = fma(polynomial(x * x, ERF_SMALL), x, x)
    large = f32(1.0) - exp(fma(polynomial(size, ERF_LARGE), size, f32(0.0) - size))
    return tirx.Select(size > f32(ERF_SPLIT), with_sign(large, x), small)


def softplus(x: Expr, exp: Bind = exp_of_small) -> Expr:
    """Write log(1 + e**x) = max(x, 0) + log(1 + u), u = e**-|x|."""
    u = exp(f32(0.0) - tirx.abs(x))
    return maximum(x, f32(0.0)) + fma(polynomial(u, LOG_1P) * u, u, u)


def elu(x: Expr) -> Expr:
    """Write x where x > 0, else e**x - 1."""
    return tirx.Select(x > f32(0.0), x, expm1_of_negative(x))


def sigmoid(x: Expr) -> Expr:
    """Write 1/(1 + e**-x), float32."""
    return f32(1.0) / (f32(1.0) + exp(f32(0.0) - x))


def maximum(x: Expr, bound: Expr) -> Expr:
    """Write max(x, bound), NaN where x is NaN: a run that has diverged must show it."""
    return tirx.Select(x < bound, bound, x)


def minimum(x: Expr, bound: Expr) -> Expr:
    """Write min(x, bound), NaN where x is NaN."""
    return tirx.Select(x > bound, bound, x)


def absolute(x: Expr) -> Expr:
    """Write |x|, NaN of NaN."""
    return maximum(x, f32(0.0) - x)


def sign(x: Expr) -> Expr:
    """Write -1, 0 or 1, and NaN of NaN."""
    one = tirx.Select(x > f32(0.0), f32(1.0), f32(-1.0))
    return tirx.Select(x == f32(0.0), f32(0.0), tirx.Select(x == x, one, x))


def apply_activation(kind: str, z: Expr, attributes: Mapping[str, Any]) -> Expr:
    """Write an activation of z."""
    return formula(ACTIVATIONS[kind].value, attributes, z=z)


def activation_grad(kind: str, d: Expr, z: Expr, attributes: Mapping[str, Any]) -> Expr:
    """Write what a step such as ReluGrad makes of d: the gradient at z, from that at the activation's result."""
    return formula(GRADIENTS[kind].gradient, attributes, z=z, d=d)


def chosen(channel: Expr, made: Expr, kept: Expr) -> Expr:
    """Write what is made where the channel's value is positive, else what is kept: the step Where."""
    return tirx.Select(channel > f32(0.0), made, kept)


LONG = ("exp", "sigmoid", "tanh", "erf", "softplus", "elu")  # operations that read their operand many times


def formula(expression: Expression, attributes: Mapping[str, Any], **variables: Expr) -> Expr:
    """Write a formula; attributes and constants are float32.

    In a long one what is read more than once becomes a variable. Short ones are written as they are.
    """
    parts = parts_of(expression)
    uses = collections.Counter(operand for part in parts for operand in part.operands)
    long = is_long(parts)

    def leaf(part: Expression) -> Expr:
        if part.operation == "variable":
            return T.bind(variables[part.name]) if long else variables[part.name]
        return f32(part.constant if part.operation == "constant" else attributes[part.name])

    def make(part: Expression, value: Expr) -> Expr:
        return T.bind(value) if long and part.operation in LONG and uses[part] > 1 else value

    return interpret(expression, {**TIR, **_written.get().operations}, leaf, make)


def is_long(parts: Iterable[Expression]) -> bool:
    """Tell whether a formula of these parts has operations in it that read their operand many times."""
    return any(part.operation in LONG for part in parts)


TIR: Algebra = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "fma": fma,
    "absolute": absolute,
    "sign": sign,
    "relu": lambda x: maximum(x, f32(0.0)),
    "clamp": lambda x, low, high: minimum(maximum(x, low), high),
    "minimum": minimum,
    "exp": exp_of_small,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "erf": erf,
    "softplus": softplus,
    "elu": elu,
    "greater": lambda x, y: x > y,
    "at_least": lambda x, y: x >= y,
    "at_most": lambda x, y: x <= y,
    "both": tirx.And,
    "where": tirx.Select,
}
