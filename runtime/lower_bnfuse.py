"""Lowering of the domain `ai.bnfuse` (bnfuse/opset/spec.py)."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from bnfuse.opset.spec import DOMAIN, PLAIN_OPS, parse
from bnfuse.runtime.lower_norm import (
    batch_norm_finalize,
    batch_norm_grad_finalize,
    batch_norm_grad_reduce,
    batch_norm_grad_terms,
    batch_norm_grad_terms_accumulate,
    batch_norm_statistics,
)
from bnfuse.runtime.lower_steps import composed
from bnfuse.runtime.lower_values import attributes_of
from bnfuse.runtime.lowering import Lowering

PLAIN = {
    "BatchNormStatistics": batch_norm_statistics,
    "BatchNormFinalize": batch_norm_finalize,
    "BatchNormGradReduce": batch_norm_grad_reduce,
    "BatchNormGradTerms": batch_norm_grad_terms,
    "BatchNormGradTermsAccumulate": batch_norm_grad_terms_accumulate,
    "BatchNormGradFinalize": batch_norm_grad_finalize,
}


def lower_bnfuse(low: Lowering, node: ir.Node) -> None:
    """One node of the domain, composed of steps or plain."""
    if plain := PLAIN_OPS.get(node.op_type):
        operands, results = named(node.inputs, plain.operands), named(node.outputs, plain.results)
        PLAIN[node.op_type](low, operands, results, attributes_of(node))
        return
    spec = parse(node.op_type)
    if spec is None:
        raise low.error(
            node, f"is no operator of {DOMAIN} version 1: rewrite the source graph with this version of bnfuse"
        )
    missing = [name for name in spec.attributes if name not in node.attributes]
    if missing:
        raise low.error(node, f"lacks the attribute {missing[0]}: rewrite the source graph with this version of bnfuse")
    composed(low, node, spec, named(node.inputs, spec.operands), named(node.outputs, spec.results), attributes_of(node))


def named(values: Sequence[ir.Value | None], names: Sequence[str]) -> dict[str, ir.Value]:
    """Values by operand name, those that are left out left out."""
    return {name: v for name, v in zip(names, values, strict=False) if v is not None and v.name}
