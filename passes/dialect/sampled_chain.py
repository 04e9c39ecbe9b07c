"""A sampled BN's input gradient, as a chain of operators: what scales dz, and what adds to the result in the sample."""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.spec import OpSpec
from bnfuse.passes.dialect.source_ops import gradient_of, sizes
from bnfuse.passes.rewriter import Op, is_only_read_by, own_op

ADDITIONS = ("AddSampled", "AddAtPoints")


def scaled_base(dx: ir.Value) -> Op | None:
    """Find the operator whose last step scales dz (Scale), where dx is its result, or that with a sample's terms added.

    None where something else reads what is between them.
    """
    value = dx
    while (node := value.producer()) is not None and node.op_type in ADDITIONS:
        op = own_op(node)
        if op is None or not is_only_read_by(op.operands["acc"], node):
            return None
        value = op.operands["acc"]
    base = gradient_of(value)
    return base if base is not None and base.steps.epilogue[-1:] == ("Scale",) else None


def accumulated(base: Op, acc: ir.Value, start: int = 0) -> tuple[OpSpec, dict[str, ir.Value], dict[str, int]]:
    """Give the base's steps, operands and attributes where it adds to the channels of `acc` from `start` on."""
    stop = start + sizes(base.results["dx"])[1]
    spec = OpSpec(base.steps.prologue, base.steps.core, (*base.steps.epilogue[:-1], "Accumulate"))
    return spec, {"acc": acc}, {"acc_start": start, "acc_stop": stop}
