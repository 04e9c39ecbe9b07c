"""BNFF forward: the difference of two maps is their sum with the second one behind a gate of -1.

    u = Sub(p, y)          ->     u = SkipGateAddPointwise(p, y, -1)

y = NormalizePointwise(x, ..) then goes into the sum with its coefficients and its activation (pointwise.py), as
PoolFormer's mixers have it, avgpool(y) - y: nothing else needs y stored.

Refuses differences of maps of which none is normalised: a Sub is as good a sweep for them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.opset.spec import OpSpec
from bnfuse.passes.dialect.source_ops import forward_of, is_map, sizes
from bnfuse.passes.rewriter import Editor, FusionResult

DIFFERENCE = OpSpec(("SkipGate", "Add"), "Pointwise")


class DifferenceAsSum(ir.passes.InPlacePass):
    """Write differences of normalised maps as sums."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in [node for node in model.graph if node.op_type == "Sub" and not node.domain]:
            x, skip = node.inputs[:2]
            if not is_map(x) or not is_map(skip) or sizes(x) != sizes(skip):
                continue
            if not any(is_normalized(value) for value in (x, skip)):
                editor.refuse(node, "neither of its maps is normalised")
                continue
            minus = editor.constant(f"{node.name}/minus", np.full((1, sizes(skip)[1], 1, 1), -1, np.float32))
            operands = {"x": x, "skip": skip, "skip_gate": minus}
            editor.emit(DIFFERENCE, operands, {}, {"y": node.outputs[0]}, before=node, of=[node], name=node.name)
            editor.graph.remove(node, safe=True)
        return editor.result()


def is_normalized(value: ir.Value) -> bool:
    """Tell whether a map is stored behind the normalise half of a BatchNorm, or an activation of that."""
    op = forward_of(value)
    while op is not None and op.steps.core == "Pointwise" and op.steps.prologue[0] != "Normalize":
        op = forward_of(op.operands["x"]) if len(op.steps.prologue) == 1 else None
    return op is not None and op.steps.core == "Pointwise" and not {"Add", "AddNormalized"} & {*op.steps.prologue}
