"""Sums, products, powers and functions of one operand, each element by itself; operands broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from bnfuse.autodiff.emitter import Gradient
from bnfuse.autodiff.rules import rule

Contributions = Sequence[ir.Value | None]
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
    """Weigh the gradient with the other operand."""
    a, b = g.operand(0), g.operand(1)
    return g.fit(g.mul(g.dy, b), a), g.fit(g.mul(g.dy, a), b)


@rule("Div")
def div(g: Gradient) -> Contributions:
    """Da = dy/b, db = -da*y."""
    a, b = g.operand(0), g.operand(1)
    share = g.div(g.dy, b)
    return g.fit(share, a), g.neg(g.fit(g.mul(share, g.y), b))


@rule("Pow")
def power(g: Gradient) -> Contributions:
    """Da = dy*b*a^(b-1), with the simple forms of constant exponents; db = dy*y*log(a), 0 where a is not positive."""
    a, b = g.operand(0), g.operand(1)
    exponent = g.known(b)
    one = exponent.item() if exponent is not None and exponent.size == 1 else None
    if one == 2.0:
        slope = g.mul(a, g.number(2.0, a))
    elif one == 0.5:
        slope = g.div(g.number(0.5, a), g.y)
    elif one is not None:
        slope = g.mul(g.op("Pow", a, g.number(one - 1.0, a)), g.number(one, a))
    else:
        b = b if g.dtype(b) == g.dtype(a) else g.op("Cast", b, to=int(g.dtype(a)))
        slope = g.mul(g.op("Pow", a, g.sub(b, g.number(1.0, a))), b)
    da = g.fit(g.mul(g.dy, slope), a)
    if not g.wants(1):
        return [da]
    positive = g.op("Greater", a, g.number(0.0, a))
    log = g.op("Log", g.where(positive, a, g.number(1.0, a)))
    return da, g.fit(g.mul(g.dy, g.mul(g.y, log)), g.operand(1))


@rule("Mod")
def mod(g: Gradient) -> Contributions:
    """Y = a - b*trunc(a/b) (fmod=1), or with floor."""
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
    share = g.mul(g.dy, g.number(1.0 / len(g.operands), g.dy))
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


@rule("Log")
def logarithm(g: Gradient) -> Contributions:
    """dy/x."""
    return [g.div(g.dy, g.x)]


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
    "Atan": lambda g: g.op("Reciprocal", _one_plus(g, _square(g, g.x))),
    "Asin": lambda g: g.op("Reciprocal", g.op("Sqrt", _one_minus(g, _square(g, g.x)))),
    "Acos": lambda g: g.neg(g.op("Reciprocal", g.op("Sqrt", _one_minus(g, _square(g, g.x))))),
    "Asinh": lambda g: g.op("Reciprocal", g.op("Sqrt", _one_plus(g, _square(g, g.x)))),
    "Acosh": lambda g: g.op("Reciprocal", g.op("Sqrt", g.sub(_square(g, g.x), g.number(1.0, g.x)))),
    "Atanh": lambda g: g.op("Reciprocal", _one_minus(g, _square(g, g.x))),
}


def _sloped(slope: Slope) -> Callable[[Gradient], Contributions]:
    return lambda g: [g.mul(g.dy, slope(g))]


for _name, _slope in SLOPES.items():
    rule(_name)(_sloped(_slope))


@rule("Dropout")
def dropout(g: Gradient) -> Contributions:
    """Pass on what was kept, scaled as it was: by 1/(1 - ratio), of the ratio that the node reads."""
    training = g.optional(2)
    known = g.known(training)
    if training is None or (known is not None and not known):
        return [g.dy]
    if known is None:
        raise g.error("computes whether it drops: training_mode must be constant.")
    ratio = g.optional(1)
    keep = g.number(0.5, g.dy) if ratio is None else g.sub(g.number(1.0, g.dy), ratio)
    mask = g.result(1, g.shape(g.x), ir.DataType.BOOL, "mask")
    return [g.where(mask, g.div(g.dy, keep), g.number(0.0, g.dy))]
