"""ICF backward for BN -> activation -> Concat: masks and reductions move before the Split of the Concat's gradient.

    dt, dw = NormalizeReluConvGrad(.., t, a, b)                  dt, dw, db, dg =
    d1, d2 = Split(dt)                                    ->       NormalizeReluConvGradReluGradReduce(.., t, a, b, ..)
    dz1, db1, dg1 = ..PointwiseGradReluGradReduce(d1, x1, ..)    dz1, dz2 = Split(dt)
    dz2, db2, dg2 = ..PointwiseGradReluGradReduce(d2, x2, ..)    db1, db2 = Split(db); dg1, dg2 = Split(dg)

with t = Concat(x1, x2), a = Concat(a1, a2), ... The operator that writes dt has t on chip already. A piece that
something else reads too, or that is no gradient of a normalised map, stays as it is: the mask is one of some channels
(Where). What is the sum of a piece and another reader's gradient is masked behind that sum, by what writes its last
term. Where no piece is masked, a convolution that reads another map (a residual sum) reduces over t as well.

Where that has no room, one mask before the Split takes the place of all, if there is one for each piece.

Refuses a gradient that is not written by an operator with room, or by a convolution that reads another map; and where
reading all of t costs more than the sweeps over its pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.provenance import channels, is_channel_concat, is_channel_split
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import ACTIVATION_GRADS, CONV_GRADS, OpSpec
from bnfuse.opset.traffic import reads_elements_of_x
from bnfuse.passes.concat.ranges import is_range, joined, length, pieces
from bnfuse.passes.concat.split import is_cut_mask
from bnfuse.passes.dialect.source_ops import MAPS, gradient_of, is_map, read
from bnfuse.passes.dialect.steps import REDUCTIONS, has_room_after, try_spec
from bnfuse.passes.fusion.mask import reduced
from bnfuse.passes.rewriter import Editor, Op, is_only_read_by

REDUCE = PLAIN_OPS["BatchNormGradReduce"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Channels of a split gradient from `start` on, and what masks or reduces them alone (None: nothing does)."""

    value: ir.Value
    start: int
    mask: Op | None

    @property
    def step(self) -> str | None:
        """The gradient of its activation."""
        if self.mask is None or not isinstance(self.mask.spec, OpSpec):
            return None
        return next((step for step in self.mask.spec.epilogue if step in ACTIVATION_GRADS), None)

    @property
    def reduces(self) -> bool:
        """Whether it is reduced for a BN."""
        return self.mask is not None and "dbeta" in self.mask.spec.results


def sink_backward(editor: Editor, split: ir.Node) -> None:
    """Move masks and reductions of a Split's pieces into what writes the gradient that is split, or refuse."""
    whole = split.inputs[0] if is_channel_split(split) else None
    if not is_map(whole) or is_channel_split(whole.producer()):  # then it is a part of that one
        return
    found = [piece_of(value, start) for value, start in flat_pieces(split)]
    masks = [piece.mask for piece in found if piece.mask is not None]
    if masks and (reason := move(editor, split, found)) and join(editor, split, found):
        for op in masks:
            editor.refuse(op.node, reason)


def flat_pieces(split: ir.Node, start: int = 0) -> Iterator[tuple[ir.Value, int]]:
    """List what a Split gives, with the channel where each piece starts; of a piece that is only split its pieces."""
    for part in split.outputs:
        inner = next((use.node for use in part.uses()), None)
        if is_channel_split(inner) and is_only_read_by(part, inner):
            yield from flat_pieces(inner, start)
        else:
            yield part, start
        start += channels(part)


def piece_of(value: ir.Value, start: int) -> Piece:
    """Find what masks or reduces a piece: a mask that is its only reader, or a reduction beside others."""
    for use in value.uses():
        op = read(use.node)
        if op is None:
            continue
        if op.spec is REDUCE and op.operands["dz"] is value:
            return Piece(value, start, op)
        if is_cut_mask(op, value) and is_only_read_by(value, use.node):
            return Piece(value, start, op)
    return Piece(value, start, None)


