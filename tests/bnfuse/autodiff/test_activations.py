"""Gradients of all activations of the table, by central differences of their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from differentiated import check_by_differences, differentiated, floats, node

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
