"""Parameters are the file's, under its names and in its shapes, whatever the graph makes of them."""

from __future__ import annotations

import json

import numpy as np
import onnx
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


def test_what_is_made_of_buffers_is_a_constant(forward):
    nodes = [
        constant("zero", [0]),
        constant("two", [2]),
        helper.make_node("Slice", ["buffer", "zero", "two", "zero"], ["b"]),
        helper.make_node("Pow", ["x", "b"], ["p"], "pow"),
        helper.make_node("Gemm", ["p", "w"], ["y"], "gemm"),
    ]
    buffer = np.array([1, 2, 3], np.float32)
    built = build(forward(nodes, {"buffer": buffer, "w": floats(2, 4)}, x=(3, 2)), loss="mse").model
    assert trainable(built) == {"w": (2, 4)} and not any(node.op_type == "Slice" for node in built.graph.node)
