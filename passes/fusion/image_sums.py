"""BNFF for GroupNorms: the sums of each image move into what writes the map that they are of.

    y    = Conv(x, w)                            y, m, v = ConvImageStatistics(x, w)
    m, v = GroupNormStatistics(y)          ->

    dz = ...ConvGradReluGrad(dy, x, ...)         dz, sum, dot = ...ConvGradReluGradImageReduce(dy, x, ...)
    sb, sg   = GroupNormGradReduce(dz, x, ..)    q, w, dg, db = GroupNormGradFinalize<raw = 1>(sum, dot, ...)
    q, w, .. = GroupNormGradFinalize(sb, sg, ..)

`dot` is the sum of dz*x, of which the finalize makes that of dz*(x - mean)*inv_std. A reduction over another map than
the one that the operator reads (behind a residual sum) takes that map with it: ImageReduceOther. A kernel that cannot
keep images apart sums in a sweep behind it, which is what there was before.

It runs when all other passes have found nothing more to do: what moves a mask would have to know the sums behind it.

Refuses a map that is written by something with no room: another sum of each image, statistics of a BatchNorm, no
operator of steps at all.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import OpSpec
from bnfuse.passes.dialect.source_ops import gradient_of
from bnfuse.passes.dialect.steps import has_room_after, try_spec
from bnfuse.passes.fusion import statistics
from bnfuse.passes.fusion.mask import reads
from bnfuse.passes.rewriter import Editor, FusionResult, Op, own_op

SUMS = {"dbeta": "image_sum", "dgamma": "image_dot"}


class ImageSumsFusion(ir.passes.InPlacePass):
    """Move statistics of images, and reductions over them, into the operators that write the maps."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in list(model.graph):
            op = own_op(node) if node.graph is not None else None
            if op is not None and op.spec.name == "GroupNormStatistics":
                statistics.fuse(editor, op, "ImageStatistics")
            elif op is not None and op.spec.name == "GroupNormGradReduce":
                fuse_reduce(editor, op)
        return editor.result()


def fuse_reduce(editor: Editor, reduce: Op) -> None:
    """Move the reductions of a GroupNorm's gradient into what writes that, or refuse."""
    dz, x = reduce.operands["dz"], reduce.operands["x"]
    producer, finalize = gradient_of(dz), finalize_of(reduce)
    if producer is None:
        editor.refuse(reduce.node, f"{dz.name} is written by {writer_of(dz)}, which has no epilogue")
        return
    spec = reduced(producer, x)
    if spec is None or finalize is None:
        editor.refuse(reduce.node, f"{producer.node.op_type} '{producer.node.name}' has no room for ImageReduce")
        return
    operands = {"x": x} if spec.epilogue[-1] == "ImageReduce" else {"reduced_x": x}
    results = {SUMS[name]: value for name, value in reduce.results.items()}
    fused = editor.replace(producer, spec, [reduce.node], operands=operands, results=results)
    sums = {name: fused.results[image] for name, image in SUMS.items()}
    editor.replace(finalize, finalize.spec, operands=sums, attributes={"raw": 1})  # type: ignore[arg-type]


def finalize_of(reduce: Op) -> Op | None:
    """Find the GroupNormGradFinalize that alone reads both reductions; None where something else does, too."""
    readers = {use.node for value in reduce.results.values() for use in value.uses()}
    op = own_op(readers.pop()) if len(readers) == 1 else None
    plain = op is not None and op.spec is PLAIN_OPS["GroupNormGradFinalize"] and not op.attributes.get("raw")
    return op if plain and len(reduce.results) == 2 else None


def reduced(producer: Op, x: ir.Value) -> OpSpec | None:
    """Compose a gradient operator that also sums over images: over its own map, or another one; None where it has no
    room."""
    steps = producer.steps
    gated = "Gate" in steps.prologue
    step = "ImageReduce" if reads(producer, x) and not gated else "ImageReduceOther"
    return try_spec(steps.prologue, steps.core, (*steps.epilogue, step)) if has_room_after(steps, step) else None


def writer_of(value: ir.Value) -> str:
    """Name what gives a map."""
    node = value.producer()
    return f"{node.op_type} '{node.name}'" if node is not None else "no node"
