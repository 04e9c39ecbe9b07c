"""Parameters are the file's, under its names and in its shapes, whatever the graph makes of them."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from exported import signed
from onnx import helper, numpy_helper

from bnfuse.build import build


def trainable(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    names = json.loads({entry.key: entry.value for entry in model.metadata_props}["bnfuse.roles"])["trainable"]
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    return {name: shapes[name] for name in names}


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def constant(name: str, values) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(values)))


def test_gates_that_the_exporter_puts_in_another_order_are_those_of_one_parameter(forward, step):
    """torch.onnx writes the weights of an LSTM as pieces of them."""
    nodes = [
        constant("zero", [0]),
        constant("two", [2]),
        constant("four", [4]),
        helper.make_node("Slice", ["w", "zero", "two", "zero"], ["a"]),
        helper.make_node("Slice", ["w", "two", "four", "zero"], ["b"]),
        helper.make_node("Concat", ["b", "a"], ["k"], axis=0),
        helper.make_node("Gemm", ["x", "k"], ["y"], "gemm", transB=1),
    ]
    w = floats(4, 3)
    built = build(forward(nodes, {"w": w}, x=(2, 3)), loss="mse").model
    assert trainable(built) == {"w": (4, 3)}
    results, _ = step(built)
    plain = build(
        forward([helper.make_node("Gemm", ["x", "k"], ["y"], transB=1)], {"k": w[[2, 3, 0, 1]]}, x=(2, 3)), loss="mse"
    )
    expected, _ = step(plain.model)
    np.testing.assert_allclose(results["w_grad"], expected["k_grad"][[2, 3, 0, 1]], rtol=1e-6)


def test_a_table_that_is_read_at_constant_places_stays_one_parameter(forward):
    """Relative positions of attention: an entry that is read several times is one number."""
    nodes = [
        constant("places", [[0, 1, 2], [1, 2, 0]]),
        helper.make_node("Gather", ["table", "places"], ["bias"]),
        helper.make_node("Add", ["x", "bias"], ["y"], "add"),
    ]
    assert trainable(build(forward(nodes, {"table": floats(3)}, x=(2, 3)), loss="mse").model) == {"table": (3,)}


def test_a_token_that_is_put_before_others_is_a_parameter(forward):
    nodes = [
        constant("size", [2, 1, 3]),
        helper.make_node("Expand", ["token", "size"], ["tokens"]),
        helper.make_node("Concat", ["tokens", "x"], ["y"], "join", axis=1),
    ]
    assert trainable(build(forward(nodes, {"token": floats(1, 1, 3)}, x=(2, 4, 3)), loss="mse").model) == {
        "token": (1, 1, 3)
    }


def test_weights_of_one_and_three_dimensions_keep_their_shapes(forward):
    for rank, x in ((1, (2, 3, 8)), (3, (2, 3, 4, 5, 6))):
        weight = floats(4, 3, *[3] * rank)
        built = build(forward([helper.make_node("Conv", ["x", "w"], ["y"], "conv")], {"w": weight}, x=x), loss="mse")
        assert trainable(built.model) == {"w": weight.shape}


def test_what_is_made_of_buffers_stays_as_it_is(forward):
    nodes = [
        constant("zero", [0]),
        constant("two", [2]),
        helper.make_node("Slice", ["buffer", "zero", "two", "zero"], ["b"]),
        helper.make_node("Pow", ["x", "b"], ["p"], "pow"),
        helper.make_node("Gemm", ["p", "w"], ["y"], "gemm"),
    ]
    buffer = np.array([1, 2, 3], np.float32)
    source = forward(nodes, {"buffer": buffer, "w": floats(2, 4)}, x=(3, 2))
    assert trainable(build(signed(source, ["w"], ["buffer"]), loss="mse").model) == {"w": (2, 4)}


BOUNDS = {  # a node that reads `p`, of shape [3] where the operator takes it, and the slope at p for dy = 1
    "Max": lambda x, p: (p > x).sum(0),
    "Min": lambda x, p: (p < x).sum(0),
    "Mod": lambda x, p: -np.floor(x / p).sum(0),
    "Pow": lambda x, p: (x**p * np.log(x)).sum(0),
    "Sum": lambda x, p: np.full(3, 4.0),
}


@pytest.mark.parametrize("op", BOUNDS)
def test_an_operand_that_a_gradient_reaches_is_a_parameter(forward, step, op):
    """A learned bound, exponent or period; as the sum of the gradient at y is that of the mean, 2*(y - t)/12."""
    p = np.array([0.7, 1.1, 2.3], np.float32)
    attributes = {"fmod": 1} if op == "Mod" else {}
    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node(op, ["e", "p"], ["y"], "node", **attributes)]
    built = build(forward(nodes, {"p": p}, x=(4, 3), opset=18), loss="none").model
    assert trainable(built) == {"p": (3,)}
    results, feeds = step(built)
    (seed,) = (value for name, value in feeds.items() if name != "x")
    x = np.exp(feeds["x"].astype(np.float64))
    weighed = sum(seed[row] * BOUNDS[op](x[row : row + 1], p) / (4 if op == "Sum" else 1) for row in range(4))
    np.testing.assert_allclose(results["p_grad"], weighed, rtol=1e-4, atol=1e-5)


def test_bounds_and_factors_of_shape_0_are_parameters_where_the_exporter_says_so(forward, step):
    """torch's newer exporter lists them; a number that it does not list is one of the code."""
    nodes = [
        helper.make_node("Mul", ["x", "factor"], ["m"]),
        helper.make_node("Mul", ["m", "two"], ["n"]),
        helper.make_node("Clip", ["n", "low", "high"], ["y"], "clip"),
    ]
    numbers = {"factor": 1.5, "two": 2.0, "low": -0.5, "high": 1.0}
    source = forward(nodes, {name: np.array(value, np.float32) for name, value in numbers.items()}, x=(4, 3))
    built = build(signed(source, ["factor", "low"], ["high"]), loss="none").model
    assert trainable(built) == {"factor": (), "low": ()}
    results, feeds = step(built)
    n, seed = feeds["x"] * 3.0, feeds[next(name for name in feeds if name != "x")]
    np.testing.assert_allclose(results["low_grad"], seed[n < -0.5].sum(), rtol=1e-5)
    inside = (n >= -0.5) & (n <= 1.0)
    np.testing.assert_allclose(results["factor_grad"], (seed * feeds["x"] * 2.0)[inside].sum(), rtol=1e-5)


