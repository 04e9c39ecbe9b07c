"""Tensors that an optimiser merged because their values are equal come apart; what is shared stays shared."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from exported import called, norm_of_module, signed
from onnx import helper

from bnfuse.build import build

ONES, ZEROS = np.ones(3, np.float32), np.zeros(3, np.float32)


def signature(model: onnx.ModelProto) -> dict:
    return json.loads({entry.key: entry.value for entry in model.metadata_props}["bnfuse.roles"])


def norm(name: str, x: str, y: str, operands: list[str]) -> onnx.NodeProto:
    return helper.make_node("BatchNormalization", [x, *operands], [y, f"m{y}", f"v{y}"], name, training_mode=1)


def test_new_batch_norms_whose_tensors_are_two_get_four_each(forward, step):
    """As onnxsim and onnxslim leave two new BNs: ones and zeros, once."""
    merged = ["one", "zero", "zero", "one"]
    source = forward([norm("a", "x", "n", merged), norm("b", "n", "y", merged)], {"one": ONES, "zero": ZEROS})
    apart = [norm(c, x, y, [f"{c}.{t}" for t in "sbmv"]) for c, x, y in (("a", "x", "n"), ("b", "n", "y"))]
    values = {f"{c}.{t}": v for c in "ab" for t, v in zip("sbmv", (ONES, ZEROS, ZEROS, ONES), strict=True)}
    built = build(source)
    found, expected = step(built.model)[0], step(build(forward(apart, values)).model)[0]
    assert signature(built.model)["trainable"] == ["one", "zero", "b/scale", "b/bias"]
    assert len(signature(built.model)["running"]) == 4
    for ours, theirs in (("one", "a.s"), ("zero", "a.b"), ("b/scale", "b.s"), ("b/bias", "b.b")):
        np.testing.assert_array_equal(found[f"{ours}_grad"], expected[f"{theirs}_grad"])
    for output in ("mn", "vn", "my", "vy"):
        np.testing.assert_array_equal(found[output], expected[output])
    (note,) = built.notes
    assert note == (
        "gave 6 tensors that were merged with others of equal values a copy of their own "
        "(a/running_var, b/scale, b/running_var and 3 more)"
    )


def test_names_come_back_from_what_torchs_exporter_says(forward):
    nodes = [norm_of_module(x, y, ["b2.weight", "b2.bias", "b2.bias", "b2.weight"], m) for x, y, m in PAIR]
    names = [f"{m}.{what}" for m in ("b1", "b2") for what in ("weight", "bias")]
    buffers = [f"{m}.running_{what}" for m in ("b1", "b2") for what in ("mean", "var")]
    source = signed(forward(nodes, {"b2.weight": ONES, "b2.bias": ZEROS}), names, buffers)
    found = signature(build(source, train_bn=True).model)
    assert found["trainable"] == names and list(found["running"]) == buffers and found["frozen"] == []


PAIR = (("x", "n", "b1"), ("n", "y", "b2"))


def test_two_batch_norms_that_share_only_a_statistic_get_one_each(forward):
    values = {f"{c}.{t}": np.full(3, 0.5 + index, np.float32) for index, c in enumerate("ab") for t in "sbv"}
    nodes = [norm(c, x, y, [f"{c}.s", f"{c}.b", "mean", f"{c}.v"]) for c, x, y in (("a", "x", "n"), ("b", "n", "y"))]
    found = signature(build(forward(nodes, {**values, "mean": ZEROS})).model)
    assert list(found["running"]) == ["mean", "a.v", "b/running_mean", "b.v"]


def test_a_batch_norm_that_torchs_exporter_calls_twice_keeps_its_statistics(forward):
    """Even where its tensors were merged."""
    nodes = [norm_of_module(x, y, ["b1.weight", "b1.bias", "b1.bias", "b1.weight"], "b1") for x, y, _ in PAIR]
    source = signed(
        forward(nodes, {"b1.weight": ONES, "b1.bias": ZEROS}), ["b1.weight", "b1.bias"], ["b1.running_mean"]
    )
    found = signature(build(source, train_bn=True).model)
    assert found["trainable"] == ["b1.weight", "b1.bias"] and len(found["running"]) == 2


def convolution(name: str, x: str, y: str, weight: str, said: str, bias: str = "") -> onnx.NodeProto:
    node = helper.make_node("Conv", [x, weight, *([bias] if bias else [])], [y], name=name)
    return called(node, name, "aten.conv2d.default", [f"%{x}", f"%{said}"], name) if said else node


@pytest.mark.parametrize(
    ("second", "expected"), [("p_c2_weight", ["c1.weight", "c2.weight"]), ("p_c1_weight", ["c1.weight"])]
)
def test_convolutions_share_a_weight_only_where_the_module_does(forward, second, expected):
    nodes = [
        convolution("c1", "x", "a", "c1.weight", "p_c1_weight"),
        convolution("c2", "a", "y", "c1.weight", second),
    ]
    weight = np.random.default_rng(0).standard_normal((3, 3, 1, 1)).astype(np.float32)
    found = signature(build(signed(forward(nodes, {"c1.weight": weight}), ["c1.weight", "c2.weight"])).model)
    assert found["trainable"] == expected


def test_a_weight_stays_shared_where_nothing_says_otherwise(forward):
    nodes = [convolution(name, x, y, "w", "", "b") for name, x, y in (("c1", "x", "a"), ("c2", "a", "y"))]
    built = build(forward(nodes, {"w": np.ones((3, 3, 1, 1), np.float32), "b": ZEROS}))
    assert signature(built.model)["trainable"] == ["w", "b"]


def test_equal_biases_of_different_weights_come_apart(forward):
    rng = np.random.default_rng(0)
    nodes = [convolution(name, x, y, f"{name}.w", "", "b") for name, x, y in (("c1", "x", "a"), ("c2", "a", "y"))]
    weights = {f"{name}.w": rng.standard_normal((3, 3, 1, 1)).astype(np.float32) for name in ("c1", "c2")}
    assert signature(build(forward(nodes, {**weights, "b": ZEROS})).model)["trainable"] == [
        "c1.w",
        "b",
        "c2.w",
        "c2/bias",
    ]
