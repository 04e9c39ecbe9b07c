"""Activations that onnxruntime has no gradient of: read, differentiated and fused by their entry in the table alone."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from bnfuse.build.activations import put_stand_ins, take_stand_ins
from onnx import TensorProto, helper, numpy_helper

import bnfuse
from bnfuse.build.decompose import DECOMPOSITIONS
from bnfuse.opset import activations as table
from bnfuse.opset import functions, spec
from bnfuse.opset.activations import ACTIVATIONS, GRADIENTS, Activation, Z
from bnfuse.opset.expressions import absolute, attribute

BENT = Activation("Bent", Z / (attribute("width") + absolute(Z)), "x <- x/(width + |x|)", defaults=(("width", 2.0),))


@pytest.mark.parametrize(("name", "activation"), ACTIVATIONS.items(), ids=ACTIVATIONS)
def test_an_entry_is_a_step_of_the_grammar(name, activation):
    op = spec.parse(f"Normalize{name}ConvStatistics")
    assert op is not None and set(activation.attributes) <= set(op.attributes)
    assert spec.parse(f"PointwiseGrad{name}Grad") is not None


def test_no_rewrite_is_out_of_reach_of_its_operator():
    """What is an activation with a gradient of ours is not written by other operators."""
    assert not {name for name, activation in ACTIVATIONS.items() if not activation.built} & {*DECOMPOSITIONS}


def layered_model(activation: Activation) -> onnx.ModelProto:
    """Two times Conv, BatchNorm and the activation, then a pooling and a classifier; x is [4, 3, 6, 6]."""
    rng, tensors = np.random.default_rng(0), {}

    def constant(name: str, *shape: int, low: float = -0.5, high: float = 0.5) -> str:
        tensors[name] = numpy_helper.from_array(rng.uniform(low, high, shape).astype(np.float32), name)
        return name

    bounds = [constant("low", low=-0.5, high=-0.5), constant("high", low=0.75, high=0.75)]
    given = bounds if activation.name == "Clip" else []
    nodes, x, channels = [], "x", 3
    for i, out in enumerate((5, 4)):
        nodes.append(helper.make_node("Conv", [x, constant(f"w{i}", out, channels, 3, 3)], [f"c{i}"], pads=[1] * 4))
        norm = [constant(f"scale{i}", out), constant(f"bias{i}", out), constant(f"m{i}", out)]
        norm.append(constant(f"v{i}", out, low=0.5, high=1.5))
        nodes.append(helper.make_node("BatchNormalization", [f"c{i}", *norm], [f"n{i}"]))
        nodes.append(helper.make_node(activation.name, [f"n{i}", *given], [f"a{i}"]))
        x, channels = f"a{i}", out
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["p"]))
    nodes.append(helper.make_node("Flatten", ["p"], ["f"]))
    nodes.append(helper.make_node("Gemm", ["f", constant("wf", 3, channels), constant("bf", 3)], ["y"], transB=1))
    used = {name for node in nodes for name in node.input}
    value = helper.make_tensor_value_info
    inputs, outputs = [value("x", TensorProto.FLOAT, [4, 3, 6, 6])], [value("y", TensorProto.FLOAT, [4, 3])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [t for name, t in tensors.items() if name in used])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


STANDARD = [activation for activation in ACTIVATIONS.values() if not activation.domain]  # what build takes


@pytest.mark.parametrize("activation", STANDARD, ids=lambda activation: activation.name)
def test_every_activation_is_fused_forward_and_backward(activation, tmp_path):
    """onnxruntime is the oracle of the rewritten file; of an activation that it cannot differentiate, the tests of the
    formula are (tests/bnfuse/opset/test_expressions.py)."""
    onnx.save(layered_model(activation), tmp_path / "forward.onnx")
    training = bnfuse.build_training_graph(tmp_path / "forward.onnx", train_bn=True)
    fused = bnfuse.rewrite(training, level="bnff")
    names = {node.op_type for node in fused.model.graph if node.domain == "ai.bnfuse"}
    assert not fused.report.unfused
    assert f"Normalize{activation.name}ConvStatistics" in names
    assert any(f"ConvGrad{activation.name}GradReduce" in name for name in names)
    assert bnfuse.verify(training, fused.model).equal
    assert bnfuse.verify(training, fused.model, runtime="tvm").equal


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
    monkeypatch.setattr(functions, "ACTIVATION_GRADS", (*functions.ACTIVATION_GRADS, "BentGrad"))
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
    (function,) = model.functions
    assert function.name == "PointwiseGradBentGrad"
    width = next(a for node in function.node for a in node.attribute if a.ref_attr_name == "width")
    assert (width.name, width.type) == ("value_float", onnx.AttributeProto.FLOAT)


def test_a_graph_without_such_activations_stays_as_it_is():
    model = small_model(helper.make_node("Relu", ["x"], ["y"]))
    before = model.SerializeToString()
    take_stand_ins(model, put_stand_ins(model))
    assert model.SerializeToString() == before


def test_an_unknown_operator_is_still_refused(tmp_path):
    onnx.save(small_model(helper.make_node("Bent", ["x"], ["y"], name="bend")), tmp_path / "bent.onnx")
    with pytest.raises(bnfuse.BnfuseError, match="bend"):
        bnfuse.build_training_graph(tmp_path / "bent.onnx")
