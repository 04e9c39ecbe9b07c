"""What follows from constants alone, computed by onnx's reference evaluator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir

from bnfuse.core.errors import at_node
from bnfuse.opset.result_size import result_elements

CONSTANT_ELEMENTS = 1 << 28  # the most that a result may have


def evaluate(
    node: ir.Node, operands: Sequence[np.ndarray | None], opset: int, file: str | None = None
) -> list[np.ndarray]:
    """Compute the results of a node of the standard domain whose operands are known.

    Raises BnfuseError where a result would have more than CONSTANT_ELEMENTS.
    """
    proto = ir.to_proto(node)
    names = [f"in{i}" for i in range(len(operands))]
    copy = onnx.helper.make_node(
        proto.op_type, [n if o is not None else "" for n, o in zip(names, operands, strict=True)], list(proto.output)
    )
    copy.attribute.extend(proto.attribute)
    feeds = {n: o for n, o in zip(names, operands, strict=True) if o is not None}
    size = result_elements(copy, feeds, opset)
    if size > CONSTANT_ELEMENTS:
        what = f"makes a constant of {size:.0f} elements: no network has that many in one tensor. Correct the file."
        raise at_node(node.name or "?", node.op_type, what, file=file)
    graph = onnx.helper.make_graph(
        [copy],
        "node",
        [
            onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(o.dtype), o.shape)
            for n, o in feeds.items()
        ],
        [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in proto.output if name],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    results = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    return [np.asarray(result) for result in results]