def move(editor: Editor, split: ir.Node, found: Sequence[Piece]) -> str | None:
    """Move the masks of a Split's pieces into what writes the gradient, or give the reason why they stay."""
    dy = split.inputs[0]
    producer = gradient_of(dy)
    if dy is None or producer is None:
        writer = dy.producer() if dy is not None else None
        return (
            f"the gradient that is split is written by {writer.op_type if writer else 'no node'}, without an epilogue"
        )
    t = concat_of(producer, found)
    if isinstance(t, str):
        return t
    masking = masking_of(found)
    if isinstance(masking, str):
        return masking
    if not is_worth_it(producer, found, t, sweeps=3 if masking else 2):
        return f"few of {t.name}'s channels are theirs: to read it costs more than to read those again"
    if not masking:
        return reduce_alone(editor, split, found, producer, t)
    if reason := why_not(producer, split, masking[0]):
        return reason
    prologue, operands = producer.steps.prologue, {"x": t}
    if producer.steps.core not in CONV_GRADS:
        prologue = (*(step for step in prologue if step in ("Slice", "BatchNormGrad")), "Normalize")
    coefficients = coefficients_of(t)
    if coefficients is None:
        return f"nothing reads {t.name} with the coefficients of its masks"
    if not all(_agrees(piece, coefficients) for piece in found):
        return f"{t.name} is read with other coefficients than its masks have"
    operands |= coefficients
    reduces = any(piece.reduces for piece in found)
    epilogue = (*producer.steps.epilogue, *masking, *(("Reduce",) if reduces else ()))
    spec = try_spec(prologue, producer.steps.core, epilogue)
    attributes = {k: v for piece in found if piece.step and piece.mask for k, v in piece.mask.attributes.items()}
    if spec is None or any(producer.attributes.get(key, value) != value for key, value in attributes.items()):
        return f"{producer.node.op_type} '{producer.node.name}' has no room for {' '.join(masking)}"
    if "Where" in masking:
        chosen = np.concatenate([np.full(channels(p.value), float(p.step is not None), np.float32) for p in found])
        operands["masked"] = editor.constant(f"{split.name}/masked", chosen)
    nodes = [piece.mask.node for piece in found if piece.mask is not None]
    operands |= statistics(editor, found, producer.node) if reduces else {}
    fused = editor.replace(producer, spec, nodes, operands=operands, attributes=attributes)
    hand_out(editor, split, found, {name: fused.results[name] for name in ("dbeta", "dgamma") if reduces})
    return None


def join(editor: Editor, split: ir.Node, found: Sequence[Piece]) -> str | None:
    """Put one mask before a Split in the place of one for each piece, or give the reason why they stay.

    What puts the gradient together or permutes it may let the mask through; one sweep is no more than several.
    """
    dy, first = split.inputs[0], found[0].mask
    assert dy is not None
    if first is None or not is_only_read_by(dy, split):
        return f"{dy.name} is not masked as a whole"
    ops = [piece.mask for piece in found if piece.mask is not None]
    if len(ops) < len(found) or any(op.spec != first.spec or op.attributes != first.attributes for op in ops):
        return f"the pieces of {dy.name} are not masked alike"
    whole = [
        w
        for w in _wholes(first.operands["x"])
        if all(is_range(w, p.start, o.operands["x"]) for p, o in zip(found, ops, strict=True))
    ]
    if not whole:
        return f"no Concat puts together what the masks of {dy.name} are made from"
    nodes = [op.node for op in ops]
    operands = {
        name: joined(editor, [op.operands[name] for op in ops], split, nodes)
        for name in first.operands
        if name not in MAPS
    }
    operands |= {"x": whole[0], "dz" if first.spec is REDUCE else "dy": dy}
    base = editor.fresh(f"{split.name}/mask")
    made = editor.emit(first.spec, operands, first.attributes, {}, before=split, of=nodes, name=base)
    if "dx" in made:
        split.replace_input_with(0, made["dx"])
    hand_out(editor, split, found, {name: value for name, value in made.items() if name != "dx"})
    return None


