"""Where the values of a training graph lie: a view holds no data, so reading it is reading the tensors that do.

    y = Concat(a, b)        y is a and b, each in its own channels
    a', b' = Split(y)       ranges of the channels of y
    z = Reshape(y)          y
    dx = ...Accumulate      lies in the channels of `acc` that it is added to, if nobody needs what they held

A concatenation of images (axis 0) is no view: the runtime copies there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from bnfuse.opset.plain import PlainOp
from bnfuse.opset.spec import DOMAIN, OpSpec, find
from bnfuse.opset.traffic import RESHAPES, channels_touched

IN_PLACE = ("AddSampled", "AddAtPoints", "LocalAddSampled")  # dx is acc, changed at the places of the sample


@dataclasses.dataclass(frozen=True)
class Piece:
    """Channels [start, stop) of a value that is stored. A vector's channels are its entries."""

    value: ir.Value
    start: int
    stop: int


Pieces = tuple[Piece, ...]


def dims(value: ir.Value) -> tuple[int, ...]:
    """Give the shape; unknown dimensions count as 1 (a loss, a vector of lengths)."""
    if value.shape is None:
        return ()
    return tuple(d if isinstance(d, int) else 1 for d in value.shape)


def size_of(value: ir.Value) -> int:
    """Count the bytes at the stored type."""
    return math.prod(dims(value)) * (value.dtype or ir.DataType.FLOAT).bitwidth // 8


def axis_of(value: ir.Value) -> int:
    """Give the axis of the channels: 1, or 0 of a vector."""
    return 0 if value.shape is None or len(value.shape) < 2 else 1


def width_of(value: ir.Value) -> int:
    """Tell how many channels a value has."""
    found = dims(value)
    return found[axis_of(value)] if found else 1


class Places:
    """The pieces of each value. With `views` a view is a copy, as any other operator."""

    def __init__(self, nodes: Sequence[ir.Node], *, views: bool) -> None:
        self._views = views
        self._of: dict[ir.Value, Pieces] = {}
        self._order = {node: index for index, node in enumerate(nodes)}
        for node in nodes:
            self._of.update(self._placed(node))

    def whole(self, value: ir.Value) -> Pieces:
        """Give the pieces of a whole value."""
        return self._of.get(value) or (Piece(value, 0, width_of(value)),)

    def channels(self, value: ir.Value, start: int, stop: int) -> Pieces:
        """Give the pieces that channels [start, stop) of a value lie in."""
        pieces = self.whole(value)
        if len(pieces) == 1 and pieces[0].value is value:
            return (Piece(value, start, stop),)
        if sum(piece.stop - piece.start for piece in pieces) != width_of(value):
            return pieces  # reshaped to other channels: all of it
        return tuple(_clipped(pieces, start, stop))

    def is_view(self, node: ir.Node) -> bool:
        """Tell whether a node moves nothing."""
        return not self._views and is_view(node)

    def _placed(self, node: ir.Node) -> Mapping[ir.Value, Pieces]:
        if self.is_view(node):
            return self._viewed(node)
        return self._in_place(node)

    def _viewed(self, node: ir.Node) -> dict[ir.Value, Pieces]:
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        if node.op_type in RESHAPES:
            return {y: self.whole(x)}
        if node.op_type == "Concat":
            return {y: tuple(piece for value in node.inputs if value is not None for piece in self.whole(value))}
        found, start = {}, 0
        for value in node.outputs:
            stop = start + width_of(value)
            found[value] = self.channels(x, start, stop)
            start = stop
        return found

    def _in_place(self, node: ir.Node) -> dict[ir.Value, Pieces]:
        op = find(node.op_type) if node.domain == DOMAIN else None
        is_accumulated = isinstance(op, OpSpec) and "Accumulate" in op.epilogue
        if op is None or not (is_accumulated or op.name in IN_PLACE):
            return {}
        acc, dx = node.inputs[op.operands.index("acc")], node.outputs[op.results.index("dx")]
        if acc is None or acc.producer() is None:
            return {}
        bounds = channels_touched(op, "acc", node) or (0, width_of(acc))
        if acc.is_graph_output() or any(self._needs(use.node, acc, bounds, node) for use in acc.uses()):
            return {}
        return {dx: self.channels(acc, *bounds)}

    def _needs(self, reader: ir.Node, acc: ir.Value, bounds: tuple[int, int], node: ir.Node) -> bool:
        """Whether a later node reads what these channels of acc held before."""
        if reader is node or self._order.get(reader, -1) < self._order[node]:
            return False
        if self.is_view(reader):
            return True
        op = find(reader.op_type) if reader.domain == DOMAIN else None
        for name in _operands_of(reader, acc, op):
            start, stop = channels_touched(op, name, reader) or (0, width_of(acc))
            if start < bounds[1] and bounds[0] < stop:
                return True
        return False


def is_view(node: ir.Node) -> bool:
    """Tell whether a node is a reshape, or a concatenation or a split along the channels."""
    if node.domain == DOMAIN or not node.inputs or node.inputs[0] is None:
        return False
    if node.op_type in RESHAPES:
        return True
    if node.op_type not in ("Concat", "Split"):
        return False
    value = node.outputs[0] if node.op_type == "Concat" else node.inputs[0]
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    return value.shape is not None and axis % max(len(value.shape), 1) == axis_of(value)


def _operands_of(node: ir.Node, value: ir.Value, op: OpSpec | PlainOp | None) -> Iterator[str]:
    names = op.operands if op else ("",) * len(node.inputs)
    for name, operand in zip(names, node.inputs, strict=False):
        if operand is value:
            yield name


def _clipped(pieces: Pieces, start: int, stop: int) -> Iterator[Piece]:
    at = 0
    for piece in pieces:
        width = piece.stop - piece.start
        first, last = max(start - at, 0), min(stop - at, width)
        if first < last:
            yield Piece(piece.value, piece.start + first, piece.start + last)
        at += width
