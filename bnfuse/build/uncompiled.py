"""What onnxruntime trains and no kernel here computes: told when a graph is built, not first when it is compiled."""

from __future__ import annotations

import onnx

from .graph import Forward

WINDOWED = ("Conv", "MaxPool", "AveragePool")
Shapes = dict[str, list[int] | None]


def note_uncompiled(forward: Forward) -> None:
    """Note the first node that no kernel computes, and how many there are."""
    shapes = forward.shapes()
    found = [(node, what) for node in forward.graph.node if (what := without_kernel(node, shapes))]
    if found:
        (node, what), more = found[0], len(found) - 1
        others = f", and {more} more," if more else ""
        forward.note(
            f"'{node.name}' ({node.op_type}) {what}{others} cannot be compiled: the file runs in onnxruntime alone"
        )


def without_kernel(node: onnx.NodeProto, shapes: Shapes) -> str | None:
    """Tell what a node is that no kernel computes, or None."""
    if node.domain not in ("", "ai.onnx"):
        return None
    ranks = [len(shapes.get(name) or []) for name in node.input]
    if node.op_type in WINDOWED and ranks[0] != 4:
        return f"of maps of rank {ranks[0]}"
    return None
