"""ICF backward: a BN behind one operand of a Concat reduces over that part of the Concat's gradient.

    d, dw  = ConvGrad(..)                                  d, dw, db, dg =
    d1, d2 = Split(d)                                ->      ConvGradPartReduceReluGrad(.., x, a, b, mean, inv_std)
    dz, db, dg =                                           d1, d2 = Split(d); db, _ = Split(db); dg, _ = Split(dg)
      NormalizePointwiseGradReluGradReduce(
        d1, x, a, b, mean, inv_std)
    dt, dw = BatchNormGradConvGrad(dz, t, w, x, ..)        dt, dw = ReluGradBatchNormGradConvGrad(d1, t, w, x, a, b, ..)

    d, dw  = ConvGrad(..)                                  d, dw, db, dg =
    d1, d2 = Split(d)                                ->      ConvGradWhereReluGradPartReduceOther(.., x, mean, inv_std)
    dz, db, dg =                                           dz, d2 = Split(d); db, _ = Split(db); dg, _ = Split(dg)
      PointwiseGradReluGradReduceOther(
        d1, s, x, mean, inv_std)

So it is where a residual sum goes into a Concat (the last block of a cross-stage part, of DLA's trees): the gradient of
r + relu(bn(x)) is also that of r, so it stays as it is. x is read beside the channels of d that it belongs to, which is
one map where a sweep of its own reads two and writes one. A reduction that nothing masks moves the same way.

A Relu behind the sum s that the convolution reads as a part of its own map is masked there, in those channels.

Comes when everything else has been tried: a Concat of the raw maps is read at no cost.

Refuses a gradient whose writer has no room, and a masked one that anything but the input half of its own BN reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.provenance import channels, is_channel_split
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import CONV_GRADS, OpSpec, parts_of
from bnfuse.passes.concat.ranges import is_range, joined, length, pieces
from bnfuse.passes.dialect.source_ops import constant_of, gradient_of, is_map, read
from bnfuse.passes.dialect.steps import ACCUMULATIONS, REDUCTIONS, has_room_after, try_spec
from bnfuse.passes.fusion.shared_mask import Readers, is_behind_factor, is_own_mask, own_readers
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by, sort

REDUCE = PLAIN_OPS["BatchNormGradReduce"]
VECTORS = ("mean", "inv_std", "a", "b")  # of the BN, where it has them


class PartReduction(ir.passes.InPlacePass):
    """Move reductions, and masks before them, of a Split's piece to what writes the gradient that is split."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "icf")
        for node in list(model.graph):
            op = read(node) if node.graph is not None else None
            if op is not None and (op.spec is REDUCE or (is_own_mask(op) and not is_behind_factor(op))):
                fuse(editor, op)
            elif op is not None and is_mask_of_sum(op):
                fuse_mask_of_sum(editor, op)
        sort(model.graph)
        return editor.result()


def fuse(editor: Editor, op: Op) -> None:
    """Move a reduction, perhaps behind a mask, of a piece of a gradient; or refuse."""
    dy = op.operands["dz" if op.spec is REDUCE else "dy"]
    found = writer_of(dy)
    if found is None:
        return
    writer, start = found
    spec = with_part(op, writer)
    if spec is None:
        editor.refuse(op.node, f"{writer.node.op_type} '{writer.node.name}' has no room for its sums")
        return
    readers = None
    if op.spec is not REDUCE:
        readers = own_readers(op, False)
        if op.results["dx"].is_graph_output() or readers is None:
            name = op.results["dx"].name
            editor.refuse(op.node, f"{name} is read by more than the input gradient of its BatchNorm")
            return
    reduce_part(editor, op, writer, spec, start, [Sums.of(op)])
    if readers is not None:
        mask_on_the_way_in(editor, op, readers, dy)
    editor.remove_dead([op.node])


def is_mask_of_sum(op: Op) -> bool:
    """Tell whether a sweep masks the gradient behind the Relu of a stored sum, and sums it for BNs before the sum."""
    if not isinstance(op.spec, OpSpec) or (op.spec.core, op.spec.prologue) != ("PointwiseGrad", ()):
        return False
    mask, *sums = op.spec.epilogue or ("",)
    return mask == "ReluGrad" and bool(sums) and {*sums} == {"ReduceOther"}


