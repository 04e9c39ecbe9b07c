"""BNFF backward: the activation's gradient and a BN's reductions move into the operator that writes the gradient.

    dy, dw = ConvGrad(du, x, w, a, b)                   dz, dw, db, dg =
    dz     = PointwiseGradReluGrad(dy, x, a, b)   ->      NormalizeReluConvGradReluGradReduce(du, x, w, a, b,
    db, dg = BatchNormGradReduce(dz, x, mean, inv_std)                                        mean, inv_std)

The convolution has x on chip already, so neither the mask nor the reductions read a map of their own ([Jung19],
section 3.2, sub-BN2'). A BN over another map than the one the operator reads (after a residual Add, say) reduces over
that map as well: ReduceOther.

Refuses a gradient that has other readers or is written by an operator with no room, and a convolution that reads
another map than the mask is made from.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.spec import ACTIVATION_GRADS, CONV_GRADS, OF_GRADIENT, OpSpec, masks_gated
from bnfuse.passes.dialect.source_ops import forward_of, gradient_of, read
from bnfuse.passes.dialect.steps import REDUCTIONS, has_room_after, try_spec
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by


class MaskFusion(ir.passes.InPlacePass):
    """Move activation gradients and BN reductions into the operators that write their dy."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in list(model.graph):
            if node.graph is not None and (op := read(node)) is not None:
                if is_mask(op):
                    fuse_mask(editor, op)
                elif op.spec.name == "BatchNormGradReduce":
                    fuse_reduce(editor, op)
        return editor.result()


def is_mask(op: Op) -> bool:
    """Tell whether a PointwiseGrad changes nothing about dy on its way in: it masks it, and may reduce it."""
    return (
        isinstance(op.spec, OpSpec)
        and op.spec.core == "PointwiseGrad"
        and op.spec.prologue in ((), ("Normalize",), ("Normalize", "Gate"))
        and bool({*op.spec.epilogue} & {*ACTIVATION_GRADS, *REDUCTIONS})
        and not {"AddGradient", "AddGatedGradient", "AddBatchNormGrad"} & {*op.spec.epilogue}
    )


def fuse_mask(editor: Editor, mask: Op) -> bool:
    """Move a mask into what writes its dy; False where that is refused."""
    producer = gradient_of(mask.operands["dy"])
    if reason := why_not_mask(mask, producer):
        editor.refuse(mask.node, reason)
        return False
    assert producer is not None
    prologue = producer.steps.prologue
    operands = {name: value for name, value in mask.operands.items() if name != "dy"}
    if producer.steps.core in CONV_GRADS:
        operands.pop("x", None)  # the convolution reads the same map, or one with the same signs
    else:
        # x gave a pooling's gradient its shape at most; now it gives the mask
        own = tuple(step for step in prologue if step in OF_GRADIENT)
        prologue = (*own, *mask.steps.prologue)
    spec = try_spec(prologue, producer.steps.core, (*producer.steps.epilogue, *mask.steps.epilogue))
    if spec is None:  # two activations whose attributes have one name
        editor.refuse(
            mask.node, f"'{producer.node.name}' has another activation's gradient, with attributes of its own"
        )
        return False
    editor.replace(producer, spec, [mask.node], operands=operands, attributes=mask.attributes, results=mask.results)
    return True


def why_not_mask(mask: Op, producer: Op | None) -> str | None:
    """Tell why a mask cannot move into what writes its dy, or None."""
    dy, first = mask.operands["dy"], mask.steps.epilogue[0]
    if producer is None:
        return f"{dy.name} is written by {_writer(dy)}, which has no epilogue"
    if not is_only_read_by(dy, mask.node):
        return f"{dy.name} has other readers"
    if not has_room_after(producer.steps, first) or {*REDUCTIONS} & {*producer.steps.epilogue}:
        return f"{producer.node.op_type} '{producer.node.name}' has no room for {first}"
    if "Gate" in producer.steps.prologue and not masks_gated(producer.steps.prologue):
        return f"'{producer.node.name}' reads a gated map, not what the mask is made from"
    if producer.steps.core in CONV_GRADS and not masks_what_it_reads(mask, producer):
        return f"'{producer.node.name}' reads {producer.operands['x'].name}, not what the mask is made from"
    if any(producer.attributes.get(key, value) != value for key, value in mask.attributes.items()):
        return f"'{producer.node.name}' has other bounds"
    return None


def masks_what_it_reads(mask: Op, conv: Op) -> bool:
    """Tell whether the z of the convolution's prologue is the z of the mask (or, for a Relu, has its sign)."""
    x = conv.operands["x"]
    if "Normalize" in mask.steps.prologue or "Normalize" in conv.steps.prologue:
        return all(mask.operands.get(name) is conv.operands.get(name) for name in ("x", "a", "b", "gate"))
    if x is mask.operands.get("x", x):
        return True
    stored = forward_of(x)
    return (
        mask.steps.epilogue == ("ReluGrad",)
        and stored is not None
        and stored.spec == OpSpec(("Relu",), "Pointwise")
        and stored.operands["x"] is mask.operands["x"]
    )


def fuse_reduce(editor: Editor, reduce: Op) -> bool:
    """Move a BatchNormGradReduce into what writes its dz; False where that is refused."""
    dz, x = reduce.operands["dz"], reduce.operands["x"]
    producer = gradient_of(dz)
    if producer is None:
        editor.refuse(reduce.node, f"{dz.name} is written by {_writer(dz)}, which has no epilogue")
        return False
    spec = reduced(producer, x)
    if spec is None:
        editor.refuse(reduce.node, f"{producer.node.op_type} '{producer.node.name}' has no room for Reduce")
        return False
    if spec.others == producer.steps.others:
        operands = {name: reduce.operands[name] for name in ("x", "mean", "inv_std")}
        results = {name: reduce.results[name] for name in ("dbeta", "dgamma")}
    else:
        operands = {f"{name}_{spec.others}": reduce.operands[name] for name in ("x", "mean", "inv_std")}
        results = {f"{name}_{spec.others}": reduce.results[name] for name in ("dbeta", "dgamma")}
    editor.replace(producer, spec, [reduce.node], operands=operands, results=results)
    return True


def reduced(producer: Op, x: ir.Value) -> OpSpec | None:
    """Compose a gradient operator that also reduces over a map: its own (Reduce) or another one (ReduceOther); None
    where it has no room."""
    steps = producer.steps
    own = reads(producer, x) or (steps.core not in CONV_GRADS and not {*ACTIVATION_GRADS, "Reduce"} & {*steps.epilogue})
    step = "Reduce" if own and not {"Gate", *REDUCTIONS} & {*steps.prologue, *steps.epilogue} else "ReduceOther"
    return try_spec(steps.prologue, steps.core, (*steps.epilogue, step)) if has_room_after(steps, step) else None


def reads(producer: Op, x: ir.Value) -> bool:
    """Tell whether the operator reads the map itself, so that a reduction over it costs no further read."""
    return producer.steps.reads_x and producer.operands["x"] is x


def _writer(value: ir.Value) -> str:
    producer = value.producer()
    return f"{producer.op_type} '{producer.name}'" if producer is not None else "no node"
