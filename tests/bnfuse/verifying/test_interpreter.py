"""The interpreter computes standard operators in the type of what they read."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from bnfuse.opset import reference
from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.sources import activation_of, forward_of, standard_node
from bnfuse.verifying.interpreter import run

STANDARD = [each for each in ACTIVATIONS.values() if standard_node(each, {}, 24) and each.operator != "Swish"]


@pytest.mark.parametrize("activation", STANDARD, ids=lambda each: each.name)
def test_standard_activations_in_float64_are_our_formulas(activation):
    attributes = {name: float(np.float32(value)) for name, value in activation.defaults}
    operator, given = standard_node(activation, attributes, 24)
    assert activation_of("", operator, given)[0] is activation
    x = np.linspace(-8, 8, 2001)
    ends = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, x.shape) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"], **given)], "one", ends[:1], ends[1:])
    found = run(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)]), {"x": x})["y"]
    expected = reference.run(forward_of(activation), {"x": x}, attributes)["y"]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-14)
