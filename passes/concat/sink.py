"""ICF for BN -> activation -> Concat (GoogLeNet, SqueezeNet with BN): the halves sink through the Concat.

    y1 = NormalizeReluPointwise(x1, a1, b1)           t = Concat(x1, x2)
    y2 = NormalizeReluPointwise(x2, a2, b2)    ->     y = NormalizeReluPointwise(t, Concat(a1, a2), Concat(b1, b2))
    y  = Concat(y1, y2)

    dy1, dy2 = Split(dy)                       dz, db, dg = NormalizePointwiseGradReluGradReduce(dy, t, ...)
    dz1, db1, dg1 = NormalizePointwiseGradReluGradReduce(dy1, x1, ...)    db1, db2 = Split(db); dg1, dg2 = Split(dg)
    dz2, ...                                   dz1 and dz2 are read as channels of dz

One map instead of many: what reads y has room for the steps, and what writes dy for the mask and the reductions.

Refuses a Concat of which an operand is not such a map, has another activation, or whose gradient is not split
into these.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.owners import forward_name
from bnfuse.analysis.provenance import channels, is_channel_concat, is_channel_split
from bnfuse.opset.spec import ACTIVATION_GRADS, OpSpec
from bnfuse.passes.dialect.source_ops import forward_of, read, sizes
from bnfuse.passes.dialect.steps import try_spec
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by


@dataclasses.dataclass(frozen=True)
class Branch:
    """One operand of the Concat: the map that normalises it, and what masks and reduces its gradient."""

    forward: Op
    mask: Op


class ConcatSink(ir.passes.InPlacePass):
    """Move the normalise halves and activations before a channel Concat behind it, forward and backward."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "icf")
        for node in [node for node in model.graph if is_channel_concat(node)]:
            forwards = [forward_of(value) for value in node.inputs]
            if not any(op is not None and _normalizes(op) for op in forwards):
                continue
            branches, split = match(node)
            if isinstance(branches, str):
                editor.refuse(node, branches)
            else:
                assert split is not None
                sink(editor, node, branches, split)
        return editor.result()


def _normalizes(op: Op) -> bool:
    prologue = op.steps.prologue
    return (
        op.steps.core == "Pointwise" and prologue[:1] == ("Normalize",) and len(prologue) == 2 and not op.steps.epilogue
    )


def match(concat: ir.Node) -> tuple[list[Branch] | str, ir.Node | None]:
    """Match the branches of a Concat and the Split of its gradient, or give the reason why it stays."""
    split = split_of(concat)
    if split is None:
        return "its gradient is not split", None
    branches: list[Branch] = []
    for value, piece in zip(concat.inputs, split.outputs, strict=True):
        forward = forward_of(value)
        if value is None or forward is None or not _normalizes(forward):
            return f"{value.name if value else 'an operand'} is not a normalised and activated map", None
        if not is_only_read_by(value, concat):
            return f"{value.name} has another reader", None
        readers = [use.node for use in piece.uses()]
        mask = read(readers[0]) if len(readers) == 1 and not piece.is_graph_output() else None
        if mask is None or not _masks(mask, forward):
            return f"{piece.name} is read by more than its own mask", None
        branches.append(Branch(forward, mask))
    first = branches[0]
    for branch in branches[1:]:
        if branch.forward.spec != first.forward.spec or branch.forward.attributes != first.forward.attributes:
            return "its operands have different activations", None
        if branch.mask.spec != first.mask.spec:
            return "its operands' gradients are reduced in different ways", None
    return branches, split


def split_of(concat: ir.Node) -> ir.Node | None:
    """Find the Split of a Concat's gradient: the one that is named after it, or whose first piece its first map masks.

    What is done with it does not follow from that: each piece must be the dy of the mask of its map.
    """
    splits = [node for node in concat.graph or () if is_channel_split(node)]
    named = [node for node in splits if forward_name(node.name or "") == concat.name]
    first = forward_of(concat.inputs[0])
    masked = []
    for use in first.operands["x"].uses() if first is not None and not named else ():
        dy = op.operands.get("dy") if (op := read(use.node)) is not None else None
        split = dy.producer() if dy is not None else None
        if is_channel_split(split) and dy is split.outputs[0] and split not in masked:
            masked.append(split)
    found = [node for node in (*named, *masked) if len(node.outputs) == len(concat.inputs)]
    return found[0] if len(found) == 1 else None


