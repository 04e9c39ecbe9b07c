"""How large a constant will be, told before it is computed: a file of bytes can ask for terabytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx

SMALL = 1024  # elements: an operand that says how large a result is has no more


def result_elements(node: onnx.NodeProto, operands: Mapping[str, np.ndarray], opset: int) -> float:
    """Elements of the largest result of a node of the standard domain, from the shapes and values of its operands.

    As far as onnx infers them; 0 where it does not: what a shape does not follow from is no larger than the operands.
    """
    if node.op_type == "Range" and [x.size for x in operands.values()] == [1, 1, 1]:
        return range_elements(*(float(operands[name].reshape(())) for name in node.input))
    elements = onnx.helper.np_dtype_to_tensor_dtype
    types = {name: onnx.helper.make_tensor_type_proto(elements(x.dtype), x.shape) for name, x in operands.items()}
    data = {name: onnx.numpy_helper.from_array(x) for name, x in operands.items() if x.size <= SMALL}
    imports = [onnx.helper.make_opsetid("", opset)]
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        found = onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=imports)
    except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError):
        return 0  # whoever computes it says what is wrong
    return max((math.prod(dim.dim_value for dim in kind.tensor_type.shape.dim) for kind in found.values()), default=0)


def range_elements(start: float, limit: float, delta: float) -> float:
    """How many numbers lie from start to limit, of floats too, where onnx's inference counts none if they overflow;
    infinite where it is not to be told."""
    count = (limit - start) / delta if delta else math.nan
    return math.inf if math.isnan(count) else max(count, 0.0)
