"""Canonical form of what cuts channels: one Split for each map, and one Concat for its gradient.

    y1 = Slice(x, 0:8); y2 = Slice(x, 8:24)                     y1, y2 = Split(x)
    y1, _ = Split(x); _, y2 = Split(x)                    ->    y1, y2 = Split(x)
    dx = Sum(Concat(d1, zeros), Pad(d2), ...)             ->    dx = Sum(Concat(d1, d2), ...)
    d1, d2 = Split(dy); dx = Concat(d1, d2)               ->    dx = dy

Exporters write a Slice or a Split of its own for every piece that is read. A Split is a view, a Slice is a copy, and
what is added to zeros is no sum. Where a shortcut goes to some channels alone (`x[:, :8] += shortcut`, ReXNet), the
gradient is cut and put together again.

Refuses nothing: ranges that overlap, that are not constant or that have steps are not theirs, and stay.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.provenance import channels, is_channel_concat, is_channel_split
from bnfuse.passes.dialect.source_ops import constant_of, is_map, sizes
from bnfuse.passes.rewriter import Editor, FusionResult, is_only_read_by, sort


@dataclasses.dataclass(frozen=True)
class Cut:
    """A value that is channels [start, stop) of another."""

    start: int
    stop: int
    value: ir.Value


class MergeSplits(ir.passes.InPlacePass):
    """Cut each map once, and put its gradient together once."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "canonical")
        for node in list(model.graph):
            if node.graph is not None and (cuts_of(node) and node.inputs[0] is not None):
                merge_cuts(editor, node.inputs[0])
            elif node.op_type == "Sum" and not node.domain and is_map(node.outputs[0]):
                merge_terms(editor, node)
        for node in list(model.graph):
            if is_channel_concat(node):
                rejoin(editor, node)
        sort(model.graph)
        return editor.result()


def cuts_of(node: ir.Node) -> list[Cut]:
    """List the ranges of channels that a Split or a Slice gives; none where the node is neither or they are unknown."""
    x = node.inputs[0] if node.inputs else None
    if not is_map(x) or not all(is_map(value) for value in node.outputs):
        return []
    if is_channel_split(node):
        stops = np.cumsum([channels(value) for value in node.outputs])
        return [Cut(int(s) - channels(v), int(s), v) for s, v in zip(stops, node.outputs, strict=True)]
    if node.op_type != "Slice" or node.domain or sizes(node.outputs[0]) == sizes(x):
        return []
    known = [constant_of(value) for value in node.inputs[1:]]
    if len(known) < 3 or any(each is None or each.size != 1 for each in known):
        return []
    start, stop, axis, step = [int(each.item()) for each in known if each is not None] + [1] * (4 - len(known))
    count = channels(x)
    start, stop = (min(max(place + count * (place < 0), 0), count) for place in (start, stop))
    if axis % 4 != 1 or step != 1 or stop - start != channels(node.outputs[0]):
        return []
    return [Cut(start, stop, node.outputs[0])]


def merge_cuts(editor: Editor, x: ir.Value) -> None:
    """Put one Split in the place of all that cuts the channels of a map, where their ranges do not overlap.

    Not where a range is empty, which no other piece stands for, nor where two graph outputs are one piece.
    """
    nodes = [node for node in dict.fromkeys(use.node for use in x.uses()) if cuts_of(node)]
    if len(nodes) == 1 and nodes[0].op_type == "Split":
        return
    cuts = [cut for node in nodes for cut in cuts_of(node) if cut.value.uses() or cut.value.is_graph_output()]
    ranges = sorted({(cut.start, cut.stop) for cut in cuts})
    given = [(cut.start, cut.stop) for cut in cuts if cut.value.is_graph_output()]
    if len({*given}) < len(given) or any(start == stop for start, stop in ranges):
        return
    if not cuts or any(first[1] > second[0] for first, second in itertools.pairwise(ranges)):
        return
    bounds = sorted({0, channels(x), *(bound for pair in ranges for bound in pair)})
    lengths = np.diff(bounds)
    size = editor.constant(f"{x.name}/lengths", lengths.astype(np.int64))
    pieces = editor.standard("Split", [x, size], len(lengths), before=nodes[0], of=nodes, axis=1)
    n, _, h, w = sizes(x)
    for piece, length in zip(pieces, lengths, strict=True):
        piece.shape, piece.type = ir.Shape([n, int(length), h, w]), x.type
    for cut in cuts:
        piece = pieces[bounds.index(cut.start)]
        if cut.value.is_graph_output() and not piece.is_graph_output():
            editor.take_over(cut.value, piece)
        elif not cut.value.is_graph_output():
            cut.value.replace_all_uses_with(piece)
    editor.fused.append(nodes[0].name or nodes[0].op_type)
    editor.remove_dead(nodes)


