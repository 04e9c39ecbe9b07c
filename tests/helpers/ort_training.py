"""The gradients of onnxruntime-training, a second oracle: tests that ask it are marked `ort_training`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import onnx
from ort_definitions import register_definitions

from bnfuse.graph.signature import GraphSignature
from bnfuse.opset.spec import DOMAIN
from bnfuse.ort.library import SILENT, training_library


def training_gradients(model: onnx.ModelProto, wanted: Sequence[str], loss: str) -> onnx.ModelProto:
    """A model with the gradients of its scalar `loss` as further outputs: `<name>_grad` of each `wanted` input.

    What is wanted has to be an input without a value. Raises where the builder refuses.
    """
    library, names = builder(), set(wanted)
    options = library.SessionOptions()
    options.log_severity_level = SILENT
    optimised = library.get_optimized_model(model.SerializeToString(), names, options)
    made = library.GradientGraphBuilder(optimised, {loss}, names, loss, options)
    made.build()
    return onnx.load_from_string(made.get_model())


@functools.cache
def builder() -> ModuleType:
    """The library, with definitions of what it lacks."""
    library = training_library("its gradient builder")
    register_definitions(library)
    return library


def forward_of(model: onnx.ModelProto, signature: GraphSignature) -> onnx.ModelProto:
    """The forward part of a training graph, from its inputs without values to loss and running statistics.

    A whole BatchNorm of ours is BatchNormalization again, which the builder knows.
    """
    forward = onnx.ModelProto()
    forward.CopyFrom(model)
    graph = forward.graph
    needed = {signature.loss, *signature.running.values()}
    kept = []
    for node in reversed(model.graph.node):
        if not needed.intersection(node.output):
            continue
        needed.update(node.input)
        kept.append(onnx.NodeProto())
        kept[-1].CopyFrom(node)
        if (node.domain, node.op_type) == (DOMAIN, "BatchNorm"):
            kept[-1].op_type, kept[-1].domain = "BatchNormalization", ""
            kept[-1].attribute.append(onnx.helper.make_attribute("training_mode", 1))
            del kept[-1].output[3:]
    outputs = [value for value in graph.output if value.name in {signature.loss, *signature.running.values()}]
    inputs = {value.name for value in graph.input}
    constants = [tensor for tensor in graph.initializer if tensor.name in needed - inputs]
    del graph.node[:], graph.output[:], graph.initializer[:], forward.functions[:]
    graph.node.extend(reversed(kept))
    graph.output.extend(outputs)
    graph.initializer.extend(constants)
    return forward
