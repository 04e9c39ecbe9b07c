"""The inputs and outputs of a node, as far as they are there."""

from __future__ import annotations

import onnx_ir as ir


def optional(node: ir.Node, index: int) -> ir.Value | None:
    """Give a node's input of this index, or None where it has none."""
    return node.inputs[index] if index < len(node.inputs) else None


def result(node: ir.Node, index: int) -> ir.Value | None:
    """Give an output that somebody wants, or None."""
    value = node.outputs[index] if index < len(node.outputs) else None
    return value if value is not None and value.name else None


def present(**values: ir.Value | None) -> dict[str, ir.Value]:
    """Leave out the values that are None."""
    return {name: value for name, value in values.items() if value is not None}
