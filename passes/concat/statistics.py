"""ICF forward: the statistics of a Concat are the concatenation of its producers' statistics ([Jung19], section 3.3).

    t = Concat(x, y1, y2)                    m0, v0 = BatchNormStatistics(x), ...      once per producer
    m, v = BatchNormStatistics(t)     ->     m = Concat(m0, m1, m2)   v = Concat(v0, v1, v2)    C-sized

A channel's statistics do not depend on who reads it, and those of a Split's piece are a piece of those of what is split
(DPN). What is left is one BatchNormStatistics per producer, which the
statistics fusion then moves into the producer's epilogue.

Refuses nothing: a producer with no epilogue is swept once, instead of once per reader.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.analysis.provenance import channels, is_channel_concat, is_channel_split, leaves
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.passes.concat.ranges import find_pieces, joined, pieces
from bnfuse.passes.dialect.source_ops import forward_of, is_map, read
from bnfuse.passes.rewriter import Editor, FusionResult, Op

STATISTICS = PLAIN_OPS["BatchNormStatistics"]


class ConcatStatistics(ir.passes.InPlacePass):
    """Take the statistics of a channel Concat from those of its producers."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "icf")
        for node in [node for node in model.graph if node.op_type == STATISTICS.name]:
            op = read(node)
            assert op is not None
            if is_channel_concat(op.operands["x"].producer()):
                concatenate(editor, op)
        return editor.result()


def concatenate(editor: Editor, statistics: Op) -> None:
    """Put concatenated statistics, [C], in the place of a BatchNormStatistics over a Concat."""
    node = statistics.node
    parts = [statistics_of(editor, leaf.value, node) for leaf in leaves(statistics.operands["x"])]
    for name in STATISTICS.results:
        old = statistics.results[name]
        if not old.uses():
            continue
        (new,) = editor.standard("Concat", [part[name] for part in parts], 1, before=node, of=[node], axis=0)
        editor.take_over(old, new)
    editor.fused.append(node.name or "")
    editor.graph.remove(node, safe=True)


def statistics_of(editor: Editor, leaf: ir.Value, node: ir.Node) -> dict[str, ir.Value]:
    """Give mean and variance of a producer's map: what there is already, or else a sweep of their own."""
    if found := find_statistics(leaf):
        return found
    writer = leaf.producer()
    if is_channel_split(writer) and is_map(writer.inputs[0]):
        whole = statistics_of(editor, writer.inputs[0], node)
        lengths, place = [channels(piece) for piece in writer.outputs], writer.outputs.index(leaf)
        return {name: pieces(editor, value, lengths, [node])[place] for name, value in whole.items()}
    if is_channel_concat(writer):
        parts = [statistics_of(editor, part.value, node) for part in leaves(leaf)]
        return {name: joined(editor, [part[name] for part in parts], node, [node]) for name in STATISTICS.results}
    base = writer or node
    return editor.emit(
        STATISTICS, {"x": leaf}, {}, {}, before=node, of=[node], name=editor.fresh(f"{base.name}/statistics")
    )


def find_statistics(value: ir.Value) -> dict[str, ir.Value] | None:
    """Find mean and variance, [C] each, of a map that some operator computes already; None where none does."""
    split, producer = value.producer(), forward_of(value)
    if producer is not None and "Statistics" in producer.steps.epilogue:
        return {name: producer.results[name] for name in STATISTICS.results}
    if is_channel_split(split):
        return _of_piece(value, split)
    for reader, _ in value.uses():
        if reader.op_type == STATISTICS.name and (op := read(reader)) is not None:
            return {name: op.results[name] for name in STATISTICS.results}
    return None


def _of_piece(piece: ir.Value, split: ir.Node) -> dict[str, ir.Value] | None:
    """Find the statistics of a Split's piece among those of what is split, where they are cut already."""
    whole = find_statistics(split.inputs[0]) if is_map(split.inputs[0]) else None
    lengths, place = [channels(value) for value in split.outputs], split.outputs.index(piece)
    found = {name: parts[place] for name, v in (whole or {}).items() if (parts := find_pieces(v, lengths))}
    return found if len(found) == len(STATISTICS.results) else None
