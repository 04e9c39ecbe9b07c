"""BNFF behind gates: the sums of a gate's gradient and of its BN are taken by image where the gradient is written.

    du, dw = ...ConvGrad(dt, x, ...)               du, dw, gate, beta, gamma, slope, tilt =
                                                     ...ConvGradImageGateRelu(dt, x, ..., x, mean, inv_std, a, b)
    m  = NormalizeReluGateGlobalAveragePool(
           x, a, b, du)                      ->
    dg = Mul(m, H*W)                               dg = Reshape(gate)
    dz, db, dgamma =                               s  = ds/(H*W)
      NormalizeGlobalAveragePoolGrad               db = ReduceSum(beta*g + slope*s)
        AddGatedGradientReluGradReduce(            dgamma = ReduceSum(gamma*g + tilt*s)
          ds, x, a, b, du, g, mean, inv_std)
    dr, dv =                                       dr, dv = GateGradAddGradReluGradBatchNormGradConvGrad(
      BatchNormGradConvGrad(dz, r, v, x, ...)                 du, r, v, g, s, a, b, x, ...)

u = g*f(z) is the gated map and z = a*x + b. The gate g is known before du, but what its pooling passes back, ds, only
after dg = sum of du*f(z) over each image. So dz = f'(z)*(du*g + s) was a map of its own. With the sums of du*f'(z) and
of f'(z) for each image and channel the BN's reductions need no second sweep, and dz is computed where it is read.

Refuses a gradient du that is written by an operator with no room for the sums, a gate of all images, and a dz that
anything but the input half of its own BN reads: dz must exist then.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.spec import OpSpec, image_step
from bnfuse.passes.dialect.source_ops import constant_of, gradient_of, read, sizes
from bnfuse.passes.dialect.steps import ACCUMULATIONS, try_spec
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by, own_op, sort


@dataclasses.dataclass(frozen=True)
class Gated:
    """A gate's gradient as the graph has it: the mean that is dg, the sweep that is dz, and what reads dz."""

    mean: Op
    total: ir.Node  # Mul(mean, H*W)
    sweep: Op
    activation: str | None
    writer: Op
    spec: OpSpec  # of the writer with the sums
    readers: tuple[tuple[Op, OpSpec], ...]


class GateSumsFusion(ir.passes.InPlacePass):
    """Move the sums of a gate's gradient to what writes that of the gated map, all else to what reads the result."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in list(model.graph):
            mean = read(node) if node.graph is not None else None
            if mean is None or not is_gate_gradient(mean):
                continue
            found = match(mean)
            if isinstance(found, Gated):
                fuse(editor, found)
            elif found is not None:
                editor.refuse(node, found)
        sort(model.graph)
        return editor.result()


def is_gate_gradient(op: Op) -> bool:
    """Tell whether an operator is the mean of a normalised map and a gradient over each image."""
    if not isinstance(op.spec, OpSpec) or op.spec.core != "GlobalAveragePool" or op.spec.epilogue:
        return False
    return op.spec.prologue[:1] == ("Normalize",) and op.spec.prologue[-1] == "Gate" and is_product(op)


def is_product(op: Op) -> bool:
    """Tell whether the gate of an operator is a map of the size of its x."""
    return sizes(op.operands["gate"]) == sizes(op.operands["x"])


def match(mean: Op) -> Gated | str | None:
    """Find all that has to do with a gate; a reason where something is in the way, None where it is no gate of a BN."""
    x, du = mean.operands["x"], mean.operands["gate"]
    total = total_of(mean)
    sweep = next((op for use in du.uses() if (op := read(use.node)) is not None and is_sweep(op, mean)), None)
    if total is None or sweep is None:
        return None
    activation = next((step for step in mean.steps.prologue if step in ACTIVATIONS), None)
    gate = sweep.operands["other_gate"]
    if sizes(gate) != (*sizes(x)[:2], 1, 1):
        return "the gate is one for all images"
    writer = gradient_of(du)
    if writer is None:
        return f"{du.name} is written by no gradient operator"
    spec = summed(writer, mean, activation)
    if spec is None:
        return f"{writer.node.op_type} '{writer.node.name}' has no room for sums over images"
    readers = readers_of(sweep, activation)
    if readers is None:
        return f"{sweep.results['dx'].name} has other readers than the input half of its BatchNorm"
    return Gated(mean, total, sweep, activation, writer, spec, readers)


def total_of(mean: Op) -> ir.Node | None:
    """Find the product of a mean and the number of pixels that is the one reader of it."""
    y, (height, width) = mean.results["y"], sizes(mean.operands["x"])[2:]
    node = next((use.node for use in y.uses()), None)
    if node is None or node.op_type != "Mul" or node.domain or not is_only_read_by(y, node):
        return None
    count = constant_of(node.inputs[1])
    return node if count is not None and count.size == 1 and float(count.item()) == height * width else None


def is_sweep(op: Op, mean: Op) -> bool:
    """Tell whether an operator puts together the gradient at what a gate's pooling and the gate read."""
    if not isinstance(op.spec, OpSpec) or op.spec.core != "GlobalAveragePoolGrad":
        return False
    kinds = [step for step in mean.steps.prologue if step in ACTIVATIONS]
    mask = tuple(f"{kind}Grad" for kind in kinds)
    same = ["x", *(("a", "b") if kinds else ())]
    return (
        op.spec.prologue == (("Normalize",) if kinds else ())
        and op.spec.epilogue == ("AddGatedGradient", *mask, "Reduce")
        and op.operands["other"] is mean.operands["gate"]
        and all(op.operands[name] is mean.operands[name] for name in same)
        and all(op.attributes.get(key) == value for key, value in mean.attributes.items())
    )


