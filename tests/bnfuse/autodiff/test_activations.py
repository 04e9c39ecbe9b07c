"""Gradients of all activations of the table, by central differences of their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from differentiated import check, check_by_differences, differentiated, floats, node

from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.spec import DOMAIN


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_that_are_operators_of_ours(name):
    x = floats(2, 3, 2, 2, low=-3, high=3)
    attributes = {key: float(np.clip(value, -1, 1)) for key, value in ACTIVATIONS[name].defaults}
    found = check_by_differences([node(f"{name}Pointwise", "x", "y", domain=DOMAIN, **attributes)], {"x": x})
    assert found.operators() == [f"PointwiseGrad{name}Grad"]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 2, 3), (2, 1, 2, 2, 3)])
def test_an_activation_of_any_rank(shape):
    x = floats(*shape)
    found = differentiated([node("Relu", "x", "y")], {"x": x})
    np.testing.assert_array_equal(found.gradient("x"), np.where(x > 0, found.values["seed_y"], 0))


STANDARD = {
    "Celu": ({"alpha": 1.5}, lambda f, x: f.celu(x, 1.5)),
    "Elu": ({"alpha": 0.5}, lambda f, x: f.elu(x, 0.5)),
    "Gelu": ({}, lambda f, x: f.gelu(x)),
    "Gelu by tanh": ({"approximate": "tanh"}, lambda f, x: f.gelu(x, approximate="tanh")),
    "HardSigmoid": ({"alpha": 0.25, "beta": 0.5}, lambda f, x: (x / 4 + 0.5).clamp(0, 1)),
    "HardSwish": ({}, lambda f, x: f.hardswish(x)),
    "LeakyRelu": ({"alpha": 0.25}, lambda f, x: f.leaky_relu(x, 0.25)),
    "Mish": ({}, lambda f, x: f.mish(x)),
    "Relu": ({}, lambda f, x: f.relu(x)),
    "Selu": ({"alpha": 1.5, "gamma": 1.25}, lambda f, x: 1.25 * f.elu(x, 1.5)),
    "Sigmoid": ({}, lambda f, x: f.sigmoid(x)),
    "Softplus": ({}, lambda f, x: f.softplus(x, threshold=1000)),
    "Softsign": ({}, lambda f, x: f.softsign(x)),
    "Tanh": ({}, lambda f, x: f.tanh(x)),
    "ThresholdedRelu": ({"alpha": 0.5}, lambda f, x: f.threshold(x, 0.5, 0.0)),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", STANDARD)
def test_standard_activations(name):
    attributes, function = STANDARD[name]
    x = floats(3, 5, low=-4, high=4)
    x.flat[:3] = [0.0, -9.0, 9.0]
    nodes = [node(name.split()[0], "x", "y", **attributes)]
    check(nodes, {"x": x}, lambda torch, x: function(torch.nn.functional, x), forward=False, opset=22)
