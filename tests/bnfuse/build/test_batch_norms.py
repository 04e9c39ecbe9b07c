"""BatchNorms that are frozen, called twice, without running statistics, or of a weight."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bnfuse.build import build
from bnfuse.core.errors import BnfuseError


def values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def signature(model: onnx.ModelProto) -> dict:
    return json.loads({entry.key: entry.value for entry in model.metadata_props}["bnfuse.roles"])


def norm(name: str, x: str, y: str, operands=("scale", "bias", "mean", "var"), **attrs) -> onnx.NodeProto:
    outputs = [y, f"{name}/m", f"{name}/v"] if attrs.get("training_mode") else [y]
    return helper.make_node("BatchNormalization", [x, *operands], outputs, name, **attrs)


def test_frozen_batch_norms_are_refused_until_one_says_what_is_meant(conv_norm):
    with pytest.raises(BnfuseError, match="--train-bn to train it, or --frozen-bn to keep it frozen"):
        build(conv_norm(training_mode=0))
    (note,) = build(conv_norm(training_mode=0), frozen_bn=True).notes
    assert note.startswith("1 BatchNormalization nodes stay frozen (bn)")


def test_a_frozen_batch_norm_normalises_by_its_running_statistics(conv_norm, step):
    source = conv_norm(training_mode=0, epsilon=1e-2)
    built = build(source, frozen_bn=True, loss="mse").model
    roles = signature(built)
    assert roles["trainable"] == ["w", "scale", "bias"] and roles["frozen"] == ["mean", "var"] and not roles["running"]
    results, feeds = step(built)
    (expected,) = ReferenceEvaluator(source).run(None, {"x": feeds["x"]})
    np.testing.assert_allclose(results["y"], expected, rtol=1e-4, atol=1e-5)
    slope = 2 * (results["y"] - feeds["labels"]) / expected.size * (expected > 0)
    np.testing.assert_allclose(results["bias_grad"], slope.sum((0, 2, 3)), rtol=1e-4, atol=1e-6)


def test_where_others_train_frozen_ones_stay_frozen(conv_norm, step):
    more = {"mean2": np.full(4, 0.25, np.float32), "var2": np.full(4, 2.0, np.float32)}
    frozen = norm("frozen", "n", "y", ["scale", "bias", "mean2", "var2"])
    built = build(conv_norm([frozen], more), loss="mse")
    roles = signature(built.model)
    assert list(roles["running"]) == ["mean", "var"] and roles["frozen"] == ["mean2", "var2"]
    assert any("stay frozen (frozen)" in note for note in built.notes)
    assert step(built.model)[0]["w_grad"].any()


def test_a_file_of_an_old_opset_stays_frozen_on_request(conv_norm):
    model = conv_norm(training_mode=0)
    model.opset_import[0].version = 13
    norm_node = model.graph.node[1]
    kept = [attr for attr in norm_node.attribute if attr.name != "training_mode"]
    del norm_node.attribute[:]
    norm_node.attribute.extend(kept)
    assert not signature(build(model, frozen_bn=True).model)["running"]
    assert len(signature(build(model).model)["running"]) == 2


def test_each_call_of_a_batch_norm_updates_its_statistics_in_turn(conv_norm, step):
    second = [helper.make_node("Relu", ["n"], ["r"]), norm("bn_1", "r", "y", training_mode=1, momentum=0.8)]
    built = build(conv_norm(second, momentum=0.8), loss="mse")
    roles = signature(built.model)
    assert roles["trainable"] == ["w", "scale", "bias"] and roles["running"] == {"mean": "bn_1/m", "var": "bn_1/v"}
    results, feeds = step(built.model)
    first = conv_norm(momentum=0.8)
    first.graph.output.extend([helper.make_tensor_value_info(name, 1, None) for name in ("c", "new_mean")])
    y, c, once = ReferenceEvaluator(first).run(None, {"x": feeds["x"]})
    kept = values(first)
    np.testing.assert_allclose(once, 0.8 * kept["mean"] + 0.2 * c.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(results["bn_1/m"], 0.8 * once + 0.2 * y.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_a_second_call_whose_statistics_are_copies_is_one_of_the_same_batch_norm(conv_norm):
    """As torch.onnx.export(dynamo=True) writes it."""
    second = [
        helper.make_node("Identity", ["mean"], ["mean2"]),
        helper.make_node("Identity", ["var"], ["var2"]),
        norm("bn_1", "n", "y", ["scale", "bias", "mean2", "var2"]),
    ]
    built = build(conv_norm(second, training_mode=0), train_bn=True)
    assert list(signature(built.model)["running"]) == ["mean", "var"]
    assert any(note.startswith("bn called several times (bn, bn_1)") for note in built.notes)


def test_a_batch_norm_without_running_statistics_has_none_in_the_training_file(forward, step):
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], "mean", axes=[0, 2, 3], keepdims=0),
        norm("bn", "x", "y", ["s", "b", "m", "v"], training_mode=1),
    ]
    source = forward(nodes, {"s": np.full(3, 2, np.float32), "b": np.ones(3, np.float32), "v": np.ones(3, np.float32)})
    built = build(source, loss="mse")
    roles = signature(built.model)
    assert roles["trainable"] == ["s", "b"] and not roles["running"] and not roles["frozen"]
    assert built.notes == ("1 BatchNormalization nodes have no running statistics (bn)",)
    results, feeds = step(built.model)
    x = feeds["x"]
    axes = {"axis": (0, 2, 3), "keepdims": True}
    expected = 2 * (x - x.mean(**axes)) / np.sqrt(x.var(**axes) + 1e-5) + 1
    np.testing.assert_allclose(results["y"], expected, rtol=1e-4, atol=1e-5)


def test_a_weight_standardised_by_a_batch_norm_is_no_batch_norm(forward, step):
    """timm's StdConv2d."""
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Reshape", ["w", "flat"], ["r"]),
        norm("std", "r", "n", ["gain", "zero", "zero2", "one"], training_mode=1, momentum=1.0),
        helper.make_node("Reshape", ["n", "back"], ["k"]),
        helper.make_node("Conv", ["x", "k"], ["y"], "conv"),
    ]
    kept = {
        "w": weight,
        "flat": np.array([1, 4, -1]),
        "back": np.array([4, 3, 3, 3]),
        "gain": np.full(4, 0.5, np.float32),
    }
    kept |= {name: np.full(4, value, np.float32) for name, value in (("zero", 0), ("zero2", 0), ("one", 1))}
    built = build(forward(nodes, kept), loss="mse")
    roles = signature(built.model)
    assert set(roles["trainable"]) == {"w", "gain", "zero"} and not roles["running"]
    assert values(built.model)["w"].shape == (4, 3, 3, 3)
    results, feeds = step(built.model)
    flat = weight.reshape(4, -1)
    standard = 0.5 * (flat - flat.mean(1, keepdims=True)) / np.sqrt(flat.var(1, keepdims=True) + 1e-5)
    windows = np.lib.stride_tricks.sliding_window_view(feeds["x"], (3, 3), axis=(2, 3))
    expected = np.einsum("nchwij,ocij->nohw", windows, standard.reshape(weight.shape))
    np.testing.assert_allclose(results["y"], expected, rtol=1e-3, atol=1e-4)
    gradient = results["w_grad"].reshape(4, -1)
    assert np.abs(gradient.sum(1)).max() < 1e-4 * np.abs(gradient).max() * gradient.shape[1]  # a shift changes nothing