def fuse_mask_of_sum(editor: Editor, op: Op) -> None:
    """Move the mask of a sum that is an operand of a Concat, and its reductions, into what writes the gradient."""
    dy, x = op.operands["dy"], op.operands["x"]
    found = writer_of(dy, alone=True) if is_only_read_by(dy, op.node) else None
    if found is None:
        return
    writer, start = found
    steps = writer.steps
    if reason := why_not_masked(writer, start, x):
        editor.refuse(op.node, reason)
        return
    sums = [Sums.of(op, f"_{number}") for number in range(1, op.steps.others + 1)]
    mask = () if "ReluGrad" in steps.epilogue else ("Where", "ReluGrad")
    spec = try_spec(steps.prologue, steps.core, (*steps.epilogue, *mask, *("Part", "ReduceOther") * len(sums)))
    if spec is None:
        editor.refuse(op.node, f"{writer.node.op_type} '{writer.node.name}' has no room for ReluGrad")
        return
    reduce_part(editor, op, writer, spec, start, sums)
    editor.take_over(op.results["dx"], dy)
    editor.remove_dead([op.node])


def why_not_masked(writer: Op, start: int, x: ir.Value) -> str | None:
    """Tell why what writes a gradient cannot mask the channels from `start` on by the map x, or None."""
    steps, name = writer.steps, f"'{writer.node.name}'"
    alone = has_room_after(steps, "ReluGrad") and not {*REDUCTIONS} & {*steps.epilogue}
    if not alone and not leaves_alone(writer, start, start + channels(x)):
        return f"{writer.node.op_type} {name} has no room for ReluGrad"
    normalized = "Normalize" in steps.prologue and not is_identity(writer, start, start + channels(x))
    if steps.core not in CONV_GRADS or normalized or "Gate" in steps.prologue:
        return f"{name} does not read what the mask is made from as it is"
    if not is_range(writer.operands["x"], start, x):
        return f"{name} reads {writer.operands['x'].name}, not what the mask is made from"
    return None


def is_identity(writer: Op, start: int, stop: int) -> bool:
    """Tell whether an operator's normalise half leaves the channels [start, stop) as they are."""
    return all(known_range(writer.operands[name], start, stop, value) for name, value in (("a", 1), ("b", 0)))


def known_range(vector: ir.Value, start: int, stop: int, value: float) -> bool:
    """Tell whether a vector of channels is known to have one value in all of [start, stop)."""
    node = vector.producer()
    parts = [part for part in node.inputs if part is not None] if node is not None and node.op_type == "Concat" else []
    if not parts:
        constant = constant_of(vector)
        return constant is not None and bool((constant[start:stop] == value).all())
    begin = 0
    for part in parts:
        end = begin + length(part)
        if begin < stop and start < end and not known_range(part, max(start - begin, 0), min(stop, end) - begin, value):
            return False
        begin = end
    return True


def leaves_alone(writer: Op, start: int, stop: int) -> bool:
    """Tell whether an operator masks by a Relu and reduces in other channels than [start, stop) alone."""
    steps = writer.steps.epilogue
    if not {"Where", "ReluGrad"} <= {*steps} or {"AddSkipGradient", *ACCUMULATIONS} & {*steps}:
        return False
    if "Reduce" in steps and any(is_read(writer.results[name], start, stop) for name in ("dbeta", "dgamma")):
        return False
    if len(parts_of(steps)) < writer.steps.others:
        return False
    names = ("masked", *(f"part_{number}" for number in parts_of(steps)))
    vectors = [constant_of(writer.operands[name]) for name in names]
    return all(vector is not None and not (vector[start:stop] > 0).any() for vector in vectors)


def is_read(vector: ir.Value, start: int, stop: int) -> bool:
    """Tell whether something reads elements [start, stop) of a vector, which may be cut into pieces."""
    if vector.is_graph_output():
        return True
    for use in vector.uses():
        if use.node.op_type != "Split" or use.node.domain:
            return True
        begin = 0
        for piece in use.node.outputs:
            end = begin + length(piece)
            if begin < stop and start < end and is_read(piece, max(start - begin, 0), min(stop, end) - begin):
                return True
            begin = end
    return False


