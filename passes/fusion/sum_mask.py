"""BNFF backward: a Sum that no writer of its terms takes goes into the sweep that masks it.

    g  = Sum(g1, g2)                                           dz, db, dg =
    dz, db, dg = NormalizePointwiseGradReluGradReduce(    ->     NormalizePointwiseGradAddGradientReluGradReduce(
      g, x, ..)                                                    g1, x, .., g2)

The sum is neither written nor read back. It runs when all other passes have found nothing more to do: what writes a
term would take the sum and the mask with it (gradient_sum.py), but what pads or splits gradients has no way out.

Refuses a Sum that something else reads, or whose reader does more than masking and reducing it.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.passes.dialect.source_ops import is_map, read
from bnfuse.passes.dialect.steps import with_step
from bnfuse.passes.fusion.mask import is_mask
from bnfuse.passes.rewriter import Editor, FusionResult, is_only_read_by


class SumIntoMask(ir.passes.InPlacePass):
    """Move Sums of two gradients into the sweeps that mask and reduce them."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in [node for node in model.graph if node.op_type == "Sum" and is_map(node.outputs[0])]:
            if reason := absorb(editor, node):
                editor.refuse(node, reason)
        return editor.result()


def absorb(editor: Editor, node: ir.Node) -> str | None:
    """Let the reader of a Sum add its terms up, or give the reason why it does not."""
    total, terms = node.outputs[0], [value for value in node.inputs if value is not None]
    readers = [use.node for use in total.uses()]
    op = read(readers[0]) if readers and is_only_read_by(total, readers[0]) else None
    if op is None or not is_mask(op) or op.operands["dy"] is not total:
        return f"{total.name} is read by more than one sweep that masks it"
    spec = with_step(op.steps, "AddGradient") if len(terms) == 2 else None
    if spec is None:
        return f"'{op.node.name}' has no room for a sum"
    editor.replace(op, spec, [node], operands={"dy": terms[1], "other": terms[0]})
    return None