def merge_terms(editor: Editor, node: ir.Node) -> None:
    """Add up what is zero in some channels among a Sum's terms, range by range."""
    terms = [value for value in node.inputs if value is not None]
    merged = {term: cuts for term in terms if (cuts := filled(term)) is not None}
    columns: dict[tuple[int, int], list[ir.Value]] = {}
    for cut in sorted((cut for cuts in merged.values() for cut in cuts), key=lambda cut: cut.start):
        columns.setdefault((cut.start, cut.stop), []).append(cut.value)
    ends = [0, *(bound for pair in columns for bound in pair), channels(node.outputs[0])]
    if len(merged) < 2 or ends[::2] != ends[1::2]:  # overlapping ranges, or channels that are zero in all terms
        return
    of = [node, *(writer for term in merged if (writer := term.producer()) is not None)]
    parts = [_sum(editor, addends, node, of) for addends in columns.values()]
    (whole,) = editor.standard("Concat", parts, 1, before=node, of=of, axis=1)
    whole.shape, whole.type = node.outputs[0].shape, node.outputs[0].type
    rest = [term for term in terms if term not in merged]
    editor.take_over(node.outputs[0], _sum(editor, [*rest, whole], node, of))
    editor.fused.append(node.name or node.op_type)
    editor.remove_dead([*of, *(zero for writer in of for v in writer.inputs if v and (zero := v.producer()))])


def _sum(editor: Editor, addends: list[ir.Value], before: ir.Node, of: list[ir.Node]) -> ir.Value:
    """Add values up; one alone is its own sum."""
    if len(addends) == 1:
        return addends[0]
    (total,) = editor.standard("Sum", addends, 1, before=before, of=of)
    total.shape, total.type = addends[0].shape, addends[0].type
    return total


def filled(term: ir.Value) -> list[Cut] | None:
    """List the ranges of channels of a map that something is written to, where others are known to be zero: by a
    Concat with zeros, or a Pad of the channels. None for any other map, and where nothing is written."""
    writer = term.producer()
    if is_channel_concat(writer) and all(is_map(value) for value in writer.inputs):
        parts = [value for value in writer.inputs if value is not None]
        stops = np.cumsum([channels(value) for value in parts])
        cuts = [Cut(int(s) - channels(v), int(s), v) for s, v in zip(stops, parts, strict=True) if not is_zero(v)]
        return cuts if 0 < len(cuts) < len(parts) else None
    if writer is None or writer.op_type != "Pad" or writer.domain or not is_map(writer.inputs[0]):
        return None
    given = writer.inputs[2] if len(writer.inputs) > 2 else None
    zeros = "mode" not in writer.attributes and len(writer.inputs) < 4 and (given is None or is_zero(given))
    pads = constant_of(writer.inputs[1])
    if not zeros or pads is None or pads.min() < 0 or not pads.any() or pads[[0, 2, 3, 4, 6, 7]].any():
        return None
    first = int(pads[1])
    return [Cut(first, first + channels(writer.inputs[0]), writer.inputs[0])]


