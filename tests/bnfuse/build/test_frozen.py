"""Frozen BatchNorms go into the convolutions before them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bnfuse.build import build
from bnfuse.passes import rewrite


def readers_of_data(model: onnx.ModelProto) -> list[str]:
    """The operators of the forward graph that something from the data goes through, up to the loss."""
    found, ops = {"x"}, []
    for node in model.graph.node:
        if found.intersection(node.input) and "/grad" not in node.name and not node.name.startswith("loss"):
            found.update(node.output)
            ops.append(node.op_type)
    return ops


def with_bias(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.node[0].input.append("shift")
    model.graph.initializer.append(numpy_helper.from_array(np.array([0.5, -1, 2, 0.25], np.float32), "shift"))
    return model


@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradients_are_those_of_the_batch_norm(bias, conv_norm, step):
    source = conv_norm(training_mode=0, epsilon=1e-2)
    if bias:
        source = with_bias(source)
    built = build(source, frozen_bn=True, loss="mse").model
    assert "BatchNormalization" not in {node.op_type for node in built.graph.node}
    results, feeds = step(built)
    source.graph.output.append(helper.make_tensor_value_info("c", 1, None))
    given = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in source.graph.initializer}
    y, c = ReferenceEvaluator(source).run(None, {"x": feeds["x"]})
    np.testing.assert_allclose(results["y"], y, rtol=1e-4, atol=1e-5)
    slope = 2 * (y - feeds["labels"]) / y.size * (y > 0)
    mean, deviation = (v.reshape(-1, 1, 1) for v in (given["mean"], np.sqrt(given["var"] + 1e-2)))
    expected = (slope * (c - mean) / deviation).sum((0, 2, 3))
    np.testing.assert_allclose(results["scale_grad"], expected, rtol=1e-4, atol=1e-5)
    if bias:
        expected = slope.sum((0, 2, 3)) * given["scale"] / deviation.reshape(-1)
        np.testing.assert_allclose(results["shift_grad"], expected, rtol=1e-4, atol=1e-5)


def test_no_map_is_read_for_it(conv_norm):
    model = build(with_bias(conv_norm(training_mode=0)), frozen_bn=True, loss="mse").model
    assert readers_of_data(model) == ["Conv", "Relu"]


def test_it_stays_where_the_convolution_has_another_reader(conv_norm):
    more = [helper.make_node("Add", ["n", "c"], ["y"], name="sum")]
    model = build(conv_norm(more, training_mode=0), frozen_bn=True, loss="mse").model
    assert readers_of_data(model) == ["Conv", "NormalizePointwise", "Add"]


@pytest.mark.parametrize(
    ("frozen", "ops"),
    [
        (
            ["w"],
            ["Conv", "NormalizePointwise", "Relu"],
        ),  # the gradient of the weight would be made for that of the scale
        (["w", "scale"], ["Conv", "Relu"]),
        (["scale", "bias"], ["Conv", "Relu"]),
    ],
)
def test_what_is_fixed_says_whether_that_saves_anything(frozen, ops, conv_norm):
    model = build(conv_norm(training_mode=0), frozen_bn=True, loss="mse", freeze=frozen).model
    assert readers_of_data(model) == ops


def exported_by_torch(*modes: str) -> onnx.ModelProto:
    """Conv and BatchNormalization in turns, each with the operator of torch that the dynamo exporter says it was."""
    nodes, tensors, x = [], [], "x"
    for i, mode in enumerate(modes):
        tensors.append(numpy_helper.from_array(np.ones((3, 3, 1, 1), np.float32), f"w{i}"))
        tensors += [numpy_helper.from_array(np.ones(3, np.float32), f"{name}{i}") for name in ("s", "b", "m", "v")]
        nodes.append(helper.make_node("Conv", [x, f"w{i}"], [f"c{i}"], name=f"conv{i}"))
        nodes.append(
            helper.make_node("BatchNormalization", [f"c{i}", *(f"{n}{i}" for n in "sbmv")], [f"y{i}"], name=f"bn{i}")
        )
        source = f"%bn : [num_users=1] = call_function[target=torch.ops.aten._native_batch_norm_legit_{mode}.default]"
        nodes[-1].metadata_props.add(key="pkg.torch.onnx.fx_node", value=source)
        x = f"y{i}"
    info = helper.make_tensor_value_info
    shape = [2, 3, 4, 4]
    graph = helper.make_graph(nodes, "net", [info("x", 1, shape)], [info(x, 1, shape)], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize(
    ("modes", "trained"),
    [
        (("no_training", "functional"), ["bn1"]),
        (("functional", "functional"), ["bn0", "bn1"]),
        (("no_training", "no_training"), ["bn0", "bn1"]),  # exported in evaluation mode: says nothing
    ],
)
def test_what_torch_froze_beside_others_stays_frozen(modes, trained):
    built = build(exported_by_torch(*modes), train_bn=True, loss="mse")
    assert [node.name for node in built.model.graph.node if node.op_type == "BatchNorm"] == trained
    told = [note for note in built.notes if "stay frozen (bn0)" in note]
    assert len(told) == 2 - len(trained)
    assert all("Export the module with them in training mode" in note for note in told)


@pytest.mark.parametrize("frozen", [[], ["s", "b"]])
def test_one_in_front_of_a_convolution_goes_into_it(frozen, forward, step):
    """As in DenseNets: forward as its prologue, backward as its epilogue."""
    values = {
        **{name: np.random.default_rng(i).uniform(0.5, 2, 4).astype(np.float32) for i, name in enumerate("sbmv")},
        "first": np.random.default_rng(5).standard_normal((4, 3, 1, 1)).astype(np.float32),
        "last": np.random.default_rng(6).standard_normal((2, 4, 3, 3)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["c"], "conv1"),
        helper.make_node("Relu", ["c"], ["d"], "relu1"),
        helper.make_node("BatchNormalization", ["d", *"sbmv"], ["n"], "norm", epsilon=1e-3),
        helper.make_node("Relu", ["n"], ["r"], "relu2"),
        helper.make_node("Conv", ["r", "last"], ["y"], "conv2"),
    ]
    source = forward(nodes, values, opset=17)
    built = build(source, frozen_bn=True, loss="mse", freeze=frozen).model
    fused = ir.to_proto(rewrite(ir.from_proto(built)).model)
    ops = [node.op_type for node in fused.graph.node]
    (backward,) = [op for op in ops if "ConvGrad" in op and "Normalize" in op]
    assert "NormalizeReluConv" in ops and backward == (
        "NormalizeReluConvGradReluGradScale" if frozen else "NormalizeReluConvGradReluGradReduceScale"
    )
    assert not {"Mul", "Add", "NormalizePointwise", "PointwiseGradScale"} & {
        node.op_type for node in fused.graph.node if node.input[0] in ("c", "d", "n", "r")
    }
    expected, _ = step(built)
    found, _ = step(fused)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    plain = [n for n in built.graph.node if n.op_type in ("NormalizePointwise", "PointwiseGradScale")]
    assert len(plain) == 2
