"""The elementwise steps of `ai.bnfuse` operators (bnfuse/opset/spec.py) as TIR expressions.

Pure functions of scalar float32 expressions. Inside a `T.vectorized` loop TVM widens them, so nothing here may branch:
choices are `Select`, and exponentials and their like are polynomials, because LLVM would call `expf` once per lane.

Forward and backward recompute the value before an activation and must agree about its sign. So every kernel takes it
from `normalize`, whose fused multiply-add leaves the compiler nothing to contract one way here and another way there.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tvm import tirx

from bnfuse.opset.activations import ACTIVATIONS, GRADIENTS
from bnfuse.opset.expressions import Algebra, Expression, interpret

Expr = Any  # a tvm PrimExpr
Load = Callable[[str, bool], Expr]  # (operand, whether it has one value per channel) -> its value here


def f32(value: float) -> Expr:
    """Write a float32 constant."""
    return tirx.const(value, "float32")


Fused = Callable[[Expr, Expr, Expr], Expr]
Wide = Callable[[float], Expr]


def llvm_fma(x: Expr, y: Expr, z: Expr) -> Expr:
    """Write x*y + z, rounded once, by LLVM's intrinsic for float32."""
    return tirx.call_llvm_pure_intrin("float32", "llvm.fma", x, y, z)


def llvm_wide(value: float) -> Expr:
    """Write a float64 constant as LLVM takes it."""
    return tirx.const(value, "float64")


_written: contextvars.ContextVar[tuple[Fused, Wide]] = contextvars.ContextVar("written", default=(llvm_fma, llvm_wide))


@contextlib.contextmanager
def fused_by(function: Fused, wide: Wide = llvm_wide) -> Iterator[None]:
    """Have `fma` and float64 constants, within the block, written as another code generator has them."""
    token = _written.set((function, wide))
    try:
        yield
    finally:
        _written.reset(token)


def fma(x: Expr, y: Expr, z: Expr) -> Expr:
    """Write x*y + z, float32, rounded once."""
    return _written.get()[0](x, y, z)


def wide(value: float) -> Expr:
    """Write a float64 constant."""
    return _written.get()[1](value)


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
    r, power = _reduced(x)
    return polynomial(r, [1 / math.factorial(k) for k in range(8)]) * power


def expm1(x: Expr) -> Expr:
    """Write e**x - 1, right to ~1e-7 of itself also where x is small; x is clamped as by `exp`.

    Of e**x = 2**n * (1 + r*q), it is 2**n*r*q + (2**n - 1).
    """
    r, power = _reduced(x)
    return fma(r * polynomial(r, [1 / math.factorial(k) for k in range(1, 8)]), power, power - f32(1.0))


def _reduced(x: Expr) -> tuple[Expr, Expr]:
    """Write r and 2**n of x = n*ln 2 + r, for x clamped to [-87, 88]."""
    x = maximum(minimum(x, f32(88.0)), f32(-87.0))
    n = tirx.floor(fma(x, f32(1 / math.log(2)), f32(0.5)))
    r = fma(n, f32(-0.693359375), x)  # the high bits of ln 2: the product is exact
    r = fma(n, f32(0.693359375 - math.log(2)), r)
    return r, tirx.reinterpret("float32", (tirx.Cast("int32", n) + 127) << 23)


def polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Write the sum of coefficients[k]*x**k."""
    *others, last = coefficients
    value = f32(last)
    for coefficient in reversed(others):
        value = fma(value, x, f32(coefficient))
    return value


def tanh(x: Expr) -> Expr:
    """Write the hyperbolic tangent: of |x| it is -m/(m + 2) with m = e**-2|x| - 1."""
    m = expm1(f32(-2.0) * absolute(x))
    return tirx.Select(x < f32(0.0), m, f32(0.0) - m) / (m + f32(2.0))


# Polynomials of least maximal error, found by iterated least squares. Below ERF_SPLIT erf(x) = x + x*p(x*x) to 2e-8 of
# itself, above it log(1 - erf(x)) = -x + x*p(x), as far as erf is less than 1 in float32.
ERF_SPLIT, ERF_END = 0.9277, 4.0
ERF_SMALL = (
    *(0.12837914823447483, -0.3761248474778301, 0.11281721028590659),
    *(-0.02676312133752108, 0.004987999770011806, -0.0005964230974077399),
)
ERF_LARGE = (
    *(-0.12865289475800368, -0.6351334515868535, -0.10626638819836094, 0.02378745376448193),
    *(-0.0036544517321969875, 0.00032575055323324034, -1.152544562542079e-05),
)


def erf(x: Expr) -> Expr:
    """Write the error function, to about one unit in the last place."""
    size = minimum(absolute(x), f32(ERF_END))
    small = fma(polynomial(x * x, ERF_SMALL), x, x)
    large = f32(1.0) - exp(fma(polynomial(size, ERF_LARGE), size, f32(0.0) - size))
    large = tirx.Select(x < f32(0.0), f32(0.0) - large, large)
    return tirx.Select(size > f32(ERF_SPLIT), large, small)


# (log(1 + u)/(2*s) - 1)/s**2, s = u/(u + 2), of s**2 from 0 to 1/9
LOG_1P = (0.3333320813048285, 0.20010764424828875, 0.14000888074435985, 0.1400607137313499)


def softplus(x: Expr) -> Expr:
    """Write log(1 + e**x) = max(x, 0) + log(1 + u), u = e**-|x|."""
    u = exp(f32(0.0) - absolute(x))
    s = u / (u + f32(2.0))
    twice = s + s
    square = s * s
    return maximum(x, f32(0.0)) + fma(twice * square, polynomial(square, LOG_1P), twice)


def elu(x: Expr) -> Expr:
    """Write x where x > 0, else e**x - 1."""
    return tirx.Select(x > f32(0.0), x, expm1(x))


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


def formula(expression: Expression, attributes: Mapping[str, Any], **variables: Expr) -> Expr:
    """Write a formula; attributes and constants are float32."""

    def leaf(part: Expression) -> Expr:
        if part.operation == "variable":
            return variables[part.name]
        return f32(part.constant if part.operation == "constant" else attributes[part.name])

    return interpret(expression, TIR, leaf)


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
    "exp": exp,
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
