"""Operators that ONNX defines by others, written out by that definition.

Shapes in it are computed from the operands; they are folded afterwards, since all of them are static.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

from bnfuse.graph.protos import fresh

from .writer import Writer

EXPANDED = (
    *("Attention", "BlackmanWindow", "CausalConvWithState", "CenterCropPad", "HammingWindow"),
    *("HannWindow", "LinearAttention", "RotaryEmbedding", "Shrink", "SwiGLU"),
)


def expand(write: Writer) -> None:
    """Write the node by the body of its definition. Raises where that has control flow."""
    function = _body(write)
    node = write.node
    names: dict[str, str] = {"": ""}
    for index, formal in enumerate(function.input):
        names[formal] = write.operand(index)
    results = dict(zip(function.output, node.output, strict=False))
    names.update({formal: actual for formal, actual in results.items() if actual})
    defaults = {attr.name: attr for attr in function.attribute_proto}
    schema = onnx.defs.get_schema(node.op_type, write.forward.opset)
    defaults |= {name: attr.default_value for name, attr in schema.attributes.items() if attr.default_value.name}
    given = defaults | {attr.name: attr for attr in node.attribute}
    for inner in function.node:
        copy = helper.make_node(inner.op_type, [], [], name=write.around.fresh(f"{node.name}/{inner.op_type.lower()}"))
        for formal in inner.input:
            copy.input.append(names.get(formal, formal))
        for formal in inner.output:
            if formal not in names:
                names[formal] = write.around.fresh(f"{node.name}/{formal}")
            copy.output.append(names[formal])
        for attr in inner.attribute:
            if attr.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
                raise write.error("is defined by control flow, which cannot be trained. Export the model without it.")
            if not attr.ref_attr_name:
                copy.attribute.append(attr)
            elif attr.ref_attr_name in given:
                bound = copy.attribute.add()
                bound.CopyFrom(given[attr.ref_attr_name])
                bound.name = attr.name
        write.nodes.append(copy)


def _body(write: Writer) -> onnx.FunctionProto:
    node, around, opset = write.node, write.around, write.forward.opset
    schema: Any = onnx.defs.get_schema(node.op_type, opset)  # its stubs lack what it knows of functions
    function = onnx.FunctionProto()
    if schema.has_function:
        versions = schema.function_opset_versions
        version = max([version for version in versions if version <= opset] or [min(versions)])
        function.ParseFromString(schema.get_function_with_opset_version(version))
        return function
    kinds = []
    for name in node.input:
        kind = onnx.TypeProto()
        if name:
            kind = helper.make_tensor_type_proto(around.types[name], write.shape(name))
        kinds.append(kind.SerializeToString())
    versions = [version for version in schema.context_dependent_function_opset_versions if version <= opset]
    whole = onnx.NodeProto()
    whole.CopyFrom(node)
    for index, name in enumerate(whole.output):  # some definitions ask for every result
        whole.output[index] = name or fresh(f"{node.name}/{index}", around.taken)
    made = schema.get_context_dependent_function_with_opset_version(max(versions), whole.SerializeToString(), kinds)
    function.ParseFromString(made)
    if not function.node:
        raise write.error("has no definition by other operators for these operands. Export it in parts.")
    return function
