"""What a step keeps of its graph: all but the values that it has in its own memory."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from small_training import small_graph

from bnfuse.graph.initial_values import Bare, digest_of_values, with_values
from bnfuse.graph.training_graph import TrainingGraph, open_graph


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    return open_graph(small_graph())


def initializers(data: bytes) -> set[str]:
    return {tensor.name for tensor in onnx.ModelProto.FromString(data).graph.initializer}


def test_values_of_the_state_are_left_out_and_constants_stay(graph: TrainingGraph) -> None:
    everything = set(graph.model.graph.initializers)
    assert initializers(Bare(graph).serialized()) == everything - graph.state().keys()
    assert set(graph.model.graph.initializers) == everything  # the graph itself has them still


def test_constants_that_lie_in_another_file_are_taken_from_it(graph: TrainingGraph, tmp_path: pathlib.Path) -> None:
    path, options = tmp_path / "t.onnx", {"save_as_external_data": True, "size_threshold": 0}
    onnx.save_model(small_graph(), path, location="t.data", **options)
    kept = [onnx.ModelProto.FromString(Bare(each).serialized()) for each in (open_graph(ir.load(path)), graph)]
    apart, within = ({tensor.name: tensor for tensor in model.graph.initializer} for model in kept)
    assert apart.keys() == within.keys() and apart
    for name, tensor in apart.items():
        assert tensor.data_location == onnx.TensorProto.DEFAULT
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), onnx.numpy_helper.to_array(within[name]))


def test_values_come_back_as_they_are_by_then(graph: TrainingGraph) -> None:
    now = {name: value + 1 for name, value in graph.state().items()}
    found = with_values(Bare(graph).serialized(), now)
    assert found.signature == graph.signature
    assert found.state().keys() == now.keys()
    assert all(np.array_equal(value, now[name]) for name, value in found.state().items())


def test_what_holds_its_values_is_opened_as_it_is(graph: TrainingGraph) -> None:
    """As in the file of a step of an older version."""
    whole = small_graph().SerializeToString()
    found = with_values(whole, {name: value + 1 for name, value in graph.state().items()})
    assert all(np.array_equal(value, graph.state()[name]) for name, value in found.state().items())
    assert digest_of_values(onnx.ModelProto.FromString(whole)) == ""


def test_other_values_have_another_digest(graph: TrainingGraph) -> None:
    other = small_graph()
    trained = graph.signature.trainable[0]
    (tensor,) = (tensor for tensor in other.graph.initializer if tensor.name == trained)
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) + 1, trained))
    digests = [
        digest_of_values(onnx.ModelProto.FromString(Bare(open_graph(g)).serialized())) for g in (other, small_graph())
    ]
    assert digests[0] != digests[1] == digest_of_values(onnx.ModelProto.FromString(Bare(graph).serialized()))