def _masks(mask: Op, forward: Op) -> bool:
    return (
        isinstance(mask.spec, OpSpec)
        and mask.spec.core == "PointwiseGrad"
        and mask.spec.prologue == ("Normalize",)
        and mask.spec.epilogue
        in ((f"{forward.steps.prologue[1]}Grad",), (f"{forward.steps.prologue[1]}Grad", "Reduce"))
        and mask.spec.epilogue[0] in ACTIVATION_GRADS
        and mask.operands["x"] is forward.operands["x"]
        and all(_reads_as_dy(use.node, mask.results["dx"]) for use in mask.results["dx"].uses())
        and not mask.results["dx"].is_graph_output()
    )


def _reads_as_dy(node: ir.Node, value: ir.Value) -> bool:
    """Whether a reader of a branch's dz can read it as channels of a wider gradient."""
    op = read(node)
    return (
        op is not None
        and isinstance(op.spec, OpSpec)
        and op.spec.is_gradient
        and [name for name, operand in op.operands.items() if operand is value] == ["dy"]
        and try_spec(("Slice", *op.spec.prologue), op.spec.core, op.spec.epilogue) is not None
    )


def sink(editor: Editor, concat: ir.Node, branches: list[Branch], split: ir.Node) -> None:
    """Put one operator behind the Concat, and one before the gradient's Split, in the place of one for each branch."""
    first = branches[0]
    forwards, masks = [b.forward for b in branches], [b.mask for b in branches]
    nodes = [concat, *(op.node for op in forwards)]

    def joined(name: str, ops: list[Op]) -> ir.Value:
        values = [op.operands[name] for op in ops]
        (value,) = editor.standard("Concat", values, 1, before=concat, of=nodes, axis=0)
        value.shape, value.type = ir.Shape([sum(sizes(v)[0] for v in values)]), values[0].type
        return value

    y = concat.outputs[0]
    (t,) = editor.standard("Concat", [op.operands["x"] for op in forwards], 1, before=concat, of=nodes, axis=1)
    t.shape, t.type = y.shape, y.type
    steps = {"x": t, "a": joined("a", forwards), "b": joined("b", forwards)}
    statistics: dict[str, ir.Value] = {
        name: joined(name, masks) for name in ("mean", "inv_std") if name in first.mask.operands
    }
    editor.emit(
        first.forward.steps, steps, first.forward.attributes, {"y": y}, before=concat, of=nodes,
        name=editor.fresh(f"{concat.name}/normalize"),
    )  # fmt: skip

    dy = split.inputs[0]
    assert dy is not None
    dz = ir.Value(name=editor.fresh(f"{dy.name}/masked"), shape=y.shape, type=y.type)
    made = editor.emit(
        first.mask.steps, {"dy": dy, **steps, **statistics}, first.mask.attributes, {"dx": dz},
        before=split, of=[split, *(op.node for op in masks)], name=editor.fresh(f"{split.name}/mask"),
    )  # fmt: skip
    start = 0
    for mask in masks:
        stop = start + channels(mask.operands["x"])
        for reader in dict.fromkeys(use.node for use in mask.results["dx"].uses()):
            op = read(reader)
            assert op is not None
            spec = OpSpec(("Slice", *op.steps.prologue), op.steps.core, op.steps.epilogue)
            editor.replace(op, spec, operands={"dy": made["dx"]}, attributes={"grad_start": start, "grad_stop": stop})
        start = stop
    lengths = np.array([sizes(op.operands["x"])[1] for op in masks], np.int64)
    for name in ("dbeta", "dgamma") if "Reduce" in first.mask.steps.epilogue else ():
        sizes_value = editor.constant(f"{split.name}/lengths", lengths)
        parts = editor.standard("Split", [made[name], sizes_value], len(masks), before=split, of=[split], axis=0)
        for mask, part in zip(masks, parts, strict=True):
            editor.take_over(mask.results[name], part)
    editor.remove_dead([*(op.node for op in masks), split, concat, *(op.node for op in forwards)])
