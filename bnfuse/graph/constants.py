"""What follows from constants alone, computed by onnx's reference evaluator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir

from bnfuse.core.errors import at_node
from bnfuse.graph.drawing import draws
from bnfuse.graph.values import static_shape
from bnfuse.opset.result_size import result_elements

CONSTANT_ELEMENTS = 1 << 28  # the most that a result may have
FOLDED = 1 << 16  # elements of what is evaluated on the way to axes, shapes, indices


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


class Known:
    """What follows from constants and static shapes alone, and is the same in each run; evaluated when asked for.

    `variables` are no constants, even where the graph has a value for them.
    """

    def __init__(self, opset: int, file: str | None = None, variables: Iterable[ir.Value] = ()) -> None:
        self.opset, self.file = opset, file
        self._found: dict[ir.Value, np.ndarray | None] = dict.fromkeys(variables)

    def __call__(self, value: ir.Value | None) -> np.ndarray | None:
        """Give the elements of a value; None for one that is not known, or that is made of large constants."""
        if value is None:
            return None
        if value not in self._found:
            self._found[value] = self._evaluated(value)
        return self._found[value]

    def _evaluated(self, value: ir.Value) -> np.ndarray | None:
        if value.is_graph_input():
            return None
        if value.const_value is not None:
            return value.const_value.numpy()
        node = value.producer()
        if node is None or node.domain not in ("", "ai.onnx") or draws(node):
            return None
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            return None
        if node.op_type in ("Shape", "Size"):
            shape = static_shape(node.inputs[0])
            if shape is None:
                return None
            start, end = (node.attributes[k].as_int() if k in node.attributes else None for k in ("start", "end"))
            elements = np.array(math.prod(shape), np.int64)
            return np.array(shape, np.int64)[start:end] if node.op_type == "Shape" else elements
        operands = [self(operand) for operand in node.inputs]
        if any(v is not None and known is None for v, known in zip(node.inputs, operands, strict=True)):
            return None
        if sum(known.size for known in operands if known is not None) > FOLDED:
            return None
        return evaluate(node, operands, self.opset, self.file)[list(node.outputs).index(value)]
