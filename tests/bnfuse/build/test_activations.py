"""Activations that onnxruntime has no gradient of: read, differentiated and fused by their entry in the table alone."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bnfuse
from bnfuse.build.activations import put_stand_ins, take_stand_ins
from bnfuse.opset import activations as table
from bnfuse.opset import spec
from bnfuse.opset.activations import ACTIVATIONS, GRADIENTS, Activation, Z
from bnfuse.opset.expressions import absolute, attribute

BENT = Activation("Bent", Z / (attribute("width") + absolute(Z)), "x <- x/(width + |x|)", defaults=(("width", 2.0),))


def test_the_table_is_the_grammar():
    assert {*ACTIVATIONS} <= {"Relu", "Clip", "QuickGelu", "Softsign"}
    for name, activation in ACTIVATIONS.items():
        op = spec.parse(f"Normalize{name}ConvStatistics")
        assert op is not None and set(activation.attributes) <= set(op.attributes)
        assert spec.parse(f"PointwiseGrad{name}Grad") is not None


def small_model(*middle: onnx.NodeProto) -> onnx.ModelProto:
    """x [2, 3] -> middle -> y."""
    value = helper.make_tensor_value_info
    one = numpy_helper.from_array(np.array(1.0, np.float32), "one")
    graph = helper.make_graph(
        middle, "g", [value("x", TensorProto.FLOAT, [2, 3])], [value("y", TensorProto.FLOAT, [2, 3])], [one]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.fixture
def bent(monkeypatch):
    monkeypatch.setitem(table.ACTIVATIONS, "Bent", BENT)
    monkeypatch.setitem(table.GRADIENTS, "BentGrad", BENT)
    monkeypatch.setattr(spec, "_BACKWARD", spec.re.compile(spec._BACKWARD.pattern.replace("Relu|", "Relu|Bent|", 2)))


def test_a_stand_in_goes_through_the_builder_and_comes_back(bent):
    assert BENT.name in ACTIVATIONS and f"{BENT.name}Grad" in GRADIENTS
    model = small_model(helper.make_node("Bent", ["x"], ["y"], name="bend", width=0.5))
    replaced = put_stand_ins(model)
    (node,) = model.graph.node
    assert (node.op_type, node.domain) == ("QuickGelu", "com.microsoft")
    alpha = node.attribute[0].f
    gradient = helper.make_node("QuickGeluGrad", ["dy", "x"], ["dx"], domain="com.microsoft", alpha=alpha)
    genuine = helper.make_node("QuickGelu", ["x"], ["z"], domain="com.microsoft", alpha=1.702)
    model.graph.node.extend([gradient, genuine])
    take_stand_ins(model, replaced)
    bend, bend_grad, other = model.graph.node
    assert (bend.op_type, bend.domain, bend.attribute[0].f) == ("Bent", "", 0.5)
    assert (bend_grad.op_type, bend_grad.domain) == ("PointwiseGradBentGrad", "ai.bnfuse")
    assert [(a.name, a.f) for a in bend_grad.attribute] == [("width", 0.5)]
    assert other.op_type == "QuickGelu"
    assert [function.name for function in model.functions] == ["PointwiseGradBentGrad"]


def test_a_graph_without_such_activations_stays_as_it_is():
    model = small_model(helper.make_node("Relu", ["x"], ["y"]))
    before = model.SerializeToString()
    take_stand_ins(model, put_stand_ins(model))
    assert model.SerializeToString() == before


def test_an_unknown_operator_is_still_refused(tmp_path):
    onnx.save(small_model(helper.make_node("Bent", ["x"], ["y"], name="bend")), tmp_path / "bent.onnx")
    with pytest.raises(bnfuse.BnfuseError, match="bend"):
        bnfuse.build_training_graph(tmp_path / "bent.onnx")