@pytest.fixture
def scaled(forward):
    """A factor exp(scale), as contrastive networks have it."""
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["g"], "gemm"),
        helper.make_node("Exp", ["scale"], ["factor"]),
        helper.make_node("Mul", ["g", "factor"], ["y"]),
    ]
    return forward(nodes, {"w": floats(3, 4), "scale": np.array(0.5, np.float32)}, x=(2, 3))


def test_a_named_number_of_torchs_older_exporter_is_a_parameter(scaled):
    scaled.producer_name = "pytorch"
    assert trainable(build(scaled, loss="mse").model) == {"w": (3, 4), "scale": ()}


def test_numbers_of_other_exporters_are_constants_unless_they_are_named(scaled):
    built = build(scaled, loss="mse")
    assert trainable(built.model) == {"w": (3, 4)}
    (note,) = built.notes
    assert note.startswith("single numbers are taken as constants (scale)") and note.endswith("NAME trains them")
    asked = build(scaled, loss="mse", train=["*", "scale"])
    assert trainable(asked.model) == {"w": (3, 4), "scale": ()} and asked.notes == ()


def test_what_the_exporter_does_not_list_is_its_own(forward):
    """Tables and steps that its optimiser computed, under names like those of the network's tensors."""
    source = forward(
        [helper.make_node("Max", ["x", "add_1"], ["m"]), helper.make_node("Gemm", ["m", "w"], ["y"])],
        {"add_1": floats(3), "w": floats(3, 4)},
        x=(2, 3),
    )
    built = build(signed(source, ["w"]), loss="mse")
    assert trainable(built.model) == {"w": (3, 4)} and built.warnings == ()


def test_parameters_that_the_exporter_folded_away_are_told(forward):
    source = forward(
        [helper.make_node("Gemm", ["x", "w"], ["g"]), helper.make_node("Mul", ["g", "exp"], ["y"])],
        {"exp": np.array(4.5, np.float32), "w": floats(3, 4)},
        x=(2, 3),
    )
    (warning,) = build(signed(source, ["w", "scale"]), loss="mse").warnings
    assert "lists parameters that the file does not have (scale)" in warning and "optimize=False" in warning


def test_no_parameter_is_missed_where_a_weight_stands_in_for_it(forward):
    """As a transposed one of a linear layer without a bias."""
    source = forward([helper.make_node("MatMul", ["x", "val_0"], ["y"])], {"val_0": floats(3, 4)}, x=(2, 3))
    built = build(signed(source, ["w"]), loss="mse")
    assert trainable(built.model) == {"val_0": (3, 4)} and built.warnings == ()
