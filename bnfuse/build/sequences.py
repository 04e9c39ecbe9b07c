"""Sequences of tensors, of which every operation is known beforehand, as the tensors that they are.

SplitToSequence(x) -> SequenceAt(0), SequenceAt(1)      Split(x)       torch's chunk and split
SequenceConstruct(a, b) -> ConcatFromSequence           Concat(a, b)   torch's cat and stack
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bnfuse.graph.protos import attributes, fresh

from .graph import Forward

Items = list[str]


def resolve_sequences(forward: Forward) -> None:
    """Replace what can be told; a sequence that depends on the data stays, and is refused where shapes are asked
    for."""
    if not any("Sequence" in node.op_type for node in forward.graph.node):
        return
    Resolver(forward).run()


class Resolver:
    """Goes through the nodes with the items of each sequence."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.known, self.shapes = forward.initializers(), forward.shapes()
        self.taken = forward.names() | {node.name for node in forward.graph.node}
        self.items: dict[str, Items] = {}
        self.named: set[str] = set()  # items that have the name by which the file reads them
        self.nodes: list[onnx.NodeProto] = []

    def run(self) -> None:
        """Write the nodes anew."""
        for node in self.forward.graph.node:
            resolve = OPERATIONS.get(node.op_type)
            if resolve is None or not resolve(self, node):
                self.nodes.append(node)
        del self.forward.graph.node[:]
        self.forward.graph.node.extend(self.nodes)

    def fresh(self, name: str) -> str:
        """Give the name, or with a number where it is taken, and take it."""
        name = fresh(name, self.taken)
        self.taken.add(name)
        return name

    def position(self, node: onnx.NodeProto, index: int, default: int | None = None) -> int | None:
        """Give the constant operand `index`, `default` where there is none, None where it is computed."""
        if index >= len(node.input) or not node.input[index]:
            return default
        tensor = self.known.get(node.input[index])
        return None if tensor is None else int(numpy_helper.to_array(tensor).item())

    def constant(self, name: str, values: np.ndarray) -> str:
        """Add an initializer of that name."""
        tensor = numpy_helper.from_array(values, name)
        self.forward.graph.initializer.append(tensor)
        self.known[name], self.shapes[name] = tensor, list(values.shape)
        return name

    def add(self, op: str, inputs: Items, outputs: Items, name: str, **attrs: Any) -> None:
        """Write a node."""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, **attrs))


def _split(of: Resolver, node: onnx.NodeProto) -> bool:
    shape, given = of.shapes.get(node.input[0]), attributes(node)
    has_lengths = len(node.input) > 1 and bool(node.input[1])
    if shape is None or (has_lengths and node.input[1] not in of.known):
        return False
    axis = given.get("axis", 0) % len(shape)
    sizes = numpy_helper.to_array(of.known[node.input[1]]) if has_lengths else np.array(1)
    if sizes.ndim == 0:
        whole, rest = divmod(shape[axis], int(sizes))
        sizes = np.array([int(sizes)] * whole + [rest] * bool(rest))
    outputs = [of.fresh(f"{node.name}/{index}") for index in range(len(sizes))]
    lengths = of.constant(of.fresh(f"{node.name}/lengths"), sizes.astype(np.int64))
    of.add("Split", [node.input[0], lengths], outputs, node.name, axis=axis)
    if not has_lengths and not given.get("keepdims", 1):
        axes = of.constant(of.fresh(f"{node.name}/axes"), np.array([axis], np.int64))
        parts, outputs = outputs, [of.fresh(f"{name}/squeezed") for name in outputs]
        for part, output in zip(parts, outputs, strict=True):
            of.add("Squeeze", [part, axes], [output], of.fresh(f"{node.name}/squeeze"))
    of.items[node.output[0]] = outputs
    return True


def _construct(of: Resolver, node: onnx.NodeProto) -> bool:
    of.items[node.output[0]] = list(node.input)
    of.named.update(node.input)
    return True


def _insert(of: Resolver, node: onnx.NodeProto) -> bool:
    items = of.items.get(node.input[0])
    if items is None or (place := of.position(node, 2, len(items))) is None:
        return False
    place += len(items) * (place < 0)
    of.items[node.output[0]] = [*items[:place], node.input[1], *items[place:]]
    of.named.add(node.input[1])
    return True


def _erase(of: Resolver, node: onnx.NodeProto) -> bool:
    items = of.items.get(node.input[0])
    if items is None or (place := of.position(node, 1, -1)) is None:
        return False
    place %= len(items)
    of.items[node.output[0]] = [*items[:place], *items[place + 1 :]]
    return True


def _at(of: Resolver, node: onnx.NodeProto) -> bool:
    items, place = of.items.get(node.input[0]), of.position(node, 1)
    if items is None or place is None or not -len(items) <= place < len(items):
        return False
    item = items[place]
    maker = next((made for made in reversed(of.nodes) if item in made.output), None)
    if maker is None or item in of.named or any(item in made.input for made in of.nodes):
        of.add("Identity", [item], list(node.output), node.name)
        return True
    maker.output[list(maker.output).index(item)] = node.output[0]
    of.named.add(node.output[0])
    for sequence, names in of.items.items():
        of.items[sequence] = [node.output[0] if name == item else name for name in names]
    return True


def _length(of: Resolver, node: onnx.NodeProto) -> bool:
    if (items := of.items.get(node.input[0])) is None:
        return False
    of.constant(node.output[0], np.array(len(items), np.int64))
    return True


def _concat(of: Resolver, node: onnx.NodeProto) -> bool:
    items, given = of.items.get(node.input[0]), attributes(node)
    if items is None:
        return False
    axis = given["axis"]
    if given.get("new_axis"):
        axes = of.constant(of.fresh(f"{node.name}/axes"), np.array([axis], np.int64))
        parts, items = items, [of.fresh(f"{node.name}/{index}") for index in range(len(items))]
        for part, item in zip(parts, items, strict=True):
            of.add("Unsqueeze", [part, axes], [item], of.fresh(f"{node.name}/unsqueeze"))
    of.add("Concat", items, list(node.output), node.name, axis=axis)
    return True


OPERATIONS: dict[str, Callable[[Resolver, onnx.NodeProto], bool]] = {
    "ConcatFromSequence": _concat,
    "SequenceAt": _at,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _construct,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
    "SplitToSequence": _split,
}