def summed(writer: Op, mean: Op, activation: str | None) -> OpSpec | None:
    """Compose the operator that writes du with the sums; None where it has no room, or other bounds."""
    steps = writer.steps
    if {*ACCUMULATIONS} & {*steps.epilogue} or image_step(steps.epilogue):
        return None
    if any(writer.attributes.get(key, value) != value for key, value in mean.attributes.items()):
        return None
    return try_spec(steps.prologue, steps.core, (*steps.epilogue, f"ImageGate{activation or ''}"))


def readers_of(sweep: Op, activation: str | None) -> tuple[tuple[Op, OpSpec], ...] | None:
    """List what reads dz, with the operator that computes it on the way in; None where one cannot."""
    dz, found = sweep.results["dx"], []
    if dz.is_graph_output():
        return None
    for use in dz.uses():
        op = read(use.node)
        if op is None or not isinstance(op.spec, OpSpec) or op.spec.prologue[:1] != ("BatchNormGrad",):
            return None
        if [name for name, value in op.operands.items() if value is dz] != ["dy"]:
            return None
        if op.operands["grad_x"] is not sweep.operands["x"]:
            return None
        if any(op.attributes.get(key, value) != value for key, value in sweep.attributes.items()):
            return None
        mask = (f"{activation}Grad",) if activation else ()
        spec = try_spec(("GateGrad", "AddGrad", *mask, *op.spec.prologue), op.spec.core, op.spec.epilogue)
        if spec is None:
            return None
        found.append((op, spec))
    return tuple(found)


def fuse(editor: Editor, gated: Gated) -> None:
    """Rewrite a match."""
    mean, sweep = gated.mean, gated.sweep
    x, gate = sweep.operands["x"], sweep.operands["other_gate"]
    of = [mean.node, gated.total, sweep.node]
    operands = {f"gated_{name}": sweep.operands[name] for name in ("mean", "inv_std")}
    operands |= {"gated_x": x, **{f"gated_{name}": mean.operands[name] for name in "ab"}}
    known = {key: mean.attributes[key] for key in mean.attributes}
    made = editor.replace(gated.writer, gated.spec, of, operands=operands, attributes=known).results
    total = small(editor, "Reshape", [made["image_gate"], shape(editor, gated, (0, -1, 1, 1))], gated.total, of)
    editor.take_over(gated.total.outputs[0], total)
    height, width = sizes(x)[2:]
    share = editor.constant(f"{sweep.node.name}/share", np.array(1 / (height * width), np.float32))
    pooled = small(editor, "Mul", [sweep.operands["dy"], share], sweep.node, of, sizes(gate))
    flat = [
        small(editor, "Reshape", [value, shape(editor, gated, (0, -1))], sweep.node, of, sizes(gate)[:2])
        for value in (gate, pooled)
    ]
    for result, ours in (("dbeta", ("image_beta", "image_slope")), ("dgamma", ("image_gamma", "image_tilt"))):
        terms = [
            small(editor, "Mul", [made[name], factor], sweep.node, of, sizes(gate)[:2])
            for name, factor in zip(ours, flat, strict=True)
        ]
        both = small(editor, "Add", terms, sweep.node, of, sizes(gate)[:2])
        axes = editor.constant(f"{sweep.node.name}/images", np.array([0], np.int64))
        (found,) = editor.standard("ReduceSum", [both, axes], 1, before=sweep.node, of=of, keepdims=0)
        editor.take_over(sweep.results[result], found)
    changes = {"dy": made["dx"], "grad_gate": gate, "grad_other": pooled}
    if gated.activation:
        changes |= {f"grad_{name}": mean.operands[name] for name in "ab"}
    for op, spec in gated.readers:
        now = own_op(op.node)  # it may read du beside dz, as the writer has it now
        assert now is not None
        editor.replace(now, spec, [sweep.node], operands=changes, attributes=known)
    editor.remove_dead([gated.total, mean.node, sweep.node])


def small(
    editor: Editor,
    op_type: str,
    inputs: list[ir.Value],
    before: ir.Node,
    of: list[ir.Node],
    shape: tuple[int, ...] | None = None,
) -> ir.Value:
    """Insert a standard node that computes with what there is one of for each image and channel."""
    (value,) = editor.standard(op_type, inputs, 1, before=before, of=of)
    value.type = ir.TensorType(ir.DataType.FLOAT)
    if shape is not None:
        value.shape = ir.Shape(shape)
    return value


def shape(editor: Editor, gated: Gated, target: tuple[int, ...]) -> ir.Value:
    """Register what a Reshape makes; the number of images is that of its operand."""
    return editor.constant(f"{gated.sweep.node.name}/shape", np.array(target, np.int64))
