"""BNFF backward: a BN and its activation whose gradient others read as it is, or that no convolution masks for them.

    dy = ConvGrad(...)                             dy, db, dg = ConvGradReduceReluGrad(..., x, mean, inv_std, a, b)
    dz, db, dg =
      NormalizePointwiseGradReluGradReduce(  ->
        dy, x, a, b, mean, inv_std)
    dt, dw =                                       dt, dw = ReluGradBatchNormGradConvGrad(dy, t, w, a, b, x, p, q, w)
      BatchNormGradConvGrad(dz, t, w, x, p, q, w)

Behind a residual sum y = r + relu(bn(x)) the gradient of y is that of r too, so it is stored as it is. The operator
that writes it sums what the BN needs of the masked gradient, and what reads the BN's input gradient masks it on its way
in: both read x, which the sweep did too, and dz is neither written nor read.

Where dy is the sum of two gradients that are both stored for others (Res2Net), it is not stored either: the writer of
one takes the other into what it sums (ReduceAddedReluGrad), and the reader adds it (AddGrad).

A BN whose gradient is put together of pieces that several convolutions write (of the channels of a Split) reads their
Concat: there each piece is masked. A piece that its skip needs unmasked goes into the Concat unmasked, and the reader
masks the whole; those that are masked already do not change, for a mask of 0 and 1.

Behind a factor of each channel (a number that a map is multiplied by, BiFPN's) the sums are taken before it and
multiplied by it, [C] each, and the reader multiplies on its way in (GateGrad).

Refuses a gradient that is written by an operator with no room for the sums, and a masked gradient that anything but the
input half of its own BN reads.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.ancestors import ancestors
from bnfuse.analysis.provenance import channels, is_channel_concat, is_channel_split, leaves
from bnfuse.opset.spec import ACTIVATION_GRADS, OpSpec, around_batch_norm_grad
from bnfuse.passes.dialect.source_ops import constant_of, gradient_of, read, sizes
from bnfuse.passes.dialect.steps import has_room_after, try_spec
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by, sort

OF_ZERO_AND_ONE = ("ReluGrad", "ClipGrad")  # masking once more changes nothing


@dataclasses.dataclass(frozen=True)
class Written:
    """What writes a gradient and will sum it masked; `other` is what is added to it before, if anything is."""

    writer: Op
    spec: OpSpec
    other: ir.Value | None = None


@dataclasses.dataclass(frozen=True)
class Readers:
    """What will mask a gradient on its way in: nodes and their operators then, with the coefficients of z there."""

    found: tuple[tuple[ir.Node, OpSpec], ...]
    a: ir.Value
    b: ir.Value
    concat: tuple[ir.Node, int] | None = None  # where the gradient is a piece, and which


class SharedMaskFusion(ir.passes.InPlacePass):
    """Move the mask and the reductions of a BN to both sides of a gradient that is stored unmasked."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in list(model.graph):
            mask = read(node) if node.graph is not None else None
            if mask is not None and is_own_mask(mask):
                fuse(editor, mask)
        sort(model.graph)
        return editor.result()


def is_own_mask(op: Op) -> bool:
    """Tell whether a sweep does nothing but mask the gradient behind a BN's activation and sum it for that BN."""
    return (
        isinstance(op.spec, OpSpec)
        and op.spec.core == "PointwiseGrad"
        and (op.spec.prologue == ("Normalize",) or is_behind_factor(op))
        and len(op.spec.epilogue) == 2
        and op.spec.epilogue[0] in ACTIVATION_GRADS
        and op.spec.epilogue[1] == "Reduce"
    )


def is_behind_factor(op: Op) -> bool:
    """Tell whether the gradient is multiplied by a factor of each channel, [1, C, 1, 1], before it is masked."""
    gated = op.steps.prologue == ("GateGrad", "Normalize")
    return gated and sizes(op.operands["grad_gate"]) == (1, channels(op.operands["x"]), 1, 1)


