"""Sampled gradients: the factor of a BN's gradient moves into the operator that writes dz (docs/maths.md).

    dz, db, dg = ...GradReduce(...)          s, db, dg = ...GradReduceScale(..., p)
    s = PointwiseGradScale(dz, p)            ->

What is left of a sampled BN's input gradient is a small operator that adds q*x + w in the sample.
PointwiseGradAccumulate, which ICF makes of PointwiseGradScale, moves the same way, and so does the scale that a
removed BatchNorm leaves.

Refuses a dz that has other readers (a residual sum's gradient serves both BNs and the skip), that is read by channels,
or is written by an operator with no room.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.spec import OpSpec
from bnfuse.passes.dialect.source_ops import gradient_of, read
from bnfuse.passes.dialect.steps import ACCUMULATIONS, has_room_after, try_spec
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by, sort


class ScaleFusion(ir.passes.InPlacePass):
    """Move the factor of a sampled or removed BN's gradient into the operator that writes dz."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in list(model.graph):
            op = read(node) if node.graph is not None else None
            if op is not None and is_scale(op):
                fuse(editor, op)
        sort(model.graph)
        return editor.result()


def is_scale(op: Op) -> bool:
    """Tell whether a PointwiseGrad does nothing but scale, and perhaps add to an accumulated gradient."""
    return (
        isinstance(op.spec, OpSpec)
        and op.spec.core == "PointwiseGrad"
        and op.spec.prologue in ((), ("Slice",))
        and op.spec.epilogue in tuple((step,) for step in ACCUMULATIONS)
    )


def fuse(editor: Editor, scale: Op) -> None:
    """Move a scale into what writes its dz, or refuse."""
    dz = scale.operands["dy"]
    step = scale.steps.epilogue[0]
    producer = gradient_of(dz)
    if reason := why_not(scale, producer, step):
        editor.refuse(scale.node, reason)
        return
    assert producer is not None
    spec = OpSpec(producer.steps.prologue, producer.steps.core, (*producer.steps.epilogue, step))
    operands = {name: value for name, value in scale.operands.items() if name != "dy"}
    editor.replace(producer, spec, [scale.node], operands=operands, attributes=scale.attributes, results=scale.results)


def why_not(scale: Op, producer: Op | None, step: str) -> str | None:
    """Tell why a scale cannot move into what writes its dz, or None. `step` is Scale or Accumulate."""
    dz = scale.operands["dy"]
    if scale.steps.prologue:
        return f"it reads some channels of {dz.name} only"
    if not is_only_read_by(dz, scale.node):
        return f"{dz.name} has other readers"
    if producer is None:
        node = dz.producer()
        return (
            f"{dz.name} is written by {f'{node.op_type} {node.name!r}' if node else 'no node'}, which has no epilogue"
        )
    steps = producer.steps
    if not has_room_after(steps, step) or try_spec(steps.prologue, steps.core, (*steps.epilogue, step)) is None:
        return f"{producer.node.op_type} '{producer.node.name}' has no room for {step}"
    return None
