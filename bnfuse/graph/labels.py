"""How many classes integer labels run over, as what reads them in the graph says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir

from bnfuse.graph.signature import INTEGERS, LOSSES
from bnfuse.graph.values import static_shape

MOVED = ("Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
INDEXING = {"Gather": 1, "GatherElements": 1, "ScatterElements": 1}  # op -> the operand with indices along its axis


@dataclasses.dataclass(frozen=True)
class Classes:
    """Labels from 0 to count - 1, and one more that is left out; `exact` where any other label would be an error."""

    count: int
    ignored: int | None = None
    exact: bool = True


def classes_of(graph: ir.Graph, labels: Iterable[str]) -> dict[str, Classes]:
    """Give the classes of each input with integer labels, of which a loss, a gather or a one-hot code tells."""
    inputs = {value.name: value for value in graph.inputs}
    found: dict[str, Classes] = {}
    for name in labels:
        value = inputs.get(name)
        if value is not None and value.dtype in INTEGERS and (read := readings(value)):
            found[name] = common(read)
    return found


def common(read: list[Classes]) -> Classes:
    """Give the classes that all readers have: the fewest of those that are exact, where there are such."""
    exact = [one for one in read if one.exact]
    chosen = min(exact or read, key=lambda one: one.count)
    ignored = {one.ignored for one in exact}
    return dataclasses.replace(chosen, ignored=chosen.ignored if len(ignored) == 1 else None)


def readings(labels: ir.Value) -> list[Classes]:
    """Find what readers say of labels, also behind operators that move them. Behind a choice (Where) and at a one-hot
    code any label is allowed."""
    found: list[Classes] = []
    pending, seen = [(labels, True)], {(labels, True)}
    while pending:
        value, exact = pending.pop()
        for node, index in value.uses():
            if node.op_type in MOVED or node.op_type == "Where":
                results = {(result, exact and node.op_type != "Where") for result in node.outputs} - seen
                seen |= results
                pending += results
            elif (classes := read_by(node, index)) is not None:
                found.append(dataclasses.replace(classes, exact=exact and classes.exact))
    return found


def read_by(node: ir.Node, index: int) -> Classes | None:
    """Tell what one reader says of labels that are its operand `index`."""
    shape = static_shape(node.inputs[0])
    if node.op_type in LOSSES and index == 1 and shape is not None and len(shape) > 1:
        ignored = node.attributes.get("ignore_index")
        return Classes(shape[1], None if ignored is None else ignored.as_int())
    if INDEXING.get(node.op_type) == index and shape:
        axis = node.attributes.get("axis")
        return Classes(shape[0 if axis is None else axis.as_int()])
    if node.op_type == "OneHot" and index == 0:
        depth = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
        return None if depth is None else Classes(int(depth.numpy().reshape(-1)[0]), exact=False)
    return None
