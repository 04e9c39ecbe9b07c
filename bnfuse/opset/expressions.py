"""Small formulas as data: written once, then a number, an array, nodes of ONNX, or code.

    s = sigmoid(attribute("alpha") * Z)
    interpret(Z * s, NUMPY, lambda leaf: {"z": z, "alpha": 1.702}[leaf.name])

An *algebra* says what each of OPERATIONS is for one kind of value; `interpret` puts a formula together in it. A part
that occurs twice in a formula is evaluated once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

OPERATIONS = (
    "add",
    "subtract",
    "multiply",
    "divide",
    "fma",  # x*y + z, rounded once where that costs nothing
    "absolute",
    "sign",
    "relu",  # max(x, 0), NaN of NaN
    "clamp",  # min(max(x, low), high), NaN of NaN
    "minimum",  # NaN of NaN
    "exp",  # of at most 88
    "sigmoid",
    "tanh",
    "erf",
    "softplus",  # log(1 + e**x)
    "elu",  # x where x > 0, else e**x - 1
    "greater",  # comparisons with NaN are false
    "at_least",
    "at_most",
    "both",
    "where",  # (condition, then, else)
)
Algebra = Mapping[str, Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Expression:
    """An operation on expressions; or a leaf: a variable or an attribute by `name`, or a constant."""

    operation: str
    operands: tuple[Expression, ...] = ()
    name: str = ""
    constant: float = 0.0

    def __add__(self, other: Operand) -> Expression:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Expression:
        return apply("add", other, self)

    def __sub__(self, other: Operand) -> Expression:
        return apply("subtract", self, other)

    def __rsub__(self, other: Operand) -> Expression:
        return apply("subtract", other, self)

    def __mul__(self, other: Operand) -> Expression:
        return apply("multiply", self, other)

    def __rmul__(self, other: Operand) -> Expression:
        return apply("multiply", other, self)

    def __truediv__(self, other: Operand) -> Expression:
        return apply("divide", self, other)

    def __rtruediv__(self, other: Operand) -> Expression:
        return apply("divide", other, self)

    def __and__(self, other: Operand) -> Expression:
        return apply("both", self, other)

    def __gt__(self, other: Operand) -> Expression:
        return apply("greater", self, other)

    def __ge__(self, other: Operand) -> Expression:
        return apply("at_least", self, other)

    def __le__(self, other: Operand) -> Expression:
        return apply("at_most", self, other)


Operand = Expression | float


def apply(operation: str, *operands: Operand) -> Expression:
    """Make an expression of an operation; numbers are constants."""
    if operation not in OPERATIONS:
        raise ValueError(f"no operation: {operation}")
    return Expression(operation, tuple(o if isinstance(o, Expression) else constant(o) for o in operands))


def variable(name: str) -> Expression:
    """Stand for what the formula is a function of."""
    return Expression("variable", name=name)


def attribute(name: str) -> Expression:
    """Stand for the attribute of an operator's node: a number that is known when code is made."""
    return Expression("attribute", name=name)


def constant(value: float) -> Expression:
    """Make a number a formula."""
    return Expression("constant", constant=float(value))


def sigmoid(x: Operand) -> Expression:
    """Write 1/(1 + e**-x)."""
    return apply("sigmoid", x)


def exp(x: Operand) -> Expression:
    """Write e**x, of an x that is at most 88: code generators need not look after larger ones."""
    return apply("exp", x)


def tanh(x: Operand) -> Expression:
    """Write the hyperbolic tangent."""
    return apply("tanh", x)


def erf(x: Operand) -> Expression:
    """Write the error function."""
    return apply("erf", x)


def softplus(x: Operand) -> Expression:
    """Write log(1 + e**x)."""
    return apply("softplus", x)


def elu(x: Operand) -> Expression:
    """Write x where x > 0, else e**x - 1."""
    return apply("elu", x)


def absolute(x: Operand) -> Expression:
    """Write |x|."""
    return apply("absolute", x)


def relu(x: Operand) -> Expression:
    """Write max(x, 0)."""
    return apply("relu", x)


def clamp(x: Operand, low: Operand, high: Operand) -> Expression:
    """Write min(max(x, low), high)."""
    return apply("clamp", x, low, high)


def minimum(x: Operand, y: Operand) -> Expression:
    """Write the smaller one."""
    return apply("minimum", x, y)


