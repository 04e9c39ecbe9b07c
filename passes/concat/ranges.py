"""Ranges of channels: the pieces of a map or a vector, and what pieces make together, each made once and then shared.

Concat and Split along channels are places in memory and no work (runtime/lowering/layout.py), so passes that take
steps across them need only find, or make, the same tensors on the other side: the same value, because a mask goes into
what reads the very map that it is made from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.passes.dialect.source_ops import sizes
from bnfuse.passes.rewriter import Editor


def axis_of(value: ir.Value) -> int:
    """Give the axis of a value's channels: 1 of a map [N, C, H, W] and of coefficients [N, C], 0 of a vector [C]."""
    return 1 if len(sizes(value)) > 1 else 0


def length(value: ir.Value) -> int:
    """Count the channels of a map or a vector."""
    return sizes(value)[axis_of(value)]


def pieces(editor: Editor, value: ir.Value, lengths: Sequence[int], of: Iterable[ir.Node]) -> list[ir.Value]:
    """Cut a map or a vector into pieces of so many channels each: what it was put together from, the results of a Split
    that there is, or those of a new one behind what gives the value."""
    if found := find_pieces(value, lengths):
        return found
    axis, writer, of = axis_of(value), value.producer(), list(of)
    sizes_value = editor.constant(f"{value.name}/lengths", np.array(lengths, np.int64))
    before = of[0] if writer is None else _after(editor, writer)
    made = editor.standard("Split", [value, sizes_value], len(lengths), before=before, of=of, axis=axis)
    for piece, size in zip(made, lengths, strict=True):
        _describe(piece, value, size)
    return made


def find_pieces(value: ir.Value, lengths: Sequence[int]) -> list[ir.Value] | None:
    """Find pieces of so many channels of a map or a vector that there are; None where there are none."""
    axis, writer = axis_of(value), value.producer()
    if writer is not None and _is(writer, "Concat", axis):
        parts = [part for part in writer.inputs if part is not None]
        if [length(part) for part in parts] == [*lengths]:
            return parts
    for use in value.uses():
        if _is(use.node, "Split", axis) and use.idx == 0 and [length(p) for p in use.node.outputs] == [*lengths]:
            return list(use.node.outputs)
    return None


def joined(editor: Editor, parts: Sequence[ir.Value], before: ir.Node, of: Iterable[ir.Node]) -> ir.Value:
    """Put maps or vectors together along their channels: what they are pieces of, a Concat that there is, or a new one
    before a node."""
    axis = axis_of(parts[0])
    writer = parts[0].producer()
    if writer is not None and _is(writer, "Split", axis) and [*writer.outputs] == [*parts]:
        assert writer.inputs[0] is not None
        return writer.inputs[0]
    for use in parts[0].uses():
        if _is(use.node, "Concat", axis) and [*use.node.inputs] == [*parts]:
            return use.node.outputs[0]
    (value,) = editor.standard("Concat", parts, 1, before=before, of=of, axis=axis)
    _describe(value, parts[0], sum(length(part) for part in parts))
    return value


def is_range(whole: ir.Value, start: int, part: ir.Value) -> bool:
    """Tell whether a map or a vector is known to be the channels of another from `start` on."""
    if whole is part:
        return start == 0
    writer, axis = whole.producer(), axis_of(whole)
    if writer is not None and _is(writer, "Concat", axis):
        for operand in writer.inputs:
            assert operand is not None
            if start < length(operand):
                return is_range(operand, start, part)
            start -= length(operand)
        return False
    writer = part.producer()
    if writer is None or not _is(writer, "Split", axis) or writer.inputs[0] is None:
        return False
    before = sum(length(piece) for piece in writer.outputs[: writer.outputs.index(part)])
    return start >= before and is_range(whole, start - before, writer.inputs[0])


def _is(node: ir.Node, op_type: str, axis: int) -> bool:
    """Tell whether a node is a standard Concat or Split along this axis, all of whose shapes are known."""
    if node.op_type != op_type or node.domain:
        return False
    ends = node.inputs if op_type == "Concat" else node.outputs
    if any(v is None or v.shape is None or not all(isinstance(size, int) for size in v.shape) for v in ends):
        return False
    given = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    first = ends[0]
    assert first is not None
    return len(sizes(first)) in ((1,), (2, 4))[axis] and given % len(sizes(first)) == axis


def _after(editor: Editor, node: ir.Node) -> ir.Node:
    """Find the node behind a node, before which something is inserted that comes right after it."""
    nodes = iter(editor.graph)
    for other in nodes:
        if other is node:
            return next(nodes)
    raise AssertionError(f"{node.name} is not in the graph")


def _describe(value: ir.Value, like: ir.Value, size: int) -> None:
    """Give a value the type of another, and its shape with so many channels."""
    shape = list(sizes(like))
    shape[axis_of(like)] = size
    value.shape, value.type = ir.Shape(shape), like.type
