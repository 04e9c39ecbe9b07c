"""BNFF around a layer scale: u = g*y, y a normalised map and g a parameter with one value for each channel.

    dz = Mul(d, g)                                    s, t = BatchNormGradReduce(d, x, mean, inv_std)
    db, dg = BatchNormGradReduce(dz, x, ...)    ->    db, dg = Mul(s, g), Mul(t, g)
    t = Mul(d, y)                                     dscale = scale*t + bias*s
    dscale = ReduceSum(t, N H W)

As y is scale*x_hat + bias, the sums that the BN's gradient takes over d are those of the scale's gradient too, so y
need not exist for it, and what writes d takes them (`MaskFusion`). The rest is of [C].

Refuses nothing that it matches: a scale of an activated map, and one for each sample, are left to `GateFusion`.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.opset.plain import PlainOp
from bnfuse.opset.spec import OpSpec, find
from bnfuse.passes.dialect.source_ops import constant_of, forward_of, read, sizes
from bnfuse.passes.fusion.gate import gate_of
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by, own_op, sort

NORMALIZE = OpSpec(("Normalize",), "Pointwise")
PER_CHANNEL = [0, 2, 3]  # the axes that a gradient per channel sums over


class LayerScaleFusion(ir.passes.InPlacePass):
    """Take the gradients of a BN and of the scale behind it from the same two sums."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in [node for node in model.graph if node.op_type == "BatchNormGradReduce"]:
            op = read(node)
            scaled = gate_of(op.operands["dz"]) if op is not None else None
            if op is not None and scaled is not None and is_layer_scale(scaled):
                fuse(editor, op, scaled)
        sort(model.graph)
        return editor.result()


def is_layer_scale(scaled: Op) -> bool:
    """Tell whether a product of a map and a gate has one factor for all samples of several."""
    return sizes(scaled.operands["gate"])[0] == 1 < sizes(scaled.operands["x"])[0]


def fuse(editor: Editor, reduce: Op, scaled: Op) -> None:
    """Sum over the gradient in front of the scale, and make what was summed behind it of that."""
    node, gate, d = reduce.node, scaled.operands["gate"], scaled.operands["x"]
    plain = find("BatchNormGradReduce")
    assert isinstance(plain, PlainOp)
    operands = {**reduce.operands, "dz": d}
    sums = editor.emit(plain, operands, {}, {}, before=node, of=[node])
    flat = editor.constant(f"{node.name}/flat", np.array([-1], np.int64))
    of = [node, scaled.node]
    (vector,) = editor.standard("Reshape", [gate, flat], 1, before=node, of=of)
    vector.shape, vector.type = sums["dbeta"].shape, sums["dbeta"].type
    for name, total in sums.items():
        if name in reduce.results:
            (made,) = editor.standard("Mul", [total, vector], 1, before=node, of=of)
            editor.take_over(reduce.results[name], made)
    for product in [use.node for use in d.uses()]:
        found = scale_gradient(product, d, reduce)
        if found is not None:
            fuse_scale(editor, product, *found, sums)
    editor.remove_dead([node, scaled.node])


def scale_gradient(product: ir.Node, d: ir.Value, reduce: Op) -> tuple[ir.Node, Op] | None:
    """Find the sum for each channel of d times what the BatchNorm's normalise half makes of x, if a product is read by
    that alone.

    Gives it, and the BatchNormFinalize that has the half's scale and bias; another BatchNorm of x has other sums.
    """
    if product.op_type != "Mul" or product.domain or d not in product.inputs:
        return None
    normalize = forward_of(product.inputs[0] if product.inputs[1] is d else product.inputs[1])
    total = next((use.node for use in product.outputs[0].uses()), None)
    if (
        normalize is None
        or normalize.spec != NORMALIZE
        or normalize.operands["x"] is not reduce.operands["x"]
        or total is None
    ):
        return None
    axes = constant_of(total.inputs[1]) if total.op_type == "ReduceSum" and len(total.inputs) > 1 else None
    if axes is None or sorted(int(axis) % 4 for axis in axes.flat) != PER_CHANNEL:
        return None
    producer = normalize.operands["a"].producer()
    finalize = own_op(producer) if producer is not None else None
    is_own = (
        finalize is not None
        and finalize.spec.name == "BatchNormFinalize"
        and finalize.results.get("inv_std") is reduce.operands["inv_std"]
        and finalize.operands["mean"] is reduce.operands["mean"]
    )
    return (total, finalize) if finalize and is_own and is_only_read_by(product.outputs[0], total) else None


def fuse_scale(editor: Editor, product: ir.Node, total: ir.Node, finalize: Op, sums: dict[str, ir.Value]) -> None:
    """Make the scale's gradient: scale*(sum of d*x_hat) + bias*(sum of d)."""
    of, result = [total, product], total.outputs[0]
    made = []
    for name, which in (("scale", "dgamma"), ("bias", "dbeta")):
        (part,) = editor.standard("Mul", [finalize.operands[name], sums[which]], 1, before=total, of=of)
        made.append(part)
    (added,) = editor.standard("Add", made, 1, before=total, of=of)
    for value in (*made, added):
        value.shape, value.type = sums["dbeta"].shape, sums["dbeta"].type
    form = editor.constant(f"{total.name}/form", np.array(sizes(result), np.int64))
    (gradient,) = editor.standard("Reshape", [added, form], 1, before=total, of=of)
    editor.take_over(result, gradient)
    editor.remove_dead([total, product])
