"""Copies between layouts, and the operators that have no kernel of their own."""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.runtime.lowering import Lowering


def lower_generic(low: Lowering, node: ir.Node) -> None:
    raise low.error(node, "is not supported by the runtime")


def lower_dropout(low: Lowering, node: ir.Node) -> None:
    raise low.error(node, "is not supported by the runtime")


lower_dropout_grad = lower_dropout


def lower_sum(low: Lowering, node: ir.Node) -> None:
    raise low.error(node, "is not supported by the runtime")
