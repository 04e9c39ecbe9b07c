"""Lowering of the domain `ai.bnfuse` (bnfuse/opset/spec.py)."""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import DOMAIN, parse
from bnfuse.runtime.lowering import group_norm as lower_group
from bnfuse.runtime.lowering import local as lower_local
from bnfuse.runtime.lowering import sampled as lower_sampled
from bnfuse.runtime.lowering.dense import lower_cross_entropy_grad
from bnfuse.runtime.lowering.layer_norm import layer_norm, layer_norm_grad
from bnfuse.runtime.lowering.norm import (
    batch_norm,
    batch_norm_finalize,
    batch_norm_grad,
    batch_norm_grad_finalize,
    batch_norm_grad_reduce,
    batch_norm_grad_terms,
    batch_norm_grad_terms_accumulate,
    batch_norm_statistics,
)
from bnfuse.runtime.lowering.operands import named_values
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.lowering.steps import composed
from bnfuse.runtime.lowering.sync import all_reduce_moments, all_reduce_terms
from bnfuse.runtime.lowering.transposed import lower_transposed
from bnfuse.runtime.lowering.values import attributes_of

PLAIN = {
    "BatchNormStatistics": batch_norm_statistics,
    "BatchNormFinalize": batch_norm_finalize,
    "BatchNormGradReduce": batch_norm_grad_reduce,
    "BatchNormGradTerms": batch_norm_grad_terms,
    "BatchNormGradTermsAccumulate": batch_norm_grad_terms_accumulate,
    "BatchNormGradFinalize": batch_norm_grad_finalize,
    "AllReduceMoments": all_reduce_moments,
    "AllReduceTerms": all_reduce_terms,
}
WITH_NODE = {
    "BatchNorm": batch_norm,
    "BatchNormGrad": batch_norm_grad,
    "LayerNorm": layer_norm,
    "LayerNormGrad": layer_norm_grad,
    "GroupNorm": lower_group.group_norm,
    "GroupNormGrad": lower_group.group_norm_grad,
    "GroupNormStatistics": lower_group.group_norm_statistics,
    "GroupNormFinalize": lower_group.group_norm_finalize,
    "GroupNormGradReduce": lower_group.group_norm_grad_reduce,
    "GroupNormGradFinalize": lower_group.group_norm_grad_finalize,
    "SoftmaxCrossEntropyGrad": lower_cross_entropy_grad,
    "SampledStatistics": lower_sampled.sampled_statistics,
    "PointStatistics": lower_sampled.point_statistics,
    "MixStatistics": lower_sampled.mix_statistics,
    "SampledGradFinalize": lower_sampled.sampled_grad_finalize,
    "AddSampled": lower_sampled.add_sampled,
    "AddAtPoints": lower_sampled.add_at_points,
    "LocalStatistics": lower_local.local_statistics,
    "LocalFinalize": lower_local.local_finalize,
    "LocalNormalize": lower_local.local_normalize,
    "LocalGradReduce": lower_local.local_grad_reduce,
    "LocalScale": lower_local.local_scale,
    "LocalAddSampled": lower_local.local_add_sampled,
    "L1Statistics": lower_sampled.map_statistics,
    "L1GradFinalize": lower_sampled.grad_finalize,
    "L1GradInput": lower_sampled.map_gradient,
    "RangeStatistics": lower_sampled.map_statistics,
    "RangeGradFinalize": lower_sampled.grad_finalize,
    "RangeGradInput": lower_sampled.map_gradient,
}


def lower_bnfuse(low: Lowering, node: ir.Node) -> None:
    """One node of the domain, composed of steps or plain."""
    if plain := PLAIN_OPS.get(node.op_type):
        operands, results = named_values(node, plain)
        if node.op_type in WITH_NODE:
            WITH_NODE[node.op_type](low, node, operands, results, attributes_of(node))
        else:
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
    lower = lower_transposed if spec.is_transposed else composed
    lower(low, node, spec, *named_values(node, spec), attributes_of(node))