def reduce_alone(editor: Editor, split: ir.Node, found: Sequence[Piece], producer: Op, t: ir.Value) -> str | None:
    """Move reductions of pieces that nothing masks into what writes the gradient, or give the reason why they stay."""
    spec = reduced(producer, t)
    if spec is None:
        return f"{producer.node.op_type} '{producer.node.name}' has no room for a reduction"
    suffix = f"_{spec.others}" if spec.others > producer.steps.others else ""
    nodes = [piece.mask.node for piece in found if piece.mask is not None]
    taken = {"x": t, **statistics(editor, found, producer.node)}
    fused = editor.replace(producer, spec, nodes, operands={f"{name}{suffix}": v for name, v in taken.items()})
    hand_out(editor, split, found, {name: fused.results[f"{name}{suffix}"] for name in ("dbeta", "dgamma")})
    return None


def statistics(editor: Editor, found: Sequence[Piece], before: ir.Node) -> dict[str, ir.Value]:
    """Put the means and inv_std of the pieces together; of one that is not reduced, anything finite."""
    nodes = [piece.mask.node for piece in found if piece.mask is not None]
    others = {"mean": 0.0, "inv_std": 1.0}
    return {
        name: joined(editor, [_statistic(editor, p, name, o) for p in found], before, nodes)
        for name, o in others.items()
    }


def concat_of(producer: Op, found: Sequence[Piece]) -> ir.Value | str:
    """Find the map that has at each masked piece's channels the map of its mask: what the operator reads, or what the
    maps are put together to."""
    masked = [piece for piece in found if piece.mask is not None]
    first = masked[0].mask
    assert first is not None
    wanted = sum(channels(piece.value) for piece in found)
    read_map = producer.operands["x"] if producer.steps.core in CONV_GRADS else None
    if read_map is not None and not any(piece.step for piece in found) and not is_channel_concat(read_map.producer()):
        read_map = None  # it reduces over two maps then
    seen = [read_map] if read_map is not None else _wholes(first.operands["x"])
    for whole in seen:
        if length(whole) == wanted and all(
            is_range(whole, piece.start, piece.mask.operands["x"]) for piece in masked if piece.mask is not None
        ):
            return whole
    if read_map is not None:
        return f"'{producer.node.name}' reads {read_map.name}, not what the masks are made from"
    return f"no Concat puts together what the masks of {producer.results['dx'].name} are made from"


def _wholes(value: ir.Value) -> list[ir.Value]:
    """List what a map is put together to with others by Concats, and by Concats of those."""
    found, pending = [], [value]
    while pending:
        for use in pending.pop().uses():
            if is_channel_concat(use.node) and use.node.outputs[0] not in found:
                found.append(use.node.outputs[0])
                pending.append(use.node.outputs[0])
    return found


def is_worth_it(producer: Op, found: Sequence[Piece], t: ir.Value, sweeps: int) -> bool:
    """Tell whether an operator reads a map already, or reading it costs no more than so many sweeps over the pieces: of
    the gradient, of their own map and, where they are masked, of the result."""
    if producer.operands.get("x") is t and reads_elements_of_x(producer.steps):
        return True
    own = sum(channels(piece.value) for piece in found if piece.mask is not None)
    return length(t) <= sweeps * own


