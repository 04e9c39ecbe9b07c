"""Formulas as data: what they evaluate to, and the slopes that are derived of them."""

from __future__ import annotations

import numpy as np
import pytest

from bnfuse.opset import expressions as e
from bnfuse.opset.activations import ACTIVATIONS, D, Z
from bnfuse.opset.reference import NUMPY, formula

POINTS = np.array([-7.3, -2.0, -0.6, -0.01, 0.02, 0.4, 1.7, 6.5, 11.0])
GIVEN = {"alpha": 1.3, "beta": 0.4, "gamma": 1.1, "min": -1.5, "max": 6.0}
FORMULAS = {
    "softsign": Z / (1.0 + e.absolute(Z)),
    "silu": Z * e.sigmoid(Z),
    "scaled": e.attribute("alpha") * Z - Z * Z / 3.0,
    "clamped": e.clamp(Z, e.attribute("min"), e.attribute("max")) * Z,
    "hard swish": Z * e.clamp(Z / 6.0 + 0.5, 0.0, 1.0),
    "fused": e.fma(Z, Z, 2.0 - Z),
    "piecewise": e.where(Z > 0.5, Z * Z, e.relu(Z) + 0.25),
    "reciprocal": 1.0 / (Z * Z + 1.0),
}


def test_every_operation_has_a_meaning_in_numpy_and_a_slope_where_it_is_no_comparison():
    assert {*NUMPY} == {*e.OPERATIONS}
    assert {*e.RULES} == {*e.OPERATIONS} - {*e.COMPARISONS}


def test_an_operation_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no operation: square"):
        e.apply("square", Z)


@pytest.mark.parametrize("name", FORMULAS)
def test_derived_slopes_are_those_of_differences(name):
    step = 1e-6
    slope = formula(e.derivative(FORMULAS[name], Z), GIVEN, z=POINTS)
    after, before = (formula(FORMULAS[name], GIVEN, z=POINTS + delta) for delta in (step, -step))
    np.testing.assert_allclose(
        np.broadcast_to(slope, POINTS.shape), (after - before) / (2 * step), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_a_stated_gradient_is_the_derived_one(activation):
    d = np.linspace(0.5, 2.0, POINTS.size)
    derived = formula(D * e.derivative(activation.value, Z), GIVEN, z=POINTS, d=d)
    np.testing.assert_allclose(formula(activation.gradient, GIVEN, z=POINTS, d=d), derived, rtol=1e-12, atol=1e-14)


def test_a_part_that_occurs_twice_is_evaluated_once():
    seen = []
    algebra = {**NUMPY, "sigmoid": lambda x: seen.append(x) or x}
    s = e.sigmoid(Z)
    e.interpret(s * s + s, algebra, lambda _: 0.5)
    assert len(seen) == 1


def test_what_does_not_vary_has_no_slope():
    assert e.derivative(e.attribute("alpha") * 3.0, Z) == e.ZERO
    assert e.derivative(Z, Z) == e.ONE
