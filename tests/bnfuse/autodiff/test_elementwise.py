"""Gradients of elementwise operators against autograd, with operands that broadcast, and at their kinks."""

from __future__ import annotations

import numpy as np
import pytest
from differentiated import broadcast, check, differentiated, few, floats, ints, many, node, seeds, shapes
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

UNARY = {
    "Abs": (lambda torch, x: x.abs(), -2, 2),
    "Acos": (lambda torch, x: x.acos(), -0.9, 0.9),
    "Acosh": (lambda torch, x: x.acosh(), 1.2, 4),
    "Asin": (lambda torch, x: x.asin(), -0.9, 0.9),
    "Asinh": (lambda torch, x: x.asinh(), -4, 4),
    "Atan": (lambda torch, x: x.atan(), -4, 4),
    "Atanh": (lambda torch, x: x.atanh(), -0.9, 0.9),
    "Cos": (lambda torch, x: x.cos(), -4, 4),
    "Cosh": (lambda torch, x: x.cosh(), -4, 4),
    "Erf": (lambda torch, x: x.erf(), -2, 2),
    "Exp": (lambda torch, x: x.exp(), -4, 4),
    "Identity": (lambda torch, x: x * 1, -4, 4),
    "Log": (lambda torch, x: x.log(), 0.1, 4),
    "Neg": (lambda torch, x: -x, -4, 4),
    "Reciprocal": (lambda torch, x: x.reciprocal(), 0.1, 4),
    "Sin": (lambda torch, x: x.sin(), -4, 4),
    "Sinh": (lambda torch, x: x.sinh(), -4, 4),
    "Sqrt": (lambda torch, x: x.sqrt(), 0.1, 4),
    "Tan": (lambda torch, x: x.tan(), -1.4, 1.4),
}


@pytest.mark.parametrize("op", UNARY)
@few
@given(shapes(0), seeds)
def test_functions_of_one_operand(op, shape, seed):
    function, low, high = UNARY[op]
    check([node(op, "x", "y")], {"x": floats(*shape, seed=seed, low=low, high=high)}, function)


BINARY = {
    "Add": (lambda torch, a, b: a + b, -2, 2),
    "Sub": (lambda torch, a, b: a - b, -2, 2),
    "Mul": (lambda torch, a, b: a * b, -2, 2),
    "Div": (lambda torch, a, b: a / b, 0.2, 2),
    "Pow": (lambda torch, a, b: a**b, 0.2, 2),
}


@pytest.mark.parametrize("op", BINARY)
@many
@given(broadcast(), seeds)
def test_functions_of_two_operands_that_broadcast(op, operands, seed):
    function, low, high = BINARY[op]
    a, b = (floats(*shape, seed=seed + i, low=low, high=high) for i, shape in enumerate(operands))
    check([node(op, "a b", "y")], {"a": a, "b": b}, function)


@many
@given(broadcast(), seeds)
def test_remainder_has_the_sign_of_its_first_operand(operands, seed):
    a, b = (floats(*shape, seed=seed + i, low=0.3) * (-1) ** i * 5 for i, shape in enumerate(operands))
    check([node("Mod", "a b", "y", fmod=1)], {"a": a, "b": b}, lambda torch, a, b: torch.fmod(a, b))


@few
@given(st.sampled_from(["Sum", "Mean", "Max", "Min"]), st.integers(1, 4), st.data())
def test_operators_of_any_number_of_operands(op, count, data):
    parts = data.draw(broadcast(count))
    feeds = {f"x{i}": floats(*shape, seed=data.draw(seeds)) for i, shape in enumerate(parts)}

    def function(torch, *operands):
        operands = torch.broadcast_tensors(*operands)
        stacked = torch.stack(operands)
        return {"Sum": stacked.sum, "Mean": stacked.mean, "Max": stacked.amax, "Min": stacked.amin}[op](0)

    check([node(op, " ".join(feeds), "y")], feeds, function)


@pytest.mark.parametrize("op", ["Max", "Min"])
def test_equal_extremes_share_the_gradient(op):
    feeds = {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([1.0, 3.0, 2.0])}
    check([node(op, "a b", "y")], feeds, lambda torch, a, b: (torch.maximum if op == "Max" else torch.minimum)(a, b))


@pytest.mark.parametrize("exponent", [-1.5, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 2.5])
@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_powers_of_a_constant_exponent(exponent, dtype):
    if exponent != int(exponent) and dtype == np.int64:
        exponent = 4
    constants = {"e": np.array(exponent, dtype)}
    power = float(exponent)
    feeds = {"x": floats(3, 1, 2, low=0.1)}
    check([node("Pow", "x e", "y")], feeds, lambda torch, x: x**power, constants=constants)


def test_the_square_takes_one_product_more_than_its_factor():
    found = differentiated([node("Pow", "x e", "y")], {"x": floats(3)}, constants={"e": np.array(2.0)})
    assert found.operators() == ["Mul", "Mul"]


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0])
def test_powers_of_zero(exponent):
    check(
        [node("Pow", "x e", "y")],
        {"x": np.array([0.0, -1.0, 2.0])},
        lambda torch, x: x**exponent,
        constants={"e": np.array([exponent])},
    )
    check(
        [node("Pow", "x e", "y")],
        {"x": np.array([0.0, 1.0, 2.0]), "e": np.array([exponent, exponent, 0.0])},
        lambda torch, x, e: x**e,
    )