def fuse(editor: Editor, mask: Op) -> None:
    """Move a mask and its reductions, or refuse."""
    dy, dz = mask.operands["dy"], mask.results["dx"]
    factor = mask.operands.get("grad_gate")
    written = written_alone(mask, dy) or (written_in_part(mask, dy) if factor is None else None)
    if written is None:
        editor.refuse(mask.node, f"{dy.name} is written by {_writer(dy)}, which has no room for its sums")
        return
    readers = own_readers(mask, written.other is not None)
    if readers is None and factor is None:
        readers = piece_readers(mask, written.other is not None)
    if dz.is_graph_output() or readers is None:
        editor.refuse(mask.node, f"{dz.name} is read by more than the input gradient of its BatchNorm")
        return
    number = written.spec.others
    operands = {f"{name}_{number}": mask.operands[name] for name in ("x", "mean", "inv_std", "a", "b")}
    results = {f"{name}_{number}": mask.results[name] for name in ("dbeta", "dgamma") if name in mask.results}
    added = {} if written.other is None else {f"other_{number}": written.other}
    kept, glue = mask.attributes, dy.producer()
    made = editor.replace(
        written.writer,
        written.spec,
        [mask.node],
        operands={**operands, **added},
        results=results if factor is None else {},
        attributes=kept,
    )
    own = {"grad_a": readers.a, "grad_b": readers.b} | ({"grad_other": written.other} if written.other else {})
    if factor is not None:
        own["grad_gate"] = factor
        for name, old in results.items():
            editor.take_over(old, multiplied(editor, made.results[name], factor, mask.node))
    if readers.concat is not None:
        concat, index = readers.concat
        concat.replace_input_with(index, made.results["dx"])
    else:
        own["dy"] = made.results["dx"]
    for node, spec in readers.found:
        reader = read(node)  # as what came before has left it
        assert reader is not None
        editor.replace(reader, spec, [mask.node], operands=own, attributes=kept)
    editor.remove_dead([mask.node, *([glue] if written.other is not None and glue is not None else [])])


def multiplied(editor: Editor, sums: ir.Value, factor: ir.Value, before: ir.Node) -> ir.Value:
    """Multiply sums, [C], by a factor of each channel, [1, C, 1, 1]."""
    shape = editor.constant(f"{factor.name}/vector", np.array([-1], np.int64))
    (vector,) = editor.standard("Reshape", [factor, shape], 1, before=before, of=[before])
    vector.shape, vector.type = sums.shape, sums.type
    (product,) = editor.standard("Mul", [sums, vector], 1, before=before, of=[before])
    return product


# -- what writes the gradient --------------------------------------------------------------------------------------


def written_alone(mask: Op, dy: ir.Value) -> Written | None:
    """Find the operator that writes dy, with room for the sums."""
    writer = gradient_of(dy)
    spec = with_sums(mask, writer, f"Reduce{mask.steps.epilogue[0]}") if writer is not None else None
    return Written(writer, spec) if writer is not None and spec is not None else None


def written_in_part(mask: Op, dy: ir.Value) -> Written | None:
    """Find the operator that writes one of the two terms of a Sum that is dy, and does not need the other for that."""
    node = dy.producer()
    terms = [value for value in node.inputs if value is not None] if node is not None and node.op_type == "Sum" else []
    if node is None or len(terms) != 2 or not is_only_read_by(dy, mask.node):
        return None
    for term, other in (terms, terms[::-1]):
        writer = gradient_of(term)
        spec = with_sums(mask, writer, f"ReduceAdded{mask.steps.epilogue[0]}") if writer is not None else None
        if writer is not None and spec is not None and writer.node not in ancestors([other]):
            return Written(writer, spec, other)
    return None


def with_sums(mask: Op, writer: Op, step: str) -> OpSpec | None:
    """Compose what writes a gradient with the sums of what the mask makes of it; None where it has no room."""
    if not has_room_after(writer.steps, step) or not _agree(mask, writer):
        return None
    return try_spec(writer.steps.prologue, writer.steps.core, (*writer.steps.epilogue, step))


# -- what reads the masked gradient --------------------------------------------------------------------------------


def own_readers(mask: Op, added: bool) -> Readers | None:
    """Find the operators that read the masked gradient as the dy of its own BN's input half; None where others do."""
    dz = mask.results["dx"]
    found = [masking(mask, use.node, dz, mask.operands["x"], added) for use in dz.uses()]
    whole = tuple(reader for reader in found if reader is not None)
    return Readers(whole, mask.operands["a"], mask.operands["b"]) if whole and len(whole) == len(found) else None


def piece_readers(mask: Op, added: bool) -> Readers | None:
    """Find the operators that read the masked gradient as a piece, in a Concat of nothing but such pieces of one BN."""
    dz, step = mask.results["dx"], mask.steps.epilogue[0]
    uses = list(dz.uses())
    concat = uses[0].node if len(uses) == 1 else None
    if added or concat is None or not is_channel_concat(concat) or step not in OF_ZERO_AND_ONE:
        return None
    whole = {name: whole_of(mask.operands[name], concat, uses[0].idx) for name in ("x", "a", "b")}
    if None in whole.values() or concat.outputs[0].is_graph_output():
        return None
    x, a, b = (whole[name] for name in ("x", "a", "b"))
    assert x is not None and a is not None and b is not None
    found: list[tuple[ir.Node, OpSpec]] = []
    for use in concat.outputs[0].uses():
        reader = read(use.node)
        if reader is not None and _masks_whole(reader, step, concat.outputs[0], x, a, b):
            continue
        new = masking(mask, use.node, concat.outputs[0], x, added)
        if new is None or not all(is_masked(index, mask, (x, a, b), concat) for index in range(len(concat.inputs))):
            return None
        found.append(new)
    return Readers(tuple(found), a, b, (concat, uses[0].idx))


