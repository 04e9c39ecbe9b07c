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

Refuses a gradient that is written by an operator with no room for the sums, and a masked gradient that anything but the
input half of its own BN reads.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.spec import ACTIVATION_GRADS, OpSpec, around_batch_norm_grad
from bnfuse.passes.dialect.source_ops import gradient_of, read
from bnfuse.passes.dialect.steps import has_room_after, try_spec
from bnfuse.passes.rewriter import Editor, FusionResult, Op


class SharedMaskFusion(ir.passes.InPlacePass):
    """Move the mask and the reductions of a BN to both sides of a gradient that is stored unmasked."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in list(model.graph):
            mask = read(node) if node.graph is not None else None
            if mask is not None and is_own_mask(mask):
                fuse(editor, mask)
        return editor.result()


def is_own_mask(op: Op) -> bool:
    """Tell whether a sweep does nothing but mask the gradient behind a BN's activation and sum it for that BN."""
    return (
        isinstance(op.spec, OpSpec)
        and op.spec.core == "PointwiseGrad"
        and op.spec.prologue == ("Normalize",)
        and len(op.spec.epilogue) == 2
        and op.spec.epilogue[0] in ACTIVATION_GRADS
        and op.spec.epilogue[1] == "Reduce"
    )


def fuse(editor: Editor, mask: Op) -> None:
    """Move a mask and its reductions, or refuse."""
    writer = gradient_of(mask.operands["dy"])
    summing = with_sums(mask, writer) if writer is not None else None
    readers = [masking(mask, use.node) for use in mask.results["dx"].uses()]
    found = [reader for reader in readers if reader is not None]
    if writer is None or summing is None:
        dy = mask.operands["dy"]
        editor.refuse(mask.node, f"{dy.name} is written by {_writer(dy)}, which has no room for its sums")
        return
    if mask.results["dx"].is_graph_output() or len(found) < len(readers):
        editor.refuse(mask.node, f"{mask.results['dx'].name} is read by more than the input gradient of its BatchNorm")
        return
    number = summing.others
    operands = {f"{name}_{number}": mask.operands[name] for name in ("x", "mean", "inv_std", "a", "b")}
    results = {f"{name}_{number}": mask.results[name] for name in ("dbeta", "dgamma") if name in mask.results}
    attributes = mask.attributes
    written = editor.replace(writer, summing, [mask.node], operands=operands, results=results, attributes=attributes)
    own = {"dy": written.results["dx"], "grad_a": mask.operands["a"], "grad_b": mask.operands["b"]}
    for node, spec in found:
        reader = read(node)  # as what came before has left it
        assert reader is not None
        editor.replace(reader, spec, [mask.node], operands=own, attributes=attributes)
    editor.remove_dead([mask.node])


def with_sums(mask: Op, writer: Op) -> OpSpec | None:
    """Compose what writes dy with the sums of what the mask makes of it; None where it has no room."""
    step = f"Reduce{mask.steps.epilogue[0]}"
    if not has_room_after(writer.steps, step) or not _agree(mask, writer):
        return None
    return try_spec(writer.steps.prologue, writer.steps.core, (*writer.steps.epilogue, step))


def masking(mask: Op, node: ir.Node) -> tuple[ir.Node, OpSpec] | None:
    """Compose a reader of the masked gradient with the mask on its way in; None where it is of more than that BN."""
    reader, dz = read(node), mask.results["dx"]
    if reader is None or not isinstance(reader.spec, OpSpec) or not reader.spec.is_gradient or not _agree(mask, reader):
        return None
    prologue = reader.steps.prologue
    if [name for name, value in reader.operands.items() if value is dz] != ["dy"] or "BatchNormGrad" not in prologue:
        return None
    if reader.operands["grad_x"] is not mask.operands["x"] or {"Slice", "GateGrad"} & {*prologue}:
        return None
    if around_batch_norm_grad(prologue) != (None, None):
        return None
    spec = try_spec((mask.steps.epilogue[0], *prologue), reader.steps.core, reader.steps.epilogue)
    return (node, spec) if spec is not None else None


def _agree(mask: Op, other: Op) -> bool:
    return all(other.attributes.get(key, value) == value for key, value in mask.attributes.items())


def _writer(value: ir.Value) -> str:
    node = value.producer()
    return f"{node.op_type} '{node.name}'" if node is not None else "no node"
