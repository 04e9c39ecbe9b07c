"""ICF for BN -> activation -> channel shuffle (ShuffleNet): the halves sink through the permutation.

    y  = NormalizeReluPointwise(x, a, b)              x' = Gather(x, order)
    y' = Gather(y, order)                       ->    y' = NormalizeReluPointwise(x', a[order], b[order])

    dy = Gather(dy', inverse)                         dz', db', dg' = NormalizePointwiseGradReluGradReduce(dy', x', ..)
    dz, db, dg = NormalizePointwiseGrad                dz = Gather(dz', inverse); db = db'[inverse]; dg = dg'[inverse]
      ReluGradReduce(dy, x, ..)

The shuffle copies the map as it was written instead of the normalised one, so it costs what it did; what reads y' has
room for the steps, and what writes dy' for the mask and the reductions.

Each direction is matched on its own: the gradient's once the map that is masked is shuffled as it is.

Refuses a normalised map that something else reads too, a gradient that something else reads unmasked, and one of a map
that nothing shuffles.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from bnfuse.opset.plain import PLAIN_OPS, PlainOp
from bnfuse.passes.concat.ranges import axis_of
from bnfuse.passes.concat.sink import is_normalized
from bnfuse.passes.concat.split import is_cut_mask
from bnfuse.passes.dialect.shuffle import permutation_of
from bnfuse.passes.dialect.source_ops import MAPS, forward_of, read
from bnfuse.passes.rewriter import Editor, Op, is_only_read_by

Order = npt.NDArray[np.int64]


def sink_forward(editor: Editor, shuffle: ir.Node) -> None:
    """Permute a map before it is normalised, and what is per channel with it; or refuse."""
    forward = forward_of(shuffle.inputs[0]) if permutation_of(shuffle) is not None else None
    if forward is None or not is_normalized(forward):
        return
    y, order = forward.results["y"], shuffle.inputs[1]
    assert order is not None
    if not is_only_read_by(y, shuffle):
        editor.refuse(shuffle, f"{y.name} has another reader")
        return
    of = [forward.node, shuffle]
    moved = {name: permuted(editor, value, order, shuffle, of) for name, value in forward.operands.items()}
    name, keep = editor.fresh(f"{shuffle.name}/normalize"), {"y": shuffle.outputs[0]}
    editor.emit(forward.steps, moved, forward.attributes, keep, before=shuffle, of=of, name=name)
    editor.remove_dead([shuffle, forward.node])


def sink_backward(editor: Editor, back: ir.Node) -> None:
    """Mask and reduce a gradient before it is permuted back, or refuse."""
    inverse = permutation_of(back)
    if inverse is None:
        return
    for reader in dict.fromkeys(use.node for use in back.outputs[0].uses()):
        op, dy = read(reader), back.outputs[0]
        reduces = op is not None and op.spec is PLAIN_OPS["BatchNormGradReduce"] and op.operands["dz"] is dy
        if op is None or not (reduces or is_cut_mask(op, dy)):
            continue
        shuffle = shuffle_of(op.operands["x"], inverse)
        if shuffle is None:
            editor.refuse(reader, f"{op.operands['x'].name}, which it is made of, is not shuffled")
        elif not reduces and not is_only_read_by(dy, reader):
            editor.refuse(reader, f"{dy.name} has other readers")
        else:
            unshuffled(editor, op, back, shuffle)


def shuffle_of(x: ir.Value, inverse: Order) -> ir.Node | None:
    """Find what shuffles a map in such an order that `inverse` undoes it."""
    for use in x.uses():
        order = permutation_of(use.node) if use.idx == 0 else None
        if order is not None and len(order) == len(inverse) and (order[inverse] == np.arange(len(order))).all():
            return use.node
    return None


def unshuffled(editor: Editor, op: Op, back: ir.Node, shuffle: ir.Node) -> None:
    """Put a mask or a reduction in front of the permutation of its gradient."""
    dy, order, inverse = back.inputs[0], shuffle.inputs[1], back.inputs[1]
    assert dy is not None and order is not None and inverse is not None
    read_as = "dz" if isinstance(op.spec, PlainOp) else "dy"
    of = [op.node, back]
    operands = {name: permuted(editor, v, order, op.node, of) for name, v in op.operands.items() if name not in MAPS}
    operands |= {"x": shuffle.outputs[0], read_as: dy}
    name = editor.fresh(f"{back.name}/mask")
    results = editor.emit(op.spec, operands, op.attributes, {}, before=op.node, of=of, name=name)
    for result, old in op.results.items():
        editor.take_over(old, permuted(editor, results[result], inverse, op.node, of))
    editor.remove_dead([op.node, back])


def permuted(editor: Editor, value: ir.Value, order: ir.Value, before: ir.Node, of: list[ir.Node]) -> ir.Value:
    """Give a map or coefficients with their channels in another order: as there is one, or a new one."""
    axis = axis_of(value)
    for use in value.uses():
        known = use.node.op_type == "Gather" and not use.node.domain and use.node.inputs[1] is order
        if known and use.idx == 0 and use.node.attributes.get_int("axis", 0) == axis:
            return use.node.outputs[0]
    (made,) = editor.standard("Gather", [value, order], 1, before=before, of=of, axis=axis)
    made.shape, made.type = value.shape, value.type
    return made
