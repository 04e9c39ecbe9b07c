"""What lowering knows of the values of a graph: static type, constant value, and where it lies in memory.

A value may lie in memory in up to two forms: as a feature map (NHWC, perhaps a channel slot) and dense, in the
layout of the file. Operators ask for the form that they read; the other form is made when it is first asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node, first_line
from bnfuse.runtime.lowering.layout import MapRef

FOLDED_ELEMENTS = 1 << 16  # constants that take part in shape arithmetic are small
FOLDED_RESULT = 1 << 22  # elements: what is larger is not kept as a constant where a kernel can make it


@dataclasses.dataclass
class Form:
    """Where a value lies. `dense` is a storage in the file's layout; `constant` is known when lowering."""

    shape: tuple[int, ...]
    dtype: str
    map: MapRef | None = None
    dense: int | None = None
    constant: np.ndarray | None = None


def dtype_name(value: ir.Value) -> str | None:
    """Name the element type of a value as numpy does; None where the graph does not say it."""
    return None if value.dtype is None else np.dtype(value.dtype.numpy()).name


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Attributes by name, lists as tuples."""
    found = {}
    for name, attribute in node.attributes.items():
        value = attribute.value
        found[name] = tuple(value) if isinstance(value, (list, tuple)) else value
    return found


def infer_outputs(node: ir.Node, forms: Sequence[Form | None], opset: int) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the outputs of a node, by the schema of its operator. Constants help (Reshape, Expand)."""
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
    named = {name: form for name, form in zip(proto.input, forms, strict=True) if name and form is not None}
    types = {name: _type_proto(form) for name, form in named.items()}
    data = {
        name: onnx.numpy_helper.from_array(form.constant) for name, form in named.items() if form.constant is not None
    }
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


def _static_type(node: ir.Node, kind: onnx.TypeProto | None) -> tuple[tuple[int, ...], str]:
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


def _type_proto(form: Form) -> onnx.TypeProto:
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(form.dtype))
    return onnx.helper.make_tensor_type_proto(element, form.shape)


def check_elements(name: str, shape: Sequence[int]) -> int:
    """Element count. Kernels index a buffer by int32."""
    count = int(np.prod(shape, dtype=np.int64))
    if count >= 2**31:
        raise BnfuseError(f"tensor '{name}' of shape {list(shape)} has more than 2**31 elements: use a smaller batch")
    return count