def writer_of(piece: ir.Value, alone: bool = False) -> tuple[Op, int] | None:
    """Find the operator that writes the gradient of which a value is a piece, and the channel where that begins. With
    `alone` None where anything but its Split reads what is split: it would find the piece changed."""
    start, split = 0, piece.producer()
    if not is_channel_split(split):
        return None
    while is_channel_split(split):
        start += sum(channels(value) for value in split.outputs[: split.outputs.index(piece)])
        assert split.inputs[0] is not None
        piece = split.inputs[0]
        if alone and not is_only_read_by(piece, split):
            return None
        split = piece.producer()
    writer = gradient_of(piece) if is_map(piece) else None
    return (writer, start) if writer is not None else None


def with_part(op: Op, writer: Op) -> OpSpec | None:
    """Compose what writes a gradient with the sums of an operator over a part of it; None where it has no room."""
    step = "ReduceOther" if op.spec is REDUCE else f"Reduce{op.steps.epilogue[0]}"
    agrees = all(writer.attributes.get(key, value) == value for key, value in op.attributes.items())
    if not agrees or not has_room_after(writer.steps, step):
        return None
    return try_spec(writer.steps.prologue, writer.steps.core, (*writer.steps.epilogue, "Part", step))


@dataclasses.dataclass(frozen=True)
class Sums:
    """The sums of one BN over a part: what they are of, and the values that they become."""

    operands: dict[str, ir.Value]  # x, mean, inv_std, and a and b where they are behind an activation
    results: dict[str, ir.Value]  # dbeta and dgamma, as far as something reads them

    @staticmethod
    def of(op: Op, suffix: str = "") -> Sums:
        """Take those that an operator has under names that end in `suffix`."""
        operands = {n: op.operands[f"{n}{suffix}"] for n in ("x", *VECTORS) if f"{n}{suffix}" in op.operands}
        results = {n: op.results[f"{n}{suffix}"] for n in ("dbeta", "dgamma") if f"{n}{suffix}" in op.results}
        return Sums(operands, results)


def reduce_part(
    editor: Editor, op: Op, writer: Op, spec: OpSpec, start: int, sums: Sequence[Sums], **more: ir.Value
) -> Op:
    """Put sums of an operator into what writes the gradient, over the channels from `start` on; the last reductions of
    `spec` are theirs. `more` are further operands."""
    before = writer.node
    own, count = channels(op.operands["x"]), channels(writer.results["dx"])
    lengths = [start, own, count - start - own]

    def around(value: ir.Value) -> ir.Value:
        """Put zeros around a vector of the part's channels."""
        parts = [editor.constant(f"{value.name}/around", np.zeros(length, np.float32)) for length in lengths]
        parts[1] = value
        return joined(editor, [part for part, length in zip(parts, lengths, strict=True) if length], before, [op.node])

    chosen = np.repeat(np.array([0, 1, 0], np.float32), lengths)
    within = editor.constant(f"{op.node.name}/part", chosen)
    operands, attributes = dict(more), dict(op.attributes)
    if "Where" in spec.epilogue and is_mask_of_sum(op):
        masked = constant_of(writer.operands["masked"]) if "masked" in writer.operands else None
        operands["masked"] = within if masked is None else editor.constant(f"{op.node.name}/masked", masked + chosen)
    first = spec.others - len(sums) + 1
    for number, each in enumerate(sums, first):
        operands |= {f"{n}_{number}": v if n == "x" else around(v) for n, v in each.operands.items()}
        operands[f"part_{number}"] = within
        attributes[f"start_{number}"] = start
    made = editor.replace(writer, spec, [op.node], operands=operands, attributes=attributes)
    for number, each in enumerate(sums, first):
        for name, old in each.results.items():
            parts = pieces(editor, made.results[f"{name}_{number}"], [n for n in lengths if n], [op.node])
            editor.take_over(old, parts[1 if start else 0])
    return made


def mask_on_the_way_in(editor: Editor, op: Op, readers: Readers, dy: ir.Value) -> None:
    """Let what reads a masked gradient read it unmasked, and mask it."""
    operands = {"dy": dy, "grad_a": readers.a, "grad_b": readers.b}
    for node, spec in readers.found:
        reader = read(node)  # as what came before has left it
        assert reader is not None
        editor.replace(reader, spec, [op.node], operands=operands, attributes=op.attributes)
