"""Networks that sample maps, or read padded batches, are lowered with their gradients for CPUs and GPUs."""

from __future__ import annotations

import numpy as np
import pytest
from decomposed import floats, model_of
from onnx import TensorProto, helper

from bnfuse.build import build_training_graph
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.compile import lower_graph


def sampled() -> TrainingGraph:
    """A deformed convolution, read along a grid that is computed, folded."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "ow"], ["o"], "offsets", pads=[1] * 4),
        node("DeformConv", ["x", "w", "o"], ["d"], "deform", pads=[1] * 4),
        node("Conv", ["d", "gw"], ["g0"], "grid"),
        node("Transpose", ["g0"], ["g1"], "turned", perm=[0, 2, 3, 1]),
        node("GridSample", ["d", "g1"], ["s"], "sample", padding_mode="reflection"),
        node("Reshape", ["s", "columns"], ["c"], "columns"),
        node("Col2Im", ["c", "image", "block"], ["y"], "fold"),
    ]
    values = {
        "ow": floats(18, 3, 3, 3, low=-0.3, high=0.3),
        "w": floats(4, 3, 3, 3, seed=1),
        "gw": floats(2, 4, 1, 1, seed=2),
        "columns": np.array([2, 4, 36]),
        "image": np.array([7, 7]),
        "block": np.array([2, 2]),
    }
    model = model_of(nodes, {"x": floats(2, 3, 6, 6)}, values)
    return open_graph(build_training_graph(model, loss="mse"))


def padded() -> TrainingGraph:
    """Lengths are computed from the data."""
    nodes = [
        helper.make_node("Slice", ["x", "zero", "one", "last"], ["first"], "first"),
        helper.make_node("Abs", ["first"], ["size"], "size"),
        helper.make_node("ReduceSum", ["size", "over"], ["count"], "count", keepdims=0),
        helper.make_node("Cast", ["count"], ["lengths"], "lengths", to=TensorProto.INT32),
        helper.make_node("GRU", ["x", "w", "r", "", "lengths"], ["y"], "gru", hidden_size=4),
    ]
    values = {"w": floats(1, 12, 5), "r": floats(1, 12, 4, seed=1)}
    axes = {"zero": np.array([0]), "one": np.array([1]), "last": np.array([2]), "over": np.array([0, 2])}
    return open_graph(build_training_graph(model_of(nodes, {"x": floats(4, 3, 5)}, {**values, **axes}), loss="mse"))


@pytest.mark.parametrize(("target", "precision"), [("cpu", None), ("cuda:sm_90", "fp32"), ("cuda:sm_90", "bf16")])
@pytest.mark.parametrize("graph_of", [sampled, padded])
def test_there_are_kernels(graph_of, target, precision):
    training, _ = lower_graph(graph_of(), resolve(target, precision=precision), None)
    assert {"forward", "backward"} <= {launch.phase for launch in training.program.launches}
