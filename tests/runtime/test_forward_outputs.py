"""What the forward phase gives is there when it ends, also where it is a map, which kernels hold in another layout."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bnfuse import runtime
from bnfuse.build import build_training_graph


@pytest.fixture(scope="module")
def forward() -> onnx.ModelProto:
    """x -> Conv -> Tanh -> y, of 4 channels."""
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], "conv"), helper.make_node("Tanh", ["c"], ["y"], "tanh")]
    x, y = (helper.make_tensor_value_info(*each) for each in (("x", 1, [2, 3, 8, 8]), ("y", TensorProto.FLOAT, None)))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("loss", ["none", "mse"])
def test_the_output_is_there_after_the_forward_phase(loss, forward):
    step = runtime.compile_step(build_training_graph(forward, loss=loss), threads=1)
    images = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    (expected,) = ReferenceEvaluator(forward).run(None, {"x": images})
    given = step.forward(images, *([np.zeros_like(expected)] if loss == "mse" else []))
    if loss == "none":
        np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(step.outputs["y"], expected, rtol=1e-4, atol=1e-5)