def test_a_negative_base_has_no_logarithm():
    feeds = {"x": np.array([-1.5, 2.0]), "e": np.array([2.0, 2.0])}
    found = check([node("Pow", "x e", "y")], feeds, lambda torch, x, e: x**e)
    assert np.isnan(found.gradient("e")).tolist() == [True, False]


@pytest.mark.parametrize("op", ["Abs", "Relu"])
def test_the_slope_at_zero_is_zero(op):
    feeds = {"x": np.array([-1.0, 0.0, 1.0])}
    found = check([node(op, "x", "y")], feeds, lambda torch, x: x.abs() if op == "Abs" else x.relu())
    assert found.gradient("x")[1] == 0


@many
@given(broadcast(3), seeds)
def test_where_passes_the_gradient_to_what_was_chosen(operands, seed):
    a, b = (floats(*shape, seed=seed + i) for i, shape in enumerate(operands[:2]))
    chosen = floats(*operands[2], seed=seed + 2) > 0
    feeds = {"a": a, "b": b, "c": chosen}
    check([node("Where", "c a b", "y")], feeds, lambda torch, a, b, c: torch.where(c, a, b))


@few
@given(shapes(2), st.booleans(), seeds)
def test_prelu_with_a_slope_for_each_channel_or_for_all(shape, each, seed):
    slope = (shape[1], *[1] * (len(shape) - 2)) if each else (1,)
    feeds = {"x": floats(*shape, seed=seed), "slope": floats(*slope, seed=seed + 1)}
    feeds["x"].flat[0] = 0.0
    check(
        [node("PRelu", "x slope", "y")],
        feeds,
        lambda torch, x, s: torch.nn.functional.prelu(x, s.reshape(-1)),
    )


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.5), (None, 1.0), (-0.5, None), (None, None)])
@pytest.mark.parametrize("computed", [False, True])
def test_clip_by_bounds_that_are_constant_or_computed(low, high, computed):
    bounds = {name: np.array(value) for name, value in (("low", low), ("high", high)) if value is not None}
    x = floats(4, 5)
    x.flat[:2] = [-1.0, 1.5]  # at the bounds
    if computed:
        x.flat[:2] = [-1.1, 1.6]  # where torch lets both sides have the gradient
    names = " ".join(name if name in bounds else "-" for name in ("low", "high"))
    feeds = {"x": x, **(bounds if computed else {})}

    def function(torch, x, *given):
        given = dict(zip(bounds, given, strict=True)) if computed else {k: float(v) for k, v in bounds.items()}
        if not given:
            return x * 1
        return torch.clamp(x, given.get("low"), given.get("high"))

    check([node("Clip", f"x {names}", "y")], feeds, function, constants={} if computed else bounds)


def test_cast_passes_the_gradient_in_the_type_of_its_operand():
    nodes = [node("Cast", "x", "h", to=1), node("Cast", "h", "y", name="back", to=11)]
    found = differentiated(nodes, {"x": floats(3)})
    np.testing.assert_array_equal(found.gradient("x"), found.values["seed_y"].astype(np.float32).astype(np.float64))
    assert found.values[found.gradients["x"]].dtype == np.float64


def test_cast_like_gives_nothing_to_the_operand_whose_type_it_takes():
    feeds = {"x": floats(3), "like": floats(3, seed=4)}
    nodes = [node("CastLike", "x like", "h"), node("Mul", "h like", "y")]
    check(nodes, feeds, lambda torch, x, like: x * like)


@pytest.mark.parametrize("ratio", [None, 0.25, np.float32(0.25), 0.0])
def test_dropout_passes_what_was_kept_scaled_alike(ratio):
    constants = {"training": np.array(True)}
    if ratio is not None:
        constants["ratio"] = np.asarray(ratio)
    operands = "x ratio training" if ratio is not None else "x - training"
    feeds = {"x": floats(4, 6)}
    found = differentiated([node("Dropout", operands, "y", seed=3)], feeds, constants=constants)
    mask = found.values["dropout/mask"]
    kept = 1 - (0.5 if ratio is None else float(ratio))
    np.testing.assert_allclose(found.gradient("x"), np.where(mask, found.values["seed_y"] / kept, 0), rtol=1e-12)
    assert mask.any() and (ratio == 0 or not mask.all())


def test_dropout_reads_the_ratio_that_its_gradient_reads():
    found = differentiated(
        [node("Dropout", "x - training", "y")], {"x": floats(2)}, constants={"training": np.array(True)}
    )
    forward = next(n for n in found.model.graph if n.op_type == "Dropout")
    ratio = forward.inputs[1]
    assert ratio is not None
    assert sorted(use.node.op_type for use in ratio.uses()) == ["Dropout", "Sub"]


@pytest.mark.parametrize("operands", ["x", "x ratio", "x ratio training"])
def test_dropout_outside_of_training_is_the_identity(operands):
    constants = {"ratio": np.array(0.5), "training": np.array(False)}
    found = check([node("Dropout", operands, "y")], {"x": floats(3)}, lambda torch, x: x * 1, constants=constants)
    assert found.operators() == ["Identity"]


def test_integers_have_no_gradient():
    nodes = [node("Cast", "x", "whole", to=7), node("Cast", "whole", "h", to=11, name="back"), node("Add", "h x", "y")]
    check(nodes, {"x": floats(3) * 3}, lambda torch, x: x.long().double() + x)
    assert ints(1).dtype == np.int64
