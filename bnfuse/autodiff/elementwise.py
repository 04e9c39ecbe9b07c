"""Sums, products, powers and functions of one operand, each element by itself; operands broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import Contributions, rule

Slope = Callable[[Gradient], ir.Value]  # the derivative at the operand, as a value


@rule("Identity")
def identity(g: Gradient) -> Contributions:
    """Pass the gradient on."""
    return [g.dy]


@rule("Cast", "CastLike")
def cast(g: Gradient) -> Contributions:
    """Pass it on in the operand's type; from and to integers nothing passes."""
    return [g.op("Cast", g.dy, to=int(g.dtype(g.x)))]


@rule("Add")
def add(g: Gradient) -> Contributions:
    """Pass the gradient on to both."""
    return g.fit(g.dy, g.operand(0)), g.fit(g.dy, g.operand(1))


@rule("Sub")
def sub(g: Gradient) -> Contributions:
    """Pass it on to the first, and negated to the second."""
    return g.fit(g.dy, g.operand(0)), g.neg(g.fit(g.dy, g.operand(1)))


@rule("Mul")
def mul(g: Gradient) -> Contributions:
    """Weigh the gradient with the other operand; a square is one product."""
    a, b = g.operand(0), g.operand(1)
    if a is b:
        return [g.mul(g.mul(g.dy, g.number(2.0, a)), a)]
    return g.fit(g.mul(g.dy, b), a), g.fit(g.mul(g.dy, a), b)


@rule("Div")
def div(g: Gradient) -> Contributions:
    """Da = dy/b, db = -da*y."""
    a, b = g.operand(0), g.operand(1)
    share = g.div(g.dy, b)
    return g.fit(share, a), g.neg(g.fit(g.mul(share, g.y), b))


@rule("Pow")
def power(g: Gradient) -> Contributions:
    """Da = dy*b*a^(b-1), with the simple forms of constant exponents; db = dy*y*log(a).

    As in torch da is 0 where b is, and db where a is 0 and b not negative.
    """
    a, b = g.operand(0), g.operand(1)
    exponent = g.known(b)
    if exponent is not None and exponent.size == 1:
        return [g.fit(_by_constant_power(g, a, exponent.item()), a)]
    zero = g.number(0.0, a)
    as_a = b if g.dtype(b) == g.dtype(a) else g.op("Cast", b, to=int(g.dtype(a)))
    slope = g.mul(g.op("Pow", a, g.sub(as_a, g.number(1.0, a))), as_a)
    da = g.mul(g.dy, g.where(g.op("Equal", as_a, zero), zero, slope))
    flat = g.op("And", g.op("Equal", a, zero), g.op("GreaterOrEqual", as_a, zero))
    db = g.mul(g.dy, g.where(flat, zero, g.mul(g.y, g.op("Log", a))))
    return g.fit(da, a), g.fit(db, b)


def _by_constant_power(g: Gradient, a: ir.Value, exponent: float) -> ir.Value:
    if exponent == 0.0:
        return g.mul(g.dy, g.number(0.0, a))
    if exponent == 1.0:
        return g.dy
    if exponent == 0.5:
        return g.div(g.mul(g.dy, g.number(0.5, a)), g.y)
    powers = {2.0: lambda: a, 3.0: lambda: g.mul(a, a)}
    lower = powers.get(exponent, lambda: g.op("Pow", a, g.number(exponent - 1.0, a)))()
    return g.mul(g.mul(g.dy, g.number(exponent, a)), lower)


@rule("Mod")
def mod(g: Gradient) -> Contributions:
    """As y = a - b*n with a whole number n: da = dy, db = -dy*n."""
    a, b = g.operand(0), g.operand(1)
    whole = g.div(g.sub(a, g.y), b)
    return g.fit(g.dy, a), g.neg(g.fit(g.mul(g.dy, g.op("Round", whole)), b))


@rule("Sum")
def total(g: Gradient) -> Contributions:
    """Pass the gradient on to all."""
    return [g.fit(g.dy, value) for value in g.operands]


@rule("Mean")
def mean(g: Gradient) -> Contributions:
    """Pass equal shares on to all."""
    share = g.div(g.dy, g.number(len(g.operands), g.dy))
    return [g.fit(share, value) for value in g.operands]


@rule("Max", "Min")
def extreme(g: Gradient) -> Contributions:
    """Pass the gradient on to the extreme operand; equal ones share it evenly, as in torch."""
    if len(g.operands) == 1:
        return [g.dy]
    hits = [g.op("Cast", g.op("Equal", value, g.y), to=int(g.dtype(g.y))) for value in g.operands]
    share = g.div(g.dy, g.op("Sum", *hits))
    return [g.fit(g.mul(share, hit), value) for hit, value in zip(hits, g.operands, strict=True)]


