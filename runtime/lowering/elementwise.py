"""Lowering of elementwise operators that have a kernel for maps. Others are generic."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.opset.sources import activation_of, forward_of
from bnfuse.opset.spec import OpSpec
from bnfuse.runtime.lowering.dense import lower_biased
from bnfuse.runtime.lowering.generic import lower_generic
from bnfuse.runtime.lowering.operands import optional, present, result
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.lowering.steps import elementwise
from bnfuse.runtime.lowering.values import attributes_of

FLOAT_MAX = float(np.finfo(np.float32).max)


def lower_activation(low: Lowering, node: ir.Node) -> None:
    """Lower an activation as a Pointwise of one step; what is not float32 is left to the generic kernels."""
    x, found = low.operand(node, 0), activation_of(node.domain, node.op_type, attributes_of(node), len(node.inputs))
    if found is None or low.form(x).dtype != "float32":
        lower_generic(low, node)
        return
    activation, attributes = found
    elementwise(low, node, forward_of(activation), present(x=x), present(y=result(node, 0)), attributes)


def lower_clip(low: Lowering, node: ir.Node) -> None:
    """Lower a Clip with constant bounds as a Pointwise of one step; any other is left to the generic kernels."""
    bounds = clip_bounds(low, node)
    x = low.operand(node, 0)
    if bounds is None or low.form(x).dtype != "float32":
        lower_generic(low, node)
        return
    attributes = dict(zip(("min", "max"), bounds, strict=True))
    elementwise(low, node, OpSpec(("Clip",), "Pointwise"), present(x=x), present(y=result(node, 0)), attributes)


def clip_bounds(low: Lowering, node: ir.Node) -> tuple[float, float] | None:
    """Lower and upper bound, where they are known now."""
    found = []
    for index, default in ((1, -FLOAT_MAX), (2, FLOAT_MAX)):
        value = optional(node, index)
        known = low.constant(value)
        if value is not None and value.name and known is None:
            return None
        found.append(default if known is None else float(known))
    return found[0], found[1]


def lower_add(low: Lowering, node: ir.Node) -> None:
    """Of two equal shapes a map with a skip, of a product and a vector a Gemm; other broadcasting is generic."""
    if node in low.products:
        lower_biased(low, node)
        return
    x, skip = low.operand(node, 0), low.operand(node, 1)
    forms = low.form(x), low.form(skip)
    if forms[0].shape != forms[1].shape or any(f.dtype != "float32" or not f.shape for f in forms):
        lower_generic(low, node)
        return
    elementwise(low, node, OpSpec(("Add",), "Pointwise"), present(x=x, skip=skip), present(y=result(node, 0)), {})
