"""What a training file holds (docs/training-file.md)."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bnfuse.build import NOTES_KEY, build, build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.signature import GraphSignature
from bnfuse.models import MODELS, build_forward
from bnfuse.opset import check_model


def signature(model: onnx.ModelProto) -> GraphSignature:
    return GraphSignature.from_json({entry.key: entry.value for entry in model.metadata_props}["bnfuse.roles"])


def small(name: str) -> onnx.ModelProto:
    hidden = {"hidden": 16} if "hidden" in MODELS[name].metaparameters else {}
    return build_forward(name, batch=2, image=64 if MODELS[name].image > 64 else 32, classes=5, **hidden)


@pytest.fixture(scope="module")
def densenet() -> onnx.ModelProto:
    return build_forward("densenet40", batch=2, depth=2, image=8)


@pytest.mark.parametrize("name", MODELS)
def test_every_zoo_model_builds_and_takes_a_step(name, step):
    source = small(name)
    model = build_training_graph(source, file=name)
    check_model(model)
    results, _ = step(model)
    assert all(np.isfinite(value).all() for value in results.values())
    ops = Counter(node.op_type for node in model.graph.node)
    norms = sum(node.op_type == "BatchNormalization" for node in source.graph.node)
    assert ops["BatchNorm"] == ops["BatchNormGrad"] == norms
    gradients = [results[name] for name in signature(model).gradients.values()]
    assert sum(value.size for value in gradients) == sum(
        np.prod(t.dims) for t in source.graph.initializer if t.name in signature(model).trainable
    )


def test_variables_are_inputs_and_initializers_and_every_input_has_one_role(densenet):
    model = build_training_graph(densenet)
    found = signature(model)
    inputs = [value.name for value in model.graph.input]
    assert inputs == [*found.data, *found.labels, *found.trainable, *found.frozen, *found.running]
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    before = {tensor.name: numpy_helper.to_array(tensor) for tensor in densenet.graph.initializer}
    for name in (*found.trainable, *found.running):
        assert np.array_equal(values[name], before[name])
    assert (found.data, found.labels, found.loss, found.logits) == (("data",), ("labels",), "loss", "logits")


def test_outputs_are_loss_logits_running_statistics_and_gradients_in_order(densenet):
    model = build_training_graph(densenet)
    found = signature(model)
    expected = [found.loss, found.logits, *found.running.values(), *found.gradients.values()]
    assert [value.name for value in model.graph.output] == expected
    assert found.running["final/norm/running_mean"] == "final/norm/new_running_mean"
    assert found.gradients["stem/conv/weight"] == "stem/conv/weight_grad"


def test_every_tensor_has_a_static_shape(densenet):
    model = build_training_graph(densenet)
    known = {v.name: v.type.tensor_type for v in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        for name in filter(None, node.output):
            assert all(dim.dim_value > 0 for dim in known[name].shape.dim), name
            assert known[name].elem_type


def test_shapes_are_what_a_step_computes(densenet, step):
    model = build_training_graph(densenet)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    named = [v for v in model.graph.value_info if v.name in {o for n in model.graph.node for o in n.output}]
    model.graph.output.extend(named)
    results, _ = step(model)
    assert [v.name for v in named if list(results[v.name].shape) != shapes[v.name]] == []


def test_forward_nodes_keep_their_names_and_their_results_get_speaking_ones(densenet):
    model = build_training_graph(densenet)
    nodes = {node.name: node for node in model.graph.node}
    assert {node.name for node in densenet.graph.node} < set(nodes)
    norm = nodes["block1/layer1/norm1"]
    assert norm.output[3:] == ["block1/layer1/norm1/batch_mean", "block1/layer1/norm1/inv_std"]
    assert nodes["block1/layer1/norm1/grad"].op_type == "BatchNormGrad"


def test_only_used_opsets_are_imported(densenet):
    model = build_training_graph(densenet)
    assert {(opset.domain, opset.version) for opset in model.opset_import} == {("", 18), ("ai.bnfuse", 1)}
    assert model.ir_version == 8


def test_source_is_left_alone(densenet):
    before = densenet.SerializeToString()
    build(densenet, freeze=["stem/*"])
    assert densenet.SerializeToString() == before


def test_frozen_parameters_are_inputs_without_gradient(densenet, step):
    model = build_training_graph(densenet, freeze=["stem/*", "*/norm*/scale"])
    found = signature(model)
    assert "stem/conv/weight" in found.frozen and "final/norm/scale" in found.frozen
    assert not set(found.frozen) & set(found.gradients)
    whole, _ = step(build_training_graph(densenet))
    part, _ = step(model)
    for name, gradient in found.gradients.items():
        np.testing.assert_allclose(part[gradient], whole[gradient], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_frozen_tensor_that_several_concats_read_is_split_off_once(densenet):
    model = build_training_graph(densenet, freeze=["stem/*"])
    assert not any("stem/conv/weight" in name for node in model.graph.node for name in node.output)
    check_model(model)


def test_data_that_a_concat_and_another_node_read_needs_no_gradient(forward, step):
    """Nobody wants the gradient of the data."""
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Concat", ["x", "r"], ["t"], axis=1)]
    nodes.append(helper.make_node("Conv", ["t", "w"], ["y"]))
    model = build_training_graph(forward(nodes, {"w": np.ones((2, 6, 6, 6), np.float32)}), loss="mse")
    results, _ = step(model)
    assert {name for name in results if name.endswith("_grad")} == {"w_grad"} and results["w_grad"].any()


def test_train_names_what_trains(densenet):
    assert signature(build_training_graph(densenet, train=["classifier/*"])).trainable == (
        "classifier/weight",
        "classifier/bias",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": ["nothing*"]}, "--train 'nothing*' matches no parameter (there are stem/conv/weight, "),
        ({"freeze": ["nothing*"]}, "--freeze 'nothing*' matches no parameter"),
        ({"freeze": ["*"]}, "nothing is left to train"),
        ({"loss": "hinge"}, "loss 'hinge' is unknown"),
        ({"logits": "y"}, "has no output 'y': there are logits"),
        ({"batch": 0}, "--batch 0 is out of range"),
    ],
)
def test_bad_options_are_one_line(densenet, options, message):
    with pytest.raises(BnfuseError, match="^" + message.replace("(", r"\(").replace("*", r"\*")):
        build(densenet, **options)


def test_cross_entropy_is_the_mean_over_the_labels(densenet, step):
    results, feeds = step(build_training_graph(densenet))
    logits = results["logits"].astype(np.float64)
    log_prob = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert results["loss"] == pytest.approx(-log_prob[np.arange(2), feeds["labels"]].mean(), rel=1e-5)


def test_mean_squared_error_takes_labels_of_the_outputs_shape(densenet, step):
    model = build_training_graph(densenet, loss="mse")
    labels = next(value for value in model.graph.input if value.name == "labels")
    assert labels.type.tensor_type.elem_type == TensorProto.FLOAT
    results, feeds = step(model)
    assert results["loss"] == pytest.approx(((results["logits"] - feeds["labels"]) ** 2).mean(), rel=1e-5)


def test_dense_prediction_has_a_label_for_each_pixel(after_conv, step):
    model = build_training_graph(after_conv([helper.make_node("Relu", ["c"], ["y"], name="relu")]))
    labels = next(value for value in model.graph.input if value.name == "labels")
    assert [dim.dim_value for dim in labels.type.tensor_type.shape.dim] == [2, 6, 6]
    assert np.isfinite(step(model)[0]["loss"])


def test_names_that_the_loss_would_take_are_left_to_the_user(forward, step):
    nodes = [helper.make_node("Conv", ["x", "labels"], ["loss"], name="conv")]
    weight = np.ones((2, 3, 6, 6), np.float32)
    model = build_training_graph(forward(nodes, {"labels": weight}, output="loss"))
    found = signature(model)
    assert found.trainable == ("labels",) and found.labels == ("labels_1",) and found.loss == "loss_1"
    assert np.isfinite(step(model)[0]["loss_1"])


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_a_node_that_is_called_loss_keeps_its_name(loss, forward, step):
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], name="loss"), helper.make_node("Flatten", ["c"], ["y"])]
    model = build_training_graph(forward(nodes, {"w": np.ones((4, 3, 6, 6), np.float32)}), loss=loss)
    assert next(node.name for node in model.graph.node if node.op_type == "Conv") == "loss"
    assert np.isfinite(step(model)[0]["loss"])


def test_notes_are_kept_in_the_file(conv_norm):
    built = build(conv_norm(training_mode=0), train_bn=True)
    assert built.notes == ("1 BatchNormalization nodes made to train (--train-bn)",)
    notes = {entry.key: entry.value for entry in built.model.metadata_props}[NOTES_KEY]
    assert json.loads(notes) == list(built.notes)


def test_a_path_is_read_and_named_in_errors(densenet, tmp_path):
    path = tmp_path / "forward.onnx"
    onnx.save(densenet, path)
    assert len(build(path).model.graph.node) == len(build(densenet).model.graph.node)
    with pytest.raises(BnfuseError, match=f"^{path}: --freeze 'x' matches no parameter"):
        build(path, freeze=["x"])