@rule("Where")
def where(g: Gradient) -> Contributions:
    """Pass the gradient on to what was chosen."""
    condition, a, b = (g.operand(place) for place in range(3))
    zero = g.number(0.0, g.dy)
    return None, g.fit(g.where(condition, g.dy, zero), a), g.fit(g.where(condition, zero, g.dy), b)


@rule("PRelu")
def prelu(g: Gradient) -> Contributions:
    """Scale by the slope below 0; the slope collects x*dy from there. At 0 as torch: the slope's side."""
    x, slope = g.x, g.operand(1)
    above = g.op("Greater", x, g.number(0.0, x))
    dslope = g.where(above, g.number(0.0, x), g.mul(g.dy, x))
    return g.where(above, g.dy, g.mul(g.dy, slope)), g.fit(dslope, slope, g.shape(x))


@rule("Neg")
def negative(g: Gradient) -> Contributions:
    """Negate."""
    return [g.neg(g.dy)]


@rule("Sqrt")
def square_root(g: Gradient) -> Contributions:
    """dy/(2*y)."""
    return [g.div(g.mul(g.dy, g.number(0.5, g.y)), g.y)]


@rule("Reciprocal")
def reciprocal(g: Gradient) -> Contributions:
    """-dy*y^2."""
    return [g.neg(g.mul(g.mul(g.dy, g.y), g.y))]


def _square(g: Gradient, value: ir.Value) -> ir.Value:
    return g.mul(value, value)


def _one_minus(g: Gradient, value: ir.Value) -> ir.Value:
    return g.sub(g.number(1.0, value), value)


def _one_plus(g: Gradient, value: ir.Value) -> ir.Value:
    return g.add(g.number(1.0, value), value)


def _gauss(g: Gradient) -> ir.Value:
    return g.mul(g.op("Exp", g.neg(_square(g, g.x))), g.number(2.0 / math.sqrt(math.pi), g.x))


SLOPES: dict[str, Slope] = {
    "Exp": lambda g: g.y,
    "Abs": lambda g: g.op("Sign", g.x),
    "Erf": _gauss,
    "Sin": lambda g: g.op("Cos", g.x),
    "Cos": lambda g: g.neg(g.op("Sin", g.x)),
    "Tan": lambda g: _one_plus(g, _square(g, g.y)),
    "Sinh": lambda g: g.op("Cosh", g.x),
    "Cosh": lambda g: g.op("Sinh", g.x),
}
STEEPS: dict[str, Slope] = {  # one over the derivative
    "Log": lambda g: g.x,
    "Atan": lambda g: _one_plus(g, _square(g, g.x)),
    "Asin": lambda g: g.op("Sqrt", _one_minus(g, _square(g, g.x))),
    "Acos": lambda g: g.neg(g.op("Sqrt", _one_minus(g, _square(g, g.x)))),
    "Asinh": lambda g: g.op("Sqrt", _one_plus(g, _square(g, g.x))),
    "Acosh": lambda g: g.op("Sqrt", g.sub(_square(g, g.x), g.number(1.0, g.x))),
    "Atanh": lambda g: _one_minus(g, _square(g, g.x)),
}


def _sloped(slope: Slope, operator: str) -> Callable[[Gradient], Contributions]:
    return lambda g: [g.op(operator, g.dy, slope(g))]


for _name, _slope in SLOPES.items():
    rule(_name)(_sloped(_slope, "Mul"))
for _name, _slope in STEEPS.items():
    rule(_name)(_sloped(_slope, "Div"))


@rule("Dropout")
def dropout(g: Gradient) -> Contributions:
    """Pass on what was kept, scaled as it was: by 1/(1 - ratio), of the ratio that the node reads."""
    training = g.optional(2)
    known = g.known(training)
    if training is None or (known is not None and not known):
        return [g.dy]
    if known is None:
        raise g.error("computes whether it drops: training_mode must be constant.")
    ratio = g.given(1, np.array(0.5, g.dtype(g.x).numpy()), "ratio")
    keep = g.sub(g.number(1.0, ratio), ratio)
    if g.dtype(ratio) != g.dtype(g.x):
        keep = g.op("Cast", keep, to=int(g.dtype(g.x)))
    mask = g.result(1, g.shape(g.x), ir.DataType.BOOL, "mask")
    return [g.where(mask, g.div(g.dy, keep), g.number(0.0, g.dy))]
