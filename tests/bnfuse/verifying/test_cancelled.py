"""Gradients of biases in front of a BatchNorm are rounding, and are judged by the size of their weights' gradients."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import bnfuse
from bnfuse.build import build
from bnfuse.graph.training_graph import open_graph
from bnfuse.verifying.cancelled import yardsticks

RNG = np.random.default_rng(0)


def network(*, read_elsewhere: bool = False, kernel: int = 0, padding: int = 0) -> onnx.ModelProto:
    """Conv with bias -> BatchNorm -> Relu -> Conv with bias, pooled; `read_elsewhere` adds the first Conv's result.
    With `kernel`, a second BatchNorm follows the first one behind a Conv of this size."""
    weights = {
        "w1": RNG.standard_normal((4, 3, 3, 3)),
        "b1": RNG.standard_normal(4),
        "w2": RNG.standard_normal((4, 4, 3, 3)),
        "b2": RNG.standard_normal(4),
        **{name: np.ones(4) for name in ("scale", "variance")},
        **{name: np.zeros(4) for name in ("shift", "mean")},
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["y"], name="c1", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["y", "scale", "shift", "mean", "variance"], ["n"], name="bn"),
        helper.make_node("Relu", ["n"], ["r"], name="relu"),
        helper.make_node("Add", ["r", "y" if read_elsewhere else "n"], ["s"], name="add"),
        helper.make_node("Conv", ["s", "w2", "b2"], ["z"], name="c2", pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["z"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["scores"], name="flatten"),
    ]
    if kernel:
        weights["w3"] = RNG.standard_normal((4, 4, kernel, kernel))
        weights |= {name + "2": weights[name] for name in ("scale", "shift", "mean", "variance")}
        second = ["m", *(name + "2" for name in ("scale", "shift", "mean", "variance"))]
        nodes[2:2] = [
            helper.make_node("Conv", ["n", "w3"], ["m"], name="c3", pads=[padding] * 4),
            helper.make_node("BatchNormalization", second, ["n2"], name="bn2"),
        ]
        nodes[4].input[0] = "n2"
        del nodes[5]
        nodes[5].input[0] = "r"
    info = helper.make_tensor_value_info
    tensors = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    inputs = [info("x", onnx.TensorProto.FLOAT, [2, 3, 8, 8])]
    outputs = [info("scores", onnx.TensorProto.FLOAT, [2, 4])]
    graph = helper.make_graph(nodes, "net", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def built(**options: int) -> onnx.ModelProto:
    return build(network(**options), train_bn=True).model


def moved(model: onnx.ModelProto, gradient: str, by: float) -> onnx.ModelProto:
    """The graph with a constant added to this gradient."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    node = next(n for n in proto.graph.node if gradient in n.output)
    node.output[list(node.output).index(gradient)] = "true"
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(by), "by"))
    proto.graph.node.append(helper.make_node("Add", ["true", "by"], [gradient], name="moved"))
    return proto


def test_only_a_bias_that_nothing_but_a_batch_norm_follows_has_a_yardstick():
    assert yardsticks(open_graph(built())) == {"b1_grad": "w1_grad"}
    assert yardsticks(open_graph(built(read_elsewhere=True))) == {}


@pytest.mark.parametrize(("kernel", "padding", "cancelled"), [(1, 0, True), (3, 0, True), (3, 1, False)])
def test_a_shift_comes_through_a_convolution_that_does_not_pad(kernel, padding, cancelled):
    model = built(kernel=kernel, padding=padding)
    expected = {"b1_grad": "w1_grad"} | ({"shift_grad": "scale_grad"} if cancelled else {})
    assert yardsticks(open_graph(model)) == expected
    found = bnfuse.verify(model, model)
    assert found.judged


@pytest.mark.parametrize("level", ["none", "icf"])
def test_rounding_alone_is_judged_and_equal(level):
    model = built()
    found = bnfuse.verify(model, bnfuse.rewrite(model, level=level))
    assert found.equal
    assert next(t for t in found.tensors if t.tensor == "b1_grad").tolerance < 1e-3


def test_a_gradient_that_should_cancel_and_does_not_is_found():
    model = built()
    found = bnfuse.verify(model, moved(model, "b1_grad", 1e-2))
    assert [t.tensor for t in found.tensors if not t.ok] == ["b1_grad"]
