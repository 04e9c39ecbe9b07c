"""BNFF, step 1: each BatchNorm's gradient becomes a reduce half and an input half (papers/000, section 3.2).

    dx, dg, db =                        db, dg = BatchNormGradReduce(dz, x, mean, inv_std)
      BatchNormalizationGrad(dz, x, ->  terms  = BatchNormGradTerms(db, dg, a, inv_std)       C-sized
        g, mean, inv_std)               q, w   = BatchNormGradFinalize(terms, mean)           C-sized
                                        dx     = BatchNormGradMapGrad(dz, x, a, q, w)         a*dz + q*x + w

The input half is elementwise, so it can go where dx is read; the reduce half can go where dz is written.

Refuses a gradient whose BatchNorm was not split.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from bnfuse.opset.spec import PLAIN_OPS, OpSpec
from bnfuse.passes.rewriting import Editor, FusionResult, Op, is_unused, own_op
from bnfuse.passes.source_ops import is_map, sizes

INPUT_HALF = OpSpec(("BatchNormGrad",), "MapGrad")


class SplitBatchNormGrad(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> FusionResult:
        editor = Editor(model, "bnff")
        for node in [node for node in model.graph if node.op_type == "BatchNormalizationGrad"]:
            finalize = finalize_of(node)
            if finalize is None or not is_map(node.inputs[0]):
                editor.refuse(node, "its BatchNorm was not split into halves")
            else:
                split(editor, node, finalize)
        return editor.result()


def finalize_of(node: ir.Node) -> Op | None:
    """The BatchNormFinalize that gave a gradient its inv_std."""
    inv_std = node.inputs[4]
    producer = inv_std.producer() if inv_std is not None else None
    return own_op(producer) if producer is not None and producer.op_type == "BatchNormFinalize" else None


def split(editor: Editor, node: ir.Node, finalize: Op) -> None:
    dz, x, _, mean, inv_std = node.inputs
    assert dz is not None and x is not None and mean is not None and inv_std is not None
    dx, *parameters = node.outputs
    a = finalize.results["a"]
    keep = {result: value for result, value in zip(("dgamma", "dbeta"), parameters, strict=False) if value.name}
    of = [finalize.node, node]
    reduced = editor.emit(
        PLAIN_OPS["BatchNormGradReduce"], {"dz": dz, "x": x, "mean": mean, "inv_std": inv_std}, {}, keep,
        before=node, of=of, name=editor.fresh(f"{node.name}/reduce"),
    )  # fmt: skip
    if dx.name and not is_unused(dx):
        terms = editor.emit(
            PLAIN_OPS["BatchNormGradTerms"], {**reduced, "a": a, "inv_std": inv_std}, {}, {},
            before=node, of=of, name=editor.fresh(f"{node.name}/terms"),
        )  # fmt: skip
        n, channels, h, w = sizes(x)
        attributes = {"count": math.prod((n, h, w)), "start": 0, "stop": channels}
        coefficients = editor.emit(
            PLAIN_OPS["BatchNormGradFinalize"], {**terms, "mean": mean}, attributes, {},
            before=node, of=of, name=editor.fresh(f"{node.name}/finalize"),
        )  # fmt: skip
        operands = {"dy": dz, "grad_x": x, "grad_p": a, "grad_q": coefficients["q"], "grad_w": coefficients["w"]}
        editor.emit(INPUT_HALF, operands, {}, {"dx": dx}, before=node, of=of, name=node.name)
    editor.graph.remove(node, safe=True)
