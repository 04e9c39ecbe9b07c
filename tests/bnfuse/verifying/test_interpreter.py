"""The interpreter computes standard operators in the type of what they read."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from bnfuse.opset import reference
from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.sources import activation_of, forward_of, standard_node
from bnfuse.verifying.interpreter import run

STANDARD = [each for each in ACTIVATIONS.values() if standard_node(each, {}, 24) and each.operator != "Swish"]


def made(node: onnx.NodeProto, **operands: np.ndarray) -> onnx.ModelProto:
    def ends(names):
        return [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in names]

    graph = helper.make_graph([node], "one", ends(operands), ends(node.output))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])


@pytest.mark.parametrize("activation", STANDARD, ids=lambda each: each.name)
def test_standard_activations_in_float64_are_our_formulas(activation):
    attributes = {name: float(np.float32(value)) for name, value in activation.defaults}
    operator, chosen = standard_node(activation, attributes, 24)
    assert activation_of("", operator, chosen)[0] is activation
    x = np.linspace(-8, 8, 2001)
    found = run(made(helper.make_node(operator, ["x"], ["y"], **chosen), x=x), {"x": x})["y"]
    expected = reference.run(forward_of(activation), {"x": x}, attributes)["y"]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-14)


@given(st.data(), st.integers(1, 3))
def test_convolutions_are_the_evaluators(data, rank):
    def several(low, high, count=rank):
        return data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    group, kernel = data.draw(st.integers(1, 2)), several(1, 3)
    given_ = {"strides": several(1, 2), "dilations": several(1, 3), "pads": several(0, 2, 2 * rank), "group": group}
    auto = data.draw(st.sampled_from(["NOTSET", "VALID", "SAME_UPPER"]))
    if auto != "NOTSET":
        given_ = {"group": group, "auto_pad": auto}
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 2 * group, *several(7, 8))), rng.normal(size=(3 * group, 2, *kernel))
    feeds = {"x": x, "weight": weight, "bias": rng.normal(size=3 * group)}
    model = made(helper.make_node("Conv", [*feeds], ["y"], **given_), **feeds)
    (expected,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(run(model, feeds)["y"], expected, rtol=1e-12, atol=1e-12)


def test_what_is_read_no_more_is_freed_but_for_what_is_asked_for():
    nodes = [helper.make_node("Neg", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, [2]) for name in ("x", "y")]
    model = helper.make_model(helper.make_graph(nodes, "two", ends[:1], ends[1:]))
    found = run(model, {"x": np.ones(2)}, ["a", "y"])
    assert {name: list(value) for name, value in found.items()} == {"a": [-1, -1], "y": [1, 1]}
