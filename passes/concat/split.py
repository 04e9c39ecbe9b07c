"""ICF for BN -> activation -> Split (CSP's halves, Res2Net, ShuffleNet): the halves sink through the Split.

    y      = NormalizeReluPointwise(x, a, b)          x1, x2 = Split(x);  a1, a2 = Split(a);  b1, b2 = Split(b)
    y1, y2 = Split(y)                           ->    y1 = NormalizeReluPointwise(x1, a1, b1)
                                                      y2 = NormalizeReluPointwise(x2, a2, b2)

    dy         = Concat(dy1, dy2)                     dz1, db1, dg1 = NormalizePointwiseGradReluGradReduce(dy1, x1, ...)
    dz, db, dg =                                ->    dz2, db2, dg2 = NormalizePointwiseGradReluGradReduce(dy2, x2, ...)
      NormalizePointwiseGradReluGradReduce(dy, x, ...)    dz = Concat(dz1, dz2); db = Concat(db1, db2); ...

Split and Concat of maps are places in memory, of coefficients [C] small: what reads a piece has room for its steps, and
what writes a piece's gradient for its mask and its reductions. Both directions are matched on their own.

Refuses a map that must exist whole (a graph output, a reader of the whole without room), and pieces of which none has a
reader, or none of whose gradients has a writer, that takes them: one sweep would become several.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from bnfuse.analysis.provenance import channels, is_channel_concat, is_channel_split
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import ACTIVATION_GRADS, CONV_GRADS
from bnfuse.passes.concat.ranges import joined, pieces
from bnfuse.passes.concat.sink import is_normalized, lets_through
from bnfuse.passes.dialect.source_ops import forward_of, gradient_of, is_map, read
from bnfuse.passes.dialect.steps import REDUCTIONS, has_room_after
from bnfuse.passes.fusion.mask import is_mask
from bnfuse.passes.fusion.pointwise import has_room_for
from bnfuse.passes.rewriter import Editor, Op, is_only_read_by

REDUCE = PLAIN_OPS["BatchNormGradReduce"]


def sink_forward(editor: Editor, split: ir.Node) -> None:
    """Let each piece of a normalised map be normalised on its own, or refuse."""
    source = forward_of(split.inputs[0]) if is_channel_split(split) else None
    if source is None or not is_normalized(source):
        return
    if reason := why_not_forward(source, split):
        editor.refuse(source.node, reason)
        return
    lengths, of = [channels(piece) for piece in split.outputs], [source.node, split]
    cut = {name: pieces(editor, value, lengths, of) for name, value in source.operands.items()}
    for index, piece in enumerate(split.outputs):
        operands = {name: values[index] for name, values in cut.items()}
        name = editor.fresh(f"{source.node.name}/{index}")
        editor.emit(source.spec, operands, source.attributes, {"y": piece}, before=split, of=of, name=name)
    editor.remove_dead([split, source.node])


def why_not_forward(source: Op, split: ir.Node) -> str | None:
    """Tell why a normalised map is not cut before it is normalised, or None."""
    y = source.results["y"]
    if y.is_graph_output():
        return f"{y.name} is a graph output"
    for use in y.uses():
        if use.node is not split and not lets_through(use.node) and not has_room_for(source, use.node):
            return f"{use.node.op_type} '{use.node.name}' reads {y.name} whole and has no room for its steps"
    if any(not is_map(piece) or piece.is_graph_output() for piece in split.outputs):
        return f"a piece of {y.name} is a graph output"
    if not any(takes_piece(source, piece) for piece in split.outputs):
        return f"no reader of a piece of {y.name} has room for its steps"
    return None


def takes_piece(source: Op, piece: ir.Value) -> bool:
    """Tell whether a reader of a piece would take the source's steps, or hand them on across a Concat or a Split."""
    of_piece = dataclasses.replace(source, results={"y": piece})
    return any(lets_through(use.node) or has_room_for(of_piece, use.node) for use in piece.uses())


def sink_backward(editor: Editor, concat: ir.Node) -> None:
    """Let each piece of a gradient be masked and reduced on its own, or refuse."""
    if not is_channel_concat(concat):
        return
    dy = concat.outputs[0]
    for reader in dict.fromkeys(use.node for use in dy.uses()):
        op = read(reader)
        if op is None or not (is_shared_mask(op, dy) or (op.spec is REDUCE and op.operands["dz"] is dy)):
            continue
        if reason := why_not_backward(op, concat):
            editor.refuse(reader, reason)
        else:
            cut_mask(editor, op, concat)


def is_cut_mask(op: Op, dy: ir.Value) -> bool:
    """Tell whether an operator masks this gradient and may reduce it, over one map, and does nothing else."""
    return is_mask(op) and op.operands["dy"] is dy and {*op.steps.epilogue} <= {"Where", *ACTIVATION_GRADS, "Reduce"}


def is_shared_mask(op: Op, dy: ir.Value) -> bool:
    """Tell the same of one that reduces over other maps too: behind a residual sum."""
    steps = {"Where", *ACTIVATION_GRADS, "Reduce", "ReduceOther"}
    return is_mask(op) and op.operands["dy"] is dy and {*op.steps.epilogue} <= steps


def why_not_backward(op: Op, concat: ir.Node) -> str | None:
    """Tell why a mask or a reduction of a concatenated gradient stays behind the Concat, or None."""
    dy = concat.outputs[0]
    if op.spec is not REDUCE and not is_only_read_by(dy, op.node):
        return f"{dy.name} has other readers"
    step = "Reduce" if op.spec is REDUCE else op.steps.epilogue[0]
    if not any(takes(piece, index, op, concat, step) for index, piece in enumerate(concat.inputs)):
        return f"{dy.name} is written by Concat '{concat.name}', and nothing that writes a piece of it has room"
    return None


def takes(piece: ir.Value | None, index: int, op: Op, concat: ir.Node, step: str) -> bool:
    """Tell whether what writes a piece of a gradient would take its mask, or hand it on across a Concat or a Split."""
    writer = piece.producer() if piece is not None else None
    if writer is not None and (lets_through(writer) or writer.op_type == "Sum"):
        return True
    producer = gradient_of(piece)
    if producer is None or piece is None or not is_only_read_by(piece, concat):
        return False
    if not has_room_after(producer.steps, step) or {*REDUCTIONS} & {*producer.steps.epilogue}:
        return False
    if producer.steps.core not in CONV_GRADS:
        return True
    x = producer.operands["x"]
    split = x.producer()
    return is_channel_split(split) and split.inputs[0] is op.operands["x"] and split.outputs.index(x) == index


def cut_mask(editor: Editor, op: Op, concat: ir.Node) -> None:
    """Put one mask for each piece of a gradient in the place of one behind their Concat."""
    dys = [piece for piece in concat.inputs if piece is not None]
    lengths, of = [channels(piece) for piece in dys], [op.node]
    read_as = "dz" if op.spec is REDUCE else "dy"
    cut = {name: pieces(editor, value, lengths, of) for name, value in op.operands.items() if name != read_as}
    made = []
    for index, dy in enumerate(dys):
        operands = {read_as: dy, **{name: values[index] for name, values in cut.items()}}
        name = editor.fresh(f"{op.node.name}/{index}")
        made.append(editor.emit(op.spec, operands, op.attributes, {}, before=op.node, of=of, name=name))
    for name, value in op.results.items():
        editor.take_over(value, joined(editor, [results[name] for results in made], op.node, of))
    editor.remove_dead([op.node, concat])
