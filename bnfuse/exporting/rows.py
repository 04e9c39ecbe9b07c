"""Virtual samples taken out of an inference graph, so that every map has the rows of the data and no others.

    t = Concat(virtual, data)  axis 0                         data
    y = network(t)                                  ->        y = network(data)
    logits = Slice(y)  rows from n_v on                       y

Each row of a network by running statistics is computed for itself, so it may be left out. Rows are followed through
Concat, Split, Slice and Gather along axis 0; where such a node gives the rows of the data, all of them in their order,
with virtual ones among them or not, its result is the map that the rows came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import at_node
from bnfuse.graph.training_graph import put_in_place

VIRTUAL = -1


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of the data a value has (-1: a virtual one), and the whole map that they are of."""

    ids: np.ndarray
    whole: ir.Value


def whole_rows(graph: ir.Graph, data: Sequence[str], virtual: Sequence[str]) -> None:
    """Take virtual samples out, in place. Graphs without them stay as they are."""
    if not virtual:
        return
    sources = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    count = int(sources[data[0]].shape[0])  # type: ignore[index, arg-type]
    known: dict[ir.Value, Rows] = {}
    for name in data:
        known[sources[name]] = Rows(np.arange(count), sources[name])
    for name in virtual:
        rows = int(sources[name].shape[0])  # type: ignore[index, arg-type]
        known[sources[name]] = Rows(np.full(rows, VIRTUAL), sources[data[0]])
    for node in list(graph):
        _follow(graph, node, known, count)


def _follow(graph: ir.Graph, node: ir.Node, known: dict[ir.Value, Rows], count: int) -> None:
    inputs = [value for value in node.inputs if value is not None and value in known]
    if not inputs:
        return
    if not moves_rows(node):
        for value in node.outputs:
            own = max((known[v] for v in inputs), key=lambda rows: len(rows.ids))
            if value.shape is not None and len(value.shape) and value.shape[0] == len(own.ids):
                known[value] = Rows(own.ids, value)
        return
    for value, ids in zip(node.outputs, moved(node, known), strict=False):
        whole = next(known[v].whole for v in inputs)
        real = ids[ids != VIRTUAL]
        if np.array_equal(real, np.arange(count)):
            put_in_place(value, whole)
            known[whole] = Rows(ids, whole)
        else:
            known[value] = Rows(ids, whole)


def moves_rows(node: ir.Node) -> bool:
    """Tell whether the node takes rows out of maps, or puts maps below one another."""
    if node.domain:
        return False
    if node.op_type in ("Concat", "Split", "Gather"):
        axis = node.attributes.get("axis")
        return (0 if axis is None else int(axis.value)) == 0
    return node.op_type == "Slice" and (len(node.inputs) < 4 or 0 in constant(node, 3))


def moved(node: ir.Node, known: dict[ir.Value, Rows]) -> list[np.ndarray]:
    """List the rows of the results."""
    if node.op_type.startswith("Concat"):
        if any(value not in known for value in node.inputs):
            raise at_node(node.name or "", node.op_type, "puts rows of other maps among those of the data")
        return [np.concatenate([known[value].ids for value in node.inputs])]  # type: ignore[index]
    ids = known[node.inputs[0]].ids  # type: ignore[index]
    if node.op_type == "Gather":
        return [ids[constant(node, 1).reshape(-1)]]
    if node.op_type == "Slice":
        axes = constant(node, 3) if len(node.inputs) > 3 else np.arange(len(constant(node, 1)))
        place = int(np.flatnonzero(axes == 0)[0])
        steps = constant(node, 4) if len(node.inputs) > 4 else np.ones_like(axes)
        return [ids[slice(int(constant(node, 1)[place]), int(constant(node, 2)[place]), int(steps[place]))]]
    sizes = constant(node, 1) if len(node.inputs) > 1 else np.full(len(node.outputs), len(ids) // len(node.outputs))
    return np.split(ids, np.cumsum(sizes)[:-1])


def constant(node: ir.Node, place: int) -> np.ndarray:
    """Give the value of a constant operand. Raises BnfuseError where it is computed."""
    value = node.inputs[place]
    if value is None or (array := ir.convenience.get_const_tensor(value)) is None:
        raise at_node(node.name or "", node.op_type, "moves rows by something that is no constant")
    return array.numpy()
