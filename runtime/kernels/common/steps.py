"""The elementwise steps of `ai.bnfuse` operators (bnfuse/opset/spec.py) as TIR expressions.

Pure functions of scalar float32 expressions. Inside a `T.vectorized` loop TVM widens them, so nothing here may branch:
choices are `Select`, and the exponential is a polynomial, because LLVM would call `expf` once per lane.

Forward and backward recompute the value before an activation and must agree about its sign. So every kernel takes it
from `normalize`, whose fused multiply-add leaves the compiler nothing to contract one way here and another way there.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping
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
    x = maximum(minimum(x, f32(88.0)), f32(-87.0))
    n = tirx.floor(fma(x, f32(1 / math.log(2)), f32(0.5)))
    r = fma(n, f32(-0.693359375), x)  # the high bits of ln 2: the product is exact
    r = fma(n, f32(0.693359375 - math.log(2)), r)
    value = f32(1 / math.factorial(7))
    for k in range(6, -1, -1):
        value = fma(value, r, f32(1 / math.factorial(k)))
    power = tirx.reinterpret("float32", (tirx.Cast("int32", n) + 127) << 23)
    return value * power


def sigmoid(x: Expr) -> Expr:
    """Write 1/(1 + e**-x), float32."""
    return f32(1.0) / (f32(1.0) + exp(f32(0.0) - x))


def maximum(x: Expr, bound: Expr) -> Expr:
    """Write max(x, bound), NaN where x is NaN: a run that has diverged must show it."""
    return tirx.Select(x < bound, bound, x)


def minimum(x: Expr, bound: Expr) -> Expr:
    """Write min(x, bound), NaN where x is NaN."""
    return tirx.Select(x > bound, bound, x)


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
    "absolute": lambda x: maximum(x, f32(0.0) - x),
    "sign": sign,
    "relu": lambda x: maximum(x, f32(0.0)),
    "clamp": lambda x, low, high: minimum(maximum(x, low), high),
    "sigmoid": sigmoid,
    "greater": lambda x, y: x > y,
    "at_least": lambda x, y: x >= y,
    "at_most": lambda x, y: x <= y,
    "both": tirx.And,
    "where": tirx.Select,
}
