"""A training graph without the initial values of its state: what a step keeps of it, for it has newer ones in memory.

They would be a second copy of all parameters, for as long as the step lives. What is left says which ones they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.graph.training_graph import TrainingGraph, open_graph

KEY = "bnfuse_initial_values"  # in the metadata: their digest


def without_values(graph: TrainingGraph) -> bytes:
    """Serialize a training graph without the initial values of parameters and running statistics, which stay inputs.

    Raises BnfuseError where the graph has none for one of them.
    """
    model = _freed(graph)
    found = hashlib.sha256()
    for name, value in sorted(graph.state().items()):
        found.update(repr((name, value.shape, str(value.dtype))).encode(errors="backslashreplace") + value.tobytes())
    model.metadata_props.add(key=KEY, value=found.hexdigest()[:16])
    return model.SerializeToString()


def structure_of(graph: TrainingGraph) -> str:
    """Hash a training graph but for the initial values of its state."""
    return hashlib.sha256(_freed(graph).SerializeToString(deterministic=True)).hexdigest()


def _freed(graph: TrainingGraph) -> onnx.ModelProto:
    state, model = graph.state(), ir.to_proto(graph.model)
    constants = [tensor for tensor in model.graph.initializer if tensor.name not in state]
    del model.graph.initializer[:]
    model.graph.initializer.extend(_within(tensor, graph) for tensor in constants)
    return model


def _within(tensor: onnx.TensorProto, graph: TrainingGraph) -> onnx.TensorProto:
    """Give a tensor that holds its own values: where a file has them now it may have others later."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return tensor
    value = graph.model.graph.initializers[tensor.name].const_value
    assert value is not None
    return onnx.numpy_helper.from_array(value.numpy(), tensor.name)


def with_values(model: bytes, state: Mapping[str, np.ndarray]) -> TrainingGraph:
    """Open what `without_values` gave, with the values of a step's state in the place of those that it was freed of."""
    found = onnx.ModelProto.FromString(model)
    there = {tensor.name for tensor in found.graph.initializer}
    missing = {name: value for name, value in state.items() if name not in there}
    found.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in missing.items())
    return open_graph(found, name="the step's model")


def digest_of_values(model: onnx.ModelProto) -> str:
    """Read the digest of the initial values that a model was freed of; '' where it holds them itself."""
    return next((entry.value for entry in model.metadata_props if entry.key == KEY), "")
