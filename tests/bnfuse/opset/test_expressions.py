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


TORCH = {
    "Relu": lambda f, z: f.relu(z),
    "Clip": lambda f, z: z.clamp(-1.5, 6.0),
    "QuickGelu": lambda f, z: z * (1.3 * z).sigmoid(),
    "Softsign": lambda f, z: f.softsign(z),
    "Sigmoid": lambda f, z: z.sigmoid(),
    "Tanh": lambda f, z: z.tanh(),
    "LeakyRelu": lambda f, z: f.leaky_relu(z, 1.3),
    "Elu": lambda f, z: f.elu(z, 1.3),
    "Selu": lambda f, z: f.selu(z),
    "Celu": lambda f, z: f.celu(z, 1.3),
    "HardSigmoid": lambda f, z: f.hardsigmoid(z),
    "HardSwish": lambda f, z: f.hardswish(z),
    "Gelu": lambda f, z: f.gelu(z),
    "GeluTanh": lambda f, z: f.gelu(z, approximate="tanh"),
    "Mish": lambda f, z: f.mish(z),
    "Softplus": lambda f, z: f.softplus(z, threshold=1e9),
    "ThresholdedRelu": lambda f, z: f.threshold(z, 1.3, 0.0),
}
OWN = {  # attributes that torch's function has fixed
    "Selu": {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805},
    "HardSigmoid": {"alpha": 1 / 6, "beta": 0.5},
}


@pytest.mark.torch
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients_are_torchs_also_at_kinks_and_far_out(name):
    import torch

    kinks = [0.0, -0.0, -3.0, 3.0, -1.5, 6.0, 1.3, -30.0, 30.0, -700.0, 700.0]
    points = np.concatenate([POINTS, kinks])
    z = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    y = TORCH[name](torch.nn.functional, z)
    y.sum().backward()
    given = {**GIVEN, **OWN.get(name, {})}
    value = formula(ACTIVATIONS[name].value, given, z=points)
    np.testing.assert_allclose(value, y.detach().numpy(), rtol=1e-13, atol=1e-14)
    gradient = formula(ACTIVATIONS[name].gradient, given, z=points, d=np.ones_like(points))
    rough = 1e-6 if name in ("HardSigmoid", "Celu") else 1e-11  # 1/6 and 1/alpha are float32 in torch, in any type
    np.testing.assert_allclose(gradient, z.grad.numpy(), rtol=rough, atol=1e-14)


def test_a_part_that_occurs_twice_is_evaluated_once():
    seen = []
    algebra = {**NUMPY, "sigmoid": lambda x: seen.append(x) or x}
    s = e.sigmoid(Z)
    e.interpret(s * s + s, algebra, lambda _: 0.5)
    assert len(seen) == 1


def test_what_does_not_vary_has_no_slope():
    assert e.derivative(e.attribute("alpha") * 3.0, Z) == e.ZERO
    assert e.derivative(Z, Z) == e.ONE