def where(condition: Expression, then: Operand, otherwise: Operand) -> Expression:
    """Write a choice by a comparison."""
    return apply("where", condition, then, otherwise)


def fma(x: Operand, y: Operand, z: Operand) -> Expression:
    """Write x*y + z, which code generators round once."""
    return apply("fma", x, y, z)


def interpret(
    expression: Expression,
    algebra: Algebra,
    leaf: Callable[[Expression], Any],
    made_of: Callable[[Expression, Any], Any] = lambda part, value: value,
) -> Any:
    """Put a formula together in an algebra; `leaf` gives the value of a variable, an attribute or a constant, `made_of`
    what stands for an operation with the value that the algebra gives it."""
    made: dict[Expression, Any] = {}

    def value(part: Expression) -> Any:
        if part not in made:
            if part.operands:
                made[part] = made_of(part, algebra[part.operation](*map(value, part.operands)))
            else:
                made[part] = leaf(part)
        return made[part]

    return value(expression)


def parts_of(expression: Expression) -> set[Expression]:
    """Find the expression and all that it is made of, each once."""
    found: set[Expression] = set()
    waiting = {expression}
    while waiting:
        found |= waiting
        waiting = {operand for part in waiting for operand in part.operands} - found
    return found


# Derivatives

ZERO, ONE = constant(0), constant(1)
COMPARISONS = ("greater", "at_least", "at_most", "both")


def derivative(expression: Expression, by: Expression) -> Expression:
    """Derive the formula of the slope. At the kink of a piecewise one it is that of the constant piece, or of 0."""
    if expression == by:
        return ONE
    if not expression.operands or expression.operation in COMPARISONS:
        return ZERO
    slopes = tuple(derivative(operand, by) for operand in expression.operands)
    if all(slope == ZERO for slope in slopes):
        return ZERO
    return RULES[expression.operation](expression.operands, slopes)


Parts = tuple[Expression, ...]


def _sum(x: Expression, y: Expression) -> Expression:
    return y if x == ZERO else x if y == ZERO else x + y


def _difference(x: Expression, y: Expression) -> Expression:
    return x if y == ZERO else x - y


def _product(x: Expression, y: Expression) -> Expression:
    if ZERO in (x, y):
        return ZERO
    return y if x == ONE else x if y == ONE else x * y


def _quotient(operands: Parts, slopes: Parts) -> Expression:
    (x, y), (dx, dy) = operands, slopes
    return _difference(dx, _product(x / y, dy)) / y


def _sigmoid(operands: Parts, slopes: Parts) -> Expression:
    s = sigmoid(operands[0])
    return _product(s * (1.0 - s), slopes[0])


def _tanh(operands: Parts, slopes: Parts) -> Expression:
    t = tanh(operands[0])
    return _product(1.0 - t * t, slopes[0])


def _erf(operands: Parts, slopes: Parts) -> Expression:
    (x,) = operands
    return _product(2 / math.sqrt(math.pi) * exp(-1.0 * x * x), slopes[0])


RULES: dict[str, Callable[[Parts, Parts], Expression]] = {
    "add": lambda o, s: _sum(*s),
    "subtract": lambda o, s: _difference(*s),
    "multiply": lambda o, s: _sum(_product(s[0], o[1]), _product(o[0], s[1])),
    "divide": _quotient,
    "fma": lambda o, s: _sum(_sum(_product(s[0], o[1]), _product(o[0], s[1])), s[2]),
    "absolute": lambda o, s: _product(apply("sign", o[0]), s[0]),
    "sign": lambda o, s: ZERO,
    "relu": lambda o, s: where(o[0] > 0.0, s[0], 0.0),
    "clamp": lambda o, s: where((o[0] >= o[1]) & (o[0] <= o[2]), s[0], 0.0),
    "minimum": lambda o, s: where(o[1] >= o[0], *s),
    "exp": lambda o, s: _product(exp(o[0]), s[0]),
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "erf": _erf,
    "softplus": lambda o, s: _product(sigmoid(o[0]), s[0]),
    "elu": lambda o, s: _product(where(o[0] > 0.0, 1.0, exp(minimum(o[0], 0.0))), s[0]),
    "where": lambda o, s: where(o[0], s[1], s[2]),
}