def masking_of(found: Sequence[Piece]) -> tuple[str, ...] | str:
    """Give the steps that mask the pieces, none where none is masked; the reason where they are masked differently."""
    masked = [piece for piece in found if piece.step is not None]
    if not masked:
        return ()
    kinds = {(p.step, *sorted(p.mask.attributes.items())) for p in masked if p.mask is not None}
    if len(kinds) > 1:
        return "its pieces are masked by different activations"
    step = masked[0].step
    assert step is not None
    if any("Where" in p.mask.steps.epilogue for p in masked if p.mask is not None):
        return "a piece is masked in some of its channels alone"
    return (step,) if len(masked) == len(found) else ("Where", step)


def why_not(producer: Op, split: ir.Node, step: str) -> str | None:
    """Tell why what writes a gradient takes no masks and reductions of its pieces, or None."""
    dy = producer.results["dx"]
    if not is_only_read_by(dy, split):
        return f"{dy.name} has other readers"
    if not has_room_after(producer.steps, step) or {*REDUCTIONS} & {*producer.steps.epilogue}:
        return f"{producer.node.op_type} '{producer.node.name}' has no room for {step}"
    return None


def coefficients_of(t: ir.Value) -> dict[str, ir.Value] | None:
    """Find the a and b with which a map is read."""
    for use in t.uses():
        op = read(use.node)
        if op is not None and op.operands.get("x") is t and "Normalize" in op.steps.prologue:
            return {name: op.operands[name] for name in ("a", "b")}
    return None


def _agrees(piece: Piece, coefficients: dict[str, ir.Value]) -> bool:
    """Tell whether the mask of a piece is made with these coefficients."""
    if piece.step is None or piece.mask is None:
        return True
    mine = {name: piece.mask.operands.get(name) for name in coefficients}
    return all(value is not None and is_range(coefficients[name], piece.start, value) for name, value in mine.items())


def _statistic(editor: Editor, piece: Piece, name: str, other: float) -> ir.Value:
    """Give a piece's mean or inv_std, or a constant."""
    if piece.mask is not None and name in piece.mask.operands:
        return piece.mask.operands[name]
    return editor.constant(f"{piece.value.name}/{name}", np.full(channels(piece.value), other, np.float32))


def hand_out(editor: Editor, split: ir.Node, found: Sequence[Piece], sums: dict[str, ir.Value]) -> None:
    """Give the readers of the masks' results the pieces, and their channels of the sums, [C] each, by their names."""
    lengths = [channels(piece.value) for piece in found]
    nodes = [piece.mask.node for piece in found if piece.mask is not None]
    for name, value in sums.items():
        parts = pieces(editor, value, lengths, nodes)
        for piece, part in zip(found, parts, strict=True):
            if piece.mask is not None and name in piece.mask.results:
                editor.take_over(piece.mask.results[name], part)
    for piece in found:
        if piece.mask is not None and "dx" in piece.mask.results:
            editor.take_over(piece.mask.results["dx"], piece.value)
    editor.remove_dead(nodes)
    read_slices(editor, split)


def read_slices(editor: Editor, split: ir.Node) -> None:
    """Let what reads a Split's pieces as its dy read the channels itself, where all of them can: no Split is left."""
    dy = split.inputs[0]
    parts = list(flat_pieces(split))
    readers = [(start, value, use) for value, start in parts for use in value.uses()]
    specs: dict[ir.Node, OpSpec] = {}
    for _, value, use in readers:
        op = read(use.node)
        if op is None or not isinstance(op.spec, OpSpec) or not op.spec.is_gradient:
            return
        spec = try_spec(("Slice", *op.spec.prologue), op.spec.core, op.spec.epilogue)
        if spec is None or [name for name, operand in op.operands.items() if operand is value] != ["dy"]:
            return
        specs[use.node] = spec
    if any(value.is_graph_output() for value, _ in parts):
        return
    for start, value, use in readers:
        op = read(use.node)
        assert op is not None and dy is not None
        bounds = {"grad_start": start, "grad_stop": start + channels(value)}
        editor.replace(op, specs[use.node], operands={"dy": dy}, attributes=bounds)
    editor.remove_dead([split, *(node for value, _ in parts if (node := value.producer()) is not None)])
