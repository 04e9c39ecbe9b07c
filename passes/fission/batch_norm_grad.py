"""BNFF, step 1: each BatchNorm's gradient becomes a reduce half and an input half ([Jung19], section 3.2).

    dx, dg, db =                        db, dg = BatchNormGradReduce(dz, x, mean, inv_std)
      BatchNormGrad(dz, x, g,       ->  terms  = BatchNormGradTerms(db, dg, a, inv_std)       C-sized
        mean, inv_std)                  q, w   = BatchNormGradFinalize(terms, mean)           C-sized
                                        dx     = BatchNormGradPointwiseGrad(dz, x, a, q, w)   a*dz + q*x + w

The input half is elementwise, so it can go where dx is read; the reduce half can go where dz is written.

Refuses a gradient whose BatchNorm was not split.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import OpSpec
from bnfuse.passes.dialect.source_ops import is_batch_norm_grad, is_map, sizes
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_unused, own_op

INPUT_HALF = OpSpec(("BatchNormGrad",), "PointwiseGrad")
SCALED = OpSpec((), "PointwiseGrad", ("Scale",))  # p*dz: the input half where the rest is not everywhere


class SplitBatchNormGrad(ir.passes.InPlacePass):
    """Split the gradient of every split BatchNorm into a reduce half and an input half."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in [node for node in model.graph if is_batch_norm_grad(node)]:
            finalize = finalize_of(node)
            if finalize is None or not is_map(node.inputs[0]):
                editor.refuse(node, "its BatchNorm was not split into halves")
            else:
                split(editor, node, finalize)
        return editor.result()


def gradients_of(node: ir.Node) -> list[ir.Node]:
    """List the gradient nodes of a BatchNorm: those that read its inv_std."""
    return [use.node for use in node.outputs[4].uses() if is_batch_norm_grad(use.node) and use.idx == 4]


def finalize_of(node: ir.Node) -> Op | None:
    """Find the BatchNormFinalize that gave a gradient its inv_std."""
    inv_std = node.inputs[4]
    producer = inv_std.producer() if inv_std is not None else None
    return own_op(producer) if producer is not None and producer.op_type == "BatchNormFinalize" else None


def split(editor: Editor, node: ir.Node, finalize: Op) -> None:
    """Put the two halves in the place of a BatchNormGrad; the input half only where its dx is read."""
    a = finalize.results["a"]
    of = [finalize.node, node]
    terms = emit_terms(editor, node, a, of)
    if has_input_gradient(node):
        dz, x, _, mean, _ = node.inputs
        assert dz is not None and x is not None and mean is not None
        n, channels, h, w = sizes(x)
        attributes = {"count": math.prod((n, h, w)), "start": 0, "stop": channels}
        coefficients = editor.emit(
            PLAIN_OPS["BatchNormGradFinalize"], {**terms, "mean": mean}, attributes, {},
            before=node, of=of, name=editor.fresh(f"{node.name}/finalize"),
        )  # fmt: skip
        operands = {"dy": dz, "grad_x": x, "grad_p": a, "grad_q": coefficients["q"], "grad_w": coefficients["w"]}
        editor.emit(INPUT_HALF, operands, {}, {"dx": node.outputs[0]}, before=node, of=of, name=node.name)
    editor.graph.remove(node, safe=True)


def has_input_gradient(node: ir.Node) -> bool:
    """Tell whether anything waits for the gradient at a BatchNorm's input."""
    dx = node.outputs[0]
    return bool(dx.name) and not is_unused(dx)


def emit_terms(editor: Editor, node: ir.Node, a: ir.Value, of: list[ir.Node]) -> dict[str, ir.Value]:
    """Insert the reduce half of a BatchNorm's gradient, and its terms of the input half where that is needed."""
    dz, x, _, mean, inv_std = node.inputs
    assert dz is not None and x is not None and mean is not None and inv_std is not None
    keep = {result: value for result, value in zip(("dgamma", "dbeta"), node.outputs[1:], strict=False) if value.name}
    reduced = editor.emit(
        PLAIN_OPS["BatchNormGradReduce"], {"dz": dz, "x": x, "mean": mean, "inv_std": inv_std}, {}, keep,
        before=node, of=of, name=editor.fresh(f"{node.name}/reduce"),
    )  # fmt: skip
    if not has_input_gradient(node):
        return {}
    return editor.emit(
        PLAIN_OPS["BatchNormGradTerms"], {**reduced, "a": a, "inv_std": inv_std}, {}, {},
        before=node, of=of, name=editor.fresh(f"{node.name}/terms"),
    )  # fmt: skip