def rejoin(editor: Editor, concat: ir.Node) -> None:
    """Put what a Split cuts in the place of its pieces, where a Concat has them in their order and, if they are not all
    of them, nothing else reads them. A Concat of all pieces that is an output of the graph stays for that alone."""
    runs, of_split = runs_of_pieces(concat), dict[ir.Node, list[Sequence[ir.Value]]]()
    for run in runs:
        if len(run) > 1 and (split := run[0].producer()) is not None:
            of_split.setdefault(split, []).append(run)
    result = concat.outputs[0]
    if not of_split or (len(runs) == 1 and not result.uses()):
        return
    wholes = {first: whole for split, own in of_split.items() for first, whole in wholes_of(editor, split, own).items()}
    found = [wholes.get(run[0], run[0]) for run in runs]
    if len(found) > 1:
        (whole,) = editor.standard("Concat", found, 1, before=concat, of=[concat], axis=1)
        editor.take_over(result, whole)
    else:
        for use in list(result.uses()):
            use.node.replace_input_with(use.idx, found[0])
    editor.fused.append(concat.name or concat.op_type)
    editor.remove_dead([concat, *of_split])


def runs_of_pieces(concat: ir.Node) -> list[Sequence[ir.Value]]:
    """Cut a Concat's operands into runs of neighbouring pieces, and values alone."""
    parts, runs = [value for value in concat.inputs if value is not None], list[Sequence[ir.Value]]()
    while parts:
        runs.append(run_of_pieces(parts, concat))
        parts = parts[len(runs[-1]) :]
    return runs


def run_of_pieces(parts: Sequence[ir.Value], concat: ir.Node) -> Sequence[ir.Value]:
    """Give the values at the beginning that are neighbouring pieces of one Split of a map, all of them or ones that the
    Concat alone reads; the first value alone where there are no such ones."""
    split = parts[0].producer()
    if not is_channel_split(split) or not is_map(split.inputs[0]):
        return parts[:1]
    outputs = list(split.outputs)
    first = outputs.index(parts[0])
    count = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], zip(parts, outputs[first:], strict=False))
    )
    if count == len(outputs) or all(is_only_read_by(piece, concat) for piece in parts[:count]):
        return parts[:count]
    return parts[:1]


def wholes_of(editor: Editor, split: ir.Node, runs: Sequence[Sequence[ir.Value]]) -> dict[ir.Value, ir.Value]:
    """Give what runs of neighbouring pieces of a Split make together, by their first: what is split, or pieces of one
    coarser Split."""
    x, outputs = split.inputs[0], list(split.outputs)
    assert x is not None
    if len(runs[0]) == len(outputs):
        return {runs[0][0]: x}
    first_of = {value: run[0] for run in runs for value in run}
    kept: dict[ir.Value, int] = {}  # the first piece of each new one, and its channels
    for value in outputs:
        first = first_of.get(value, value)
        kept[first] = kept.get(first, 0) + channels(value)
    size = editor.constant(f"{x.name}/lengths", np.array([*kept.values()], np.int64))
    pieces = editor.standard("Split", [x, size], len(kept), before=split, of=[split], axis=1)
    n, _, h, w = sizes(x)
    for piece, (old, length) in zip(pieces, kept.items(), strict=True):
        piece.shape, piece.type = ir.Shape([n, length, h, w]), x.type
        if old not in first_of:
            editor.take_over(old, piece)
    made = dict(zip(kept, pieces, strict=True))
    return {run[0]: made[run[0]] for run in runs}


def is_zero(value: ir.Value) -> bool:
    """Tell whether every element is known to be 0."""
    writer = value.producer()
    if writer is not None and writer.op_type == "ConstantOfShape" and not writer.domain:
        given = writer.attributes.get("value")
        return given is None or not given.as_tensor().numpy().any()
    known = constant_of(value)
    return known is not None and not known.any()
