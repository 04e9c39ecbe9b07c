"""Shapes and types of one node's results, by the schema of its operator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.core.errors import at_node, first_line

Type = tuple[tuple[int, ...], str]  # a static shape, and the element type as numpy names it


def result_types(
    node: ir.Node, operands: Sequence[Type | None], constants: Sequence[np.ndarray | None], opset: int
) -> list[Type]:
    """Give shape and element type of each result that has a name.

    `operands` are those of the node, None where one is left out; `constants` their elements where they are known, which
    some operators need (Reshape, Expand). Raises BnfuseError where the schema does not tell, or operands do not fit.
    """
    try:
        schema = (
            onnx.defs.get_schema(node.op_type, opset, node.domain)
            if not node.domain
            else onnx.defs.get_schema(node.op_type, domain=node.domain)
        )
    except onnx.defs.SchemaError:
        raise at_node(
            node.name or "?",
            node.op_type,
            "has an output without a shape, and no schema tells it: write it into the file",
        ) from None
    proto = ir.to_proto(node)
    types, data = {}, {}
    for name, operand, constant in zip(proto.input, operands, constants, strict=True):
        if name and operand is not None:
            element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(operand[1]))
            types[name] = onnx.helper.make_tensor_type_proto(element, operand[0])
            if constant is not None:
                data[name] = onnx.numpy_helper.from_array(constant)
    imports = [
        onnx.helper.make_opsetid("", opset),
        *([onnx.helper.make_opsetid(node.domain, 1)] if node.domain else []),
    ]
    try:
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=imports)
    except onnx.shape_inference.InferenceError as error:
        raise at_node(
            node.name or "?", node.op_type, f"does not fit its operands: {first_line(error)}: build the graph anew"
        ) from None
    return [_static_type(node, found.get(name)) for name in proto.output if name]


def _static_type(node: ir.Node, kind: onnx.TypeProto | None) -> Type:
    if (
        kind is None
        or not kind.tensor_type.HasField("shape")
        or any(not d.HasField("dim_value") for d in kind.tensor_type.shape.dim)
    ):
        raise at_node(
            node.name or "?",
            node.op_type,
            "has an output whose shape is in no file and follows from no operand's: it must be the same in every step",
        )
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
    return tuple(d.dim_value for d in kind.tensor_type.shape.dim), np.dtype(dtype).name
