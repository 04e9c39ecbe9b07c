"""Normalisations are what they are made of."""

from __future__ import annotations

import numpy as np
import pytest
from decomposed import by_reference, check_same, floats, ints, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

SHAPES = {3: (2, 6, 5), 4: (2, 6, 4, 3), 5: (2, 6, 3, 2, 2)}


@pytest.mark.parametrize("rank", SHAPES)
def test_instance_normalization(rank):
    feeds, values = {"x": floats(*SHAPES[rank])}, {"s": floats(6, seed=1), "b": floats(6, seed=2)}
    node = helper.make_node("InstanceNormalization", ["x", "s", "b"], ["y"], epsilon=1e-3)
    made = check_same(model_of([node], feeds, values), feeds, variables=["s", "b"])
    assert {"s", "b"} <= {tensor.name for tensor in made.graph.initializer}


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("opset", [18, 21])
def test_group_normalization(rank, groups, opset):
    count = 6 if opset == 21 else groups
    feeds, values = {"x": floats(*SHAPES[rank])}, {"s": floats(count, seed=1), "b": floats(count, seed=2)}
    node = helper.make_node("GroupNormalization", ["x", "s", "b"], ["y"], epsilon=1e-3, num_groups=groups)
    model = model_of([node], feeds, values, opset=opset)
    check_same(model, feeds, variables=["s", "b"], before=by_reference)


@pytest.mark.parametrize("shape", SHAPES.values())
def test_group_normalization_as_torch_writes_it_leaves_maps_as_they_are(shape):
    feeds = {"x": floats(*shape)}
    values = {"to": ints(0, 3, -1), "back": ints(*shape), "s": floats(6, *[1] * (len(shape) - 2), seed=1)}
    values |= {"one": np.ones(3, np.float32), "zero": np.zeros(3, np.float32)}
    nodes = [
        helper.make_node("Reshape", ["x", "to"], ["r"]),
        helper.make_node("InstanceNormalization", ["r", "one", "zero"], ["i"]),
        helper.make_node("Reshape", ["i", "back"], ["g"]),
        helper.make_node("Mul", ["g", "s"], ["y"]),
    ]
    made = check_same(model_of(nodes, feeds, values), feeds, variables=["s"])
    makers = {node.output[0]: node for node in made.graph.node}
    if len(shape) == 4:
        (norm,) = (node for node in made.graph.node if node.op_type == "GroupNorm")
        assert norm.input[0] == "x" and makers[makers["y"].input[0]] == norm
    else:
        (centring,) = (node for node in made.graph.node if node.op_type == "Sub")
        assert centring.input[0] == "x" and makers[makers["y"].input[0]].op_type == "Mul"


@given(rank=st.integers(2, 4), axis=st.integers(-4, 3), bias=st.booleans(), results=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_layer_normalization(rank, axis, bias, results):
    axis = axis % rank
    shape = (2, 3, 4, 5)[:rank]
    feeds = {"x": floats(*shape)}
    values = {"s": floats(*shape[axis:], seed=1), "b": floats(*shape[axis:], seed=2)}
    names, outputs = ["x", "s", "b"][: 2 + bias], ["y", "mean", "inverse"][:results]
    node = helper.make_node("LayerNormalization", names, outputs, axis=axis, epsilon=1e-3)
    kept = {name: value for name, value in values.items() if name in names}
    check_same(model_of([node], feeds, kept, outputs=outputs), feeds, before=by_reference, variables=["s", "b"])


def test_rms_normalization_of_opset_23():
    feeds, values = {"x": floats(2, 3, 8)}, {"s": floats(8, seed=1)}
    node = helper.make_node("RMSNormalization", ["x", "s"], ["y"], epsilon=1e-3)
    made = check_same(model_of([node], feeds, values, opset=23), feeds, before=by_reference, variables=["s"])
    assert made.opset_import[0].version == 21


@pytest.mark.parametrize("axes", [[0, 2, 3], [1], [2, 3]])
def test_mean_variance_normalization(axes):
    feeds = {"x": floats(2, 3, 4, 5)}
    node = helper.make_node("MeanVarianceNormalization", ["x"], ["y"], axes=axes)
    check_same(model_of([node], feeds), feeds, tolerance=1e-5)


@given(size=st.sampled_from([1, 3, 5, 7]), beta=st.sampled_from([0.5, 0.75]))
@settings(max_examples=8, deadline=None)
def test_local_response_normalization(size, beta):
    feeds = {"x": floats(*SHAPES[4], low=-2, high=2)}
    node = helper.make_node("LRN", ["x"], ["y"], size=size, alpha=0.3, beta=beta, bias=1.5)
    check_same(model_of([node], feeds), feeds)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [-1, 1])
def test_lp_normalization(p, axis):
    feeds = {"x": floats(2, 3, 4)}
    check_same(model_of([helper.make_node("LpNormalization", ["x"], ["y"], p=p, axis=axis)], feeds), feeds)