def whole_of(piece: ir.Value, concat: ir.Node, index: int) -> ir.Value | None:
    """Find what a value is piece number `index` of, where a Split cuts that as the Concat puts its pieces together."""
    split = piece.producer()
    if split is None or split.op_type != "Split" or len(split.outputs) != len(concat.inputs):
        return None
    lengths = constant_of(split.inputs[1]) if len(split.inputs) > 1 else None
    wanted = [sizes(value)[1] for value in concat.inputs if value is not None]
    if split.outputs[index] is not piece or lengths is None or lengths.tolist() != wanted:
        return None
    return split.inputs[0]


def is_masked(index: int, mask: Op, wholes: tuple[ir.Value, ir.Value, ir.Value], concat: ir.Node) -> bool:
    """Tell whether operand number `index` of a Concat is the gradient at its piece of z, masked by that.

    An operator writes it, or it is a Split's piece of what one writes. `wholes` are x, a and b of all pieces.
    """
    value, start = concat.inputs[index], 0
    assert value is not None
    written, split, stop = value, value.producer(), channels(value)
    if is_channel_split(split):
        before = split.outputs[: split.outputs.index(value)]
        start = sum(channels(other) for other in before)
        written, stop = split.inputs[0], start + stop  # type: ignore[assignment]
    op = gradient_of(written)
    if op is None or not _masks(op, mask, start, stop):
        return False
    pieces = [part(op.operands[name], op.operands["x"], start, stop) for name in "xab"]
    found = [whole_of(piece, concat, index) if piece is not None else None for piece in pieces]
    return all(whole is wanted for whole, wanted in zip(found, wholes, strict=True))


def _masks(op: Op, mask: Op, start: int, stop: int) -> bool:
    """Tell whether an operator masks these channels of its dx as `mask` does, and leaves them so."""
    steps = {*op.steps.epilogue}
    if mask.steps.epilogue[0] not in steps or {"AddSkipGradient", "Scale", "Accumulate"} & steps:
        return False
    chosen = constant_of(op.operands["masked"]) if "Where" in steps else None
    somewhere_not = "Where" in steps and (chosen is None or not (chosen[start:stop] > 0).all())
    return "Normalize" in op.steps.prologue and not somewhere_not and _agree(mask, op)


def part(value: ir.Value, x: ir.Value, start: int, stop: int) -> ir.Value | None:
    """Find the part of x, or of a vector of its channels, that is of channels [start, stop) of x."""
    if (start, stop) == (0, channels(x)):
        return value
    found = leaves(x)
    places = [place for place, leaf in enumerate(found) if (leaf.start, leaf.stop) == (start, stop)]
    node = value.producer()
    operands = node.inputs if node is not None and node.op_type == "Concat" else ()
    return operands[places[0]] if places and len(operands) == len(found) else None


def _masks_whole(reader: Op, step: str, dy: ir.Value, x: ir.Value, a: ir.Value, b: ir.Value) -> bool:
    """Tell whether a reader masks all of a Concat already, for another piece."""
    return (
        isinstance(reader.spec, OpSpec)
        and around_batch_norm_grad(reader.spec.prologue)[0] == step
        and [name for name, value in reader.operands.items() if value is dy] == ["dy"]
        and all(reader.operands[name] is value for name, value in (("grad_x", x), ("grad_a", a), ("grad_b", b)))
    )


def masking(mask: Op, node: ir.Node, dz: ir.Value, x: ir.Value, added: bool) -> tuple[ir.Node, OpSpec] | None:
    """Compose a reader of the masked gradient dz with the mask on its way in; None where it is of more than the BN of
    x."""
    reader = read(node)
    if reader is None or not isinstance(reader.spec, OpSpec) or not reader.spec.is_gradient or not _agree(mask, reader):
        return None
    prologue = reader.steps.prologue
    if [name for name, value in reader.operands.items() if value is dz] != ["dy"] or "BatchNormGrad" not in prologue:
        return None
    if reader.operands["grad_x"] is not x or {"Slice", "GateGrad"} & {*prologue}:
        return None
    if around_batch_norm_grad(prologue) != (None, None):
        return None
    first = ("AddGrad",) if added else ("GateGrad",) if is_behind_factor(mask) else ()
    spec = try_spec((*first, mask.steps.epilogue[0], *prologue), reader.steps.core, reader.steps.epilogue)
    return (node, spec) if spec is not None else None


def _agree(mask: Op, other: Op) -> bool:
    return all(other.attributes.get(key, value) == value for key, value in mask.attributes.items())


def _writer(value: ir.Value) -> str:
    node = value.producer()
    return f"{node.op_type} '{node.name}'" if node is not None else "no node"
