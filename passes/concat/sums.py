"""ICF backward for a Split beside a skip (SK's halves): the skip's gradient is added to each piece's.

    dx1, dw1 = ConvGrad(.., x1)                    d1, d2   = Split(d)
    dx2, dw2 = ConvGrad(.., x2)                    dx1, dw1 = ConvGradAddGradient(.., x1, d1)
    g        = Concat(dx1, dx2)             ->     dx2, dw2 = ConvGradAddGradient(.., x2, d2)
    s        = Sum(d, g)                           s        = Concat(dx1, dx2)

A Split of d and the Concat are places in memory, and what writes a piece has room for a sum. The mask behind s goes
before the Concat, too (concat/split.py). What writes d was asked before (fusion/gradient_sum.py).

Refuses a Concat that something else reads, and pieces of which no writer has room for a sum.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.analysis.ancestors import ancestors
from bnfuse.analysis.provenance import channels, is_channel_concat
from bnfuse.passes.concat.ranges import joined, pieces
from bnfuse.passes.dialect.source_ops import gradient_of, is_map
from bnfuse.passes.fusion.gradient_sum import step_for_sum
from bnfuse.passes.rewriter import Editor, is_only_read_by


def sink_backward(editor: Editor, node: ir.Node) -> None:
    """Add what a Sum adds to a Concat of gradients to its pieces, or refuse."""
    if node.op_type != "Sum" or node.domain or not is_map(node.outputs[0]):
        return
    terms = [value for value in node.inputs if value is not None]
    whole = next(
        (value for value in terms if is_channel_concat(value.producer()) and is_only_read_by(value, node)), None
    )
    if whole is None or len(terms) < 2:
        return
    concat = whole.producer()
    assert concat is not None
    others = [value for value in terms if value is not whole]
    if not any(takes(piece, concat, others) for piece in concat.inputs):
        editor.refuse(node, f"no operator that writes a piece of {whole.name} has room for a sum")
        return
    parts, of = [value for value in concat.inputs if value is not None], [node, concat]
    lengths = [channels(part) for part in parts]
    cut = [pieces(editor, value, lengths, of) for value in others]
    made = []
    for index, part in enumerate(parts):
        added = [part, *(found[index] for found in cut)]
        (total,) = editor.standard("Sum", added, 1, before=node, of=of)
        total.shape, total.type = part.shape, part.type
        made.append(total)
    editor.take_over(node.outputs[0], joined(editor, made, node, of))
    editor.remove_dead([node, concat])


def takes(piece: ir.Value | None, concat: ir.Node, others: list[ir.Value]) -> bool:
    """Tell whether what writes a piece of a gradient has room for a sum, and is not needed for its other terms."""
    writer = gradient_of(piece)
    if piece is None or writer is None or not is_only_read_by(piece, concat) or step_for_sum(writer) is None:
        return False
    return writer.node not in ancestors(others)
