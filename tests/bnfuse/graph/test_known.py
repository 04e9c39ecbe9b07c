"""What is known of a graph before it runs."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.graph.constants import FOLDED, Known

TEXT = """<ir_version: 8, opset_import: ["": 18]>
    g (float[2, 3] x) => (float[2, 3] y, float[2] drawn, float[2] dropped)
    <float[2] ones = {1, 1}, int64[1] one = {1}, float half = {0.5}, bool yes = {1}>
    {
        shape = Shape(x)
        count = Size(x)
        last = Gather(shape, one)
        twice = Add(last, last)
        y = Relu(x)
        rest = Shape(y)
        drawn = RandomUniform<shape = [2]>()
        dropped = Dropout(ones, half, yes)
    }"""


def values() -> dict[str, ir.Value]:
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(TEXT)))
    graph = model.graph
    found = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    return {str(value.name): value for value in found}


def test_shapes_and_what_follows_from_them_is_known():
    found, known = values(), Known(18)
    assert known(found["shape"]).tolist() == known(found["rest"]).tolist() == [2, 3]
    assert known(found["count"]) == 6 and known(found["twice"]).tolist() == [6]
    assert known(found["ones"]).tolist() == [1, 1]
    assert known(found["x"]) is None and known(found["y"]) is None and known(None) is None


def test_what_is_drawn_is_never_known():
    found, known = values(), Known(18)
    assert known(found["drawn"]) is None and known(found["dropped"]) is None


def test_a_variable_with_a_value_is_not_known():
    found = values()
    assert Known(18, variables=[found["ones"]])(found["ones"]) is None


def test_work_is_bounded():
    large = ir.Value(name="large", const_value=ir.tensor(np.zeros(FOLDED + 1, np.float32)))
    node = ir.node("Neg", [large])
    assert Known(18)(node.outputs[0]) is None
