"""A training graph without the initial values of its state: what a step keeps of it, for it has newer ones in memory.

They would be a second copy of all parameters, for as long as the step lives. What is left says which ones they were.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.graph.training_graph import TrainingGraph, open_graph

KEY = "bnfuse_initial_values"  # in the metadata: their digest


@dataclasses.dataclass(frozen=True)
class Bare:
    """A training graph, and its model without the initial values of its state, which is made once, when asked for.

    Raises BnfuseError then where the graph has none for a parameter or a running statistic.
    """

    graph: TrainingGraph

    @functools.cached_property
    def model(self) -> onnx.ModelProto:
        """Give the model. Parameters and running statistics stay inputs."""
        state, model = self.graph.state(), ir.to_proto(self.graph.model)
        constants = [tensor for tensor in model.graph.initializer if tensor.name not in state]
        del model.graph.initializer[:]
        model.graph.initializer.extend(_within(tensor, self.graph) for tensor in constants)
        return model

    @property
    def structure(self) -> str:
        """Hash the model: which values were there makes no difference."""
        return hashlib.sha256(self.model.SerializeToString(deterministic=True)).hexdigest()

    def serialized(self) -> bytes:
        """Serialize the model, with a digest of the values that it was freed of."""
        found = hashlib.sha256()
        for name, value in sorted(self.graph.state().items()):
            found.update(
                repr((name, value.shape, str(value.dtype))).encode(errors="backslashreplace") + value.tobytes()
            )
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        model.metadata_props.add(key=KEY, value=found.hexdigest()[:16])
        return model.SerializeToString()


def _within(tensor: onnx.TensorProto, graph: TrainingGraph) -> onnx.TensorProto:
    """Give a tensor that holds its own values: where a file has them now it may have others later."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return tensor
    value = graph.model.graph.initializers[tensor.name].const_value
    assert value is not None
    return onnx.numpy_helper.from_array(value.numpy(), tensor.name)


def with_values(model: bytes, state: Mapping[str, np.ndarray]) -> TrainingGraph:
    """Open what `Bare.serialized` gave, with the values of a step's state in the place of those that were left out."""
    found = onnx.ModelProto.FromString(model)
    there = {tensor.name for tensor in found.graph.initializer}
    missing = {name: value for name, value in state.items() if name not in there}
    found.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in missing.items())
    return open_graph(found, name="the step's model")


def digest_of_values(model: onnx.ModelProto) -> str:
    """Read the digest of the initial values that a model was freed of; '' where it holds them itself."""
    return next((entry.value for entry in model.metadata_props if entry.key == KEY), "")
