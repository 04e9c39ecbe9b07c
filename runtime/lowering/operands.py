"""The inputs and outputs of a node, as far as they are there."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from bnfuse.opset.plain import PlainOp
from bnfuse.opset.spec import OpSpec


def optional(node: ir.Node, index: int) -> ir.Value | None:
    """Give a node's input of this index, or None where it has none."""
    return node.inputs[index] if index < len(node.inputs) else None


def result(node: ir.Node, index: int) -> ir.Value | None:
    """Give an output that somebody wants, or None."""
    value = node.outputs[index] if index < len(node.outputs) else None
    return value if value is not None and value.name else None


def named_values(node: ir.Node, op: OpSpec | PlainOp) -> tuple[dict[str, ir.Value], dict[str, ir.Value]]:
    """Give operands and results by the operator's names for them."""
    return named(node.inputs, op.operands), named(node.outputs, op.results)


def named(values: Sequence[ir.Value | None], names: Sequence[str]) -> dict[str, ir.Value]:
    """Values by operand name, those that are left out left out."""
    return {name: v for name, v in zip(names, values, strict=False) if v is not None and v.name}


def present(**values: ir.Value | None) -> dict[str, ir.Value]:
    """Leave out the values that are None."""
    return {name: value for name, value in values.items() if value is not None}
