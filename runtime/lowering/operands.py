"""The inputs and outputs of a node, as far as they are there."""

from __future__ import annotations

import onnx_ir as ir


def optional(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def result(node: ir.Node, index: int) -> ir.Value | None:
    """An output that somebody wants."""
    value = node.outputs[index] if index < len(node.outputs) else None
    return value if value is not None and value.name else None


def present(**values: ir.Value | None) -> dict[str, ir.Value]:
    return {name: value for name, value in values.items() if value is not None}
