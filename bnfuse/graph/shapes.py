"""Shapes of every tensor of a training graph, as value_info.

What a file leaves out follows from the operands, by onnx's own inference, which knows our operators and onnxruntime's
training operators once they are registered.
"""

from __future__ import annotations

import onnx

from bnfuse.core.errors import at_node
from bnfuse.graph.protos import shapes_of, static_shape, typed_values, without_large_values
from bnfuse.opset.schemas import register_for


def complete_shapes(model: onnx.ModelProto, file: str | None = None) -> None:
    """Add the shapes that are missing. Raises BnfuseError where one cannot be told."""
    if missing(model):
        register_for(model)
        adopt_inferred(model)
    left = missing(model)
    if left:
        node, name = left[0]
        raise at_node(
            node.name,
            node.op_type,
            f"gives '{name}', whose shape neither the file nor the operator tells: it cannot be trained here.",
            file=file,
        )


def missing(model: onnx.ModelProto) -> list[tuple[onnx.NodeProto, str]]:
    """List the results whose shapes are not known, with their nodes."""
    shapes = shapes_of(model.graph)
    return [(node, name) for node in model.graph.node for name in node.output if name and shapes.get(name) is None]


def adopt_inferred(model: onnx.ModelProto) -> None:
    """Take over the shapes that onnx infers where the file has none."""
    inferred = onnx.shape_inference.infer_shapes(without_large_values(model), data_prop=True)
    known = {v.name for v in typed_values(model.graph) if static_shape(v) is not None}
    found = {v.name: v for v in inferred.graph.value_info if v.name not in known and static_shape(v) is not None}
    stale = [v for v in model.graph.value_info if v.name in found]
    for value in stale:
        model.graph.value_info.remove(value)
    model.graph.value_info.extend(found.values())
    for value in model.graph.output:
        if value.name not in known and value.name in {v.name for v in inferred.graph.output}:
            value.CopyFrom(next(v for v in inferred.graph.output if v.name == value.name))
