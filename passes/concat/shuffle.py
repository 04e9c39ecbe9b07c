"""ICF for BN -> activation -> channel shuffle (ShuffleNet): the halves sink through the permutation.

    y  = NormalizeReluPointwise(x, a, b)              x' = Gather(x, order)
    y' = Gather(y, order)                       ->    y' = NormalizeReluPointwise(x', a[order], b[order])

    dy = Gather(dy', inverse)                         dz', db', dg' = NormalizePointwiseGradReluGradReduce(dy', x', ..)
    dz, db, dg = NormalizePointwiseGrad                dz = Gather(dz', inverse); db = db'[inverse]; dg = dg'[inverse]
      ReluGradReduce(dy, x, ..)

The shuffle copies the map as it was written instead of the normalised one, so it costs what it did; what reads y' has
room for the steps, and what writes dy' for the mask and the reductions.

Refuses a normalised map that something else reads too, and a gradient that is masked otherwise than its map.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.spec import PlainOp
from bnfuse.passes.dialect.shuffle import permutation_of
from bnfuse.passes.dialect.source_ops import forward_of, read
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by

Order = npt.NDArray[np.int64]


class ShuffleSink(ir.passes.InPlacePass):
    """Move normalise halves and activations before a permutation of channels behind it, forward and backward."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "icf")
        for node in [node for node in model.graph if node.op_type == "Gather"]:
            order, forward = permutation_of(node), forward_of(node.inputs[0])
            if order is None or forward is None or not normalizes(forward):
                continue
            mask = mask_of(forward, order)
            if isinstance(mask, str):
                editor.refuse(node, mask)
            elif not is_only_read_by(forward.results["y"], node):
                editor.refuse(node, f"{forward.results['y'].name} has another reader")
            else:
                sink(editor, node, order, forward, mask)
        return editor.result()


def normalizes(op: Op) -> bool:
    """Tell whether an operator is a normalise half, with or without its activation, and nothing else."""
    steps = op.steps.prologue
    alone = steps[:1] == ("Normalize",) and (len(steps) == 1 or (len(steps) == 2 and steps[1] in ACTIVATIONS))
    return op.steps.core == "Pointwise" and alone and not op.steps.epilogue


def mask_of(forward: Op, order: Order) -> Op | str:
    """Find what masks and reduces a shuffled map's gradient behind the shuffle's, or give the reason why not."""
    x = forward.operands["x"]
    masks = [op for use in x.uses() if (op := read(use.node)) is not None and masks_it(op, forward)]
    if not masks:
        return "its gradient is not masked behind the shuffle's"
    if len(masks) > 1:
        return "its gradient is masked twice"
    mask = masks[0]
    dy = gradient(mask)
    back = permutation_of(dy.producer())
    alone = isinstance(mask.spec, PlainOp) or is_only_read_by(dy, mask.node)  # a reduction leaves its gradient as it is
    if back is None or (back[order] != np.arange(len(order))).any() or not alone:
        return f"{dy.name} is not the shuffle's gradient alone"
    return mask


def gradient(mask: Op) -> ir.Value:
    """Give the gradient that a mask, or a reduction alone, reads."""
    return mask.operands["dz" if isinstance(mask.spec, PlainOp) else "dy"]


def masks_it(op: Op, forward: Op) -> bool:
    """Tell whether an operator masks and reduces what comes back to a normalised map, or only reduces it."""
    act = forward.steps.prologue[1:]
    if isinstance(op.spec, PlainOp):
        return op.spec.name == "BatchNormGradReduce" and not act and op.operands["x"] is forward.operands["x"]
    if op.spec.core != "PointwiseGrad" or op.operands.get("x") is not forward.operands["x"]:
        return False
    if not act:
        return False
    same = all(op.operands.get(name) is forward.operands[name] for name in ("a", "b"))
    masks = (f"{act[0]}Grad",)
    return same and op.spec.prologue == ("Normalize",) and op.spec.epilogue in (masks, (*masks, "Reduce"))


def sink(editor: Editor, shuffle: ir.Node, order: Order, forward: Op, mask: Op) -> None:
    """Permute the map before its steps, and its gradient behind them."""
    of = [forward.node, shuffle]
    order_value = shuffle.inputs[1]
    assert order_value is not None
    inverse = editor.constant(f"{shuffle.name}/inverse", np.argsort(order).astype(np.int64))

    def permuted(value: ir.Value, by: ir.Value, before: ir.Node, axis: int) -> ir.Value:
        (made,) = editor.standard("Gather", [value, by], 1, before=before, of=of, axis=axis)
        made.shape, made.type = value.shape, value.type
        return made

    x = forward.operands["x"]
    vectors = {name: value for name, value in forward.operands.items() if name != "x"}
    moved = {name: permuted(value, order_value, shuffle, 0) for name, value in vectors.items()}
    moved["x"] = permuted(x, order_value, shuffle, 1)
    name = editor.fresh(f"{shuffle.name}/normalize")
    editor.emit(forward.steps, moved, forward.attributes, {"y": shuffle.outputs[0]}, before=shuffle, of=of, name=name)
    back = gradient(mask).producer()
    assert back is not None
    sink_gradient(editor, back, mask, moved, {"order": order_value, "inverse": inverse})
    editor.remove_dead([shuffle, forward.node])


def sink_gradient(
    editor: Editor, back: ir.Node, mask: Op, moved: Mapping[str, ir.Value], orders: Mapping[str, ir.Value]
) -> None:
    """Mask and reduce what the shuffle's gradient `back` reads, and permute the results."""
    dy = back.inputs[0]
    assert dy is not None

    def permuted(value: ir.Value, by: str, before: ir.Node, axis: int) -> ir.Value:
        (made,) = editor.standard("Gather", [value, orders[by]], 1, before=before, of=[back], axis=axis)
        made.shape, made.type = value.shape, value.type
        return made

    read_as = "dz" if isinstance(mask.spec, PlainOp) else "dy"
    operands = {name: moved[name] for name in mask.operands if name in moved}
    operands |= {
        name: permuted(value, "order", mask.node, 0)
        for name, value in mask.operands.items()
        if name in ("mean", "inv_std")
    }
    results = editor.emit(
        mask.spec, {read_as: dy, **operands}, mask.attributes, {},
        before=mask.node, of=[back, mask.node], name=editor.fresh(f"{back.name}/mask"),
    )  # fmt: skip
    for name, old in mask.results.items():
        editor.take_over(old, permuted(results[name], "inverse", mask.node, 1 if name == "dx" else 0))
    editor.remove_dead([mask.node, back])
