"""Channel provenance: which tensor each channel of a concatenation comes from.

DenseNet-style networks concatenate in two forms and any mix of them: nested pairs, cat(cat(x, y1), y2), and flat
lists, where every layer concatenates all earlier outputs anew. Traced back to the tensors that were *produced*
(by anything but a concatenation), both are the same thing: an ordered list of leaves. Statistics, gradient
accumulators and buffer slots belong to leaves ([Jung19], section 3.3, made exact).
"""

from __future__ import annotations

import dataclasses
from typing import TypeGuard

import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A produced tensor and the channels [start, stop) that it fills in a concatenation."""

    value: ir.Value
    start: int
    stop: int


def is_channel_concat(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """Tell whether the node concatenates maps along their channels (rank 4, axis 1)."""
    return node is not None and node.op_type == "Concat" and not node.domain and _along_channels(node, node.outputs[0])


def is_channel_split(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """Tell whether the node splits a map along its channels (rank 4, axis 1)."""
    return node is not None and node.op_type == "Split" and not node.domain and _along_channels(node, node.inputs[0])


def _along_channels(node: ir.Node, whole: ir.Value | None) -> bool:
    shape = whole.shape if whole is not None else None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    return shape is not None and len(shape) == 4 and axis in (1, -3)


def channels(value: ir.Value) -> int:
    """Count the channels of a map. Raises BnfuseError where the shape is unknown or symbolic."""
    if value.shape is None or len(value.shape) < 2 or not isinstance(value.shape[1], int):
        node = value.producer()
        what = f"'{value.name}', whose number of channels the file does not say: build it anew, with --batch N"
        if node is None:
            raise BnfuseError(f"the graph reads {what}")
        raise at_node(node.name or "", node.op_type, f"gives {what}")
    return value.shape[1]


def leaves(value: ir.Value) -> tuple[Leaf, ...]:
    """List the leaves of a map in channel order; a map that is no concatenation is its own single leaf."""
    found: list[Leaf] = []
    start = 0
    pending = [value]
    while pending:
        current = pending.pop()
        node = current.producer()
        if is_channel_concat(node) and current is node.outputs[0]:
            pending += [v for v in reversed(node.inputs) if v is not None]
        else:
            stop = start + channels(current)
            found.append(Leaf(current, start, stop))
            start = stop
    return tuple(found)
