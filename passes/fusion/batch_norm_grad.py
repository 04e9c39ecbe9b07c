"""BNFF backward: the input half of a BN's gradient moves into what reads it ([Jung19], section 3.2, sub-BN1').

    dx = BatchNormGradPointwiseGrad(dz, u, p, q, w)
    dt, dw = ConvGrad(dx, t, weight)            ->   dt, dw = BatchNormGradConvGrad(dz, t, weight, u, p, q, w)

p*dz + q*u + w is computed while dz and u are read; dx is never stored. A Slice of a gradient, or a gate in front of the
half, moves the same way. An operator that adds dx to its own result adds p*dz + q*u + w instead:

    g = ConvGradAddGradient(..., dx)            ->   g = ConvGradAddBatchNormGrad(..., dz, u, p, q, w)

The gradient of an activation in front of the BN (u = relu(v), as in ConvMixer) goes with it:

    dv = BatchNormGradPointwiseGradReluGrad(dz, u, u, p, q, w)
    dt, dw = ConvGrad(dv, t, weight)            ->   dt, dw = BatchNormGradReluGradConvGrad(dz, t, weight, u, p, q, w)

Refuses a dx that is a graph output or has a reader with no room for it (a second BN's gradient, a Sum, ...): then dx
must exist, and reading it once is cheaper than reading dz and u.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.spec import ACTIVATION_GRADS, OpSpec
from bnfuse.passes.dialect.source_ops import forward_of, read
from bnfuse.passes.dialect.steps import try_spec, with_step
from bnfuse.passes.fission.batch_norm_grad import INPUT_HALF
from bnfuse.passes.rewriter import Editor, FusionResult, Op

INPUT_HALVES = (
    ("BatchNormGrad",),
    ("GateGrad", "BatchNormGrad"),
    ("GateGrad",),
    ("Slice", "BatchNormGrad"),
    ("Slice",),
    *(("BatchNormGrad", step) for step in ACTIVATION_GRADS),
)


class BatchNormGradFusion(ir.passes.InPlacePass):
    """Move the input half of a BN's gradient, or a Slice of a gradient, into all that reads it."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in list(model.graph):
            op = read(node) if node.graph is not None else None
            if op is not None and (x := activated_input(op)) is not None:
                op = take_activation(editor, op, x)
            if op is not None and is_input_half(op):
                fuse(editor, op)
        return editor.result()


def is_input_half(op: Op) -> bool:
    """Tell whether an operator only applies q*x + p*dz + w, slices or gates a gradient, or does both."""
    return (
        isinstance(op.spec, OpSpec)
        and op.spec.core == "PointwiseGrad"
        and op.spec.prologue in INPUT_HALVES
        and not op.spec.epilogue
    )


def activated_input(op: Op) -> ir.Value | None:
    """Find the map of which an operator masks the input gradient of a BN over the activated map; None for another.

    Of a Relu that is its result, which has the sign of what it is of.
    """
    if not isinstance(op.spec, OpSpec) or op.spec.prologue != ("BatchNormGrad",) or op.spec.core != "PointwiseGrad":
        return None
    if len(op.spec.epilogue) != 1 or op.spec.epilogue[0] not in ACTIVATION_GRADS:
        return None
    kind = op.spec.epilogue[0].removesuffix("Grad")
    x, read_by_norm = op.operands["x"], op.operands["grad_x"]
    if kind == "Relu" and x is read_by_norm:
        return x
    made = forward_of(read_by_norm)
    activates = made is not None and made.steps.core == "Pointwise" and made.steps.prologue == (kind,)
    if made is None or not activates or made.operands["x"] is not x:
        return None
    return x if all(op.attributes.get(key) == value for key, value in made.attributes.items()) else None


def take_activation(editor: Editor, op: Op, x: ir.Value) -> Op:
    """Put the mask of a BN's masked input gradient into its way in, behind the BN's gradient."""
    spec = OpSpec((*op.steps.prologue, *op.steps.epilogue), op.steps.core)
    return editor.replace(op, spec, operands={"grad_x": x})


def fuse(editor: Editor, half: Op) -> None:
    """Move a half into every reader of its dx, or into none and refuse."""
    dx = half.results["dx"]
    if dx.is_graph_output():
        editor.refuse(half.node, f"{dx.name} is a graph output")
        return
    readers = list(dict.fromkeys(use.node for use in dx.uses()))
    for reader in readers:
        op = read(reader)
        if op is None or with_half(half, op, dx) is None:
            editor.refuse(
                half.node, f"{reader.op_type} '{reader.name}' reads {dx.name} and has no room for {half.spec.name}"
            )
            return
    for reader in readers:  # as those before have left it: one may add what another writes
        op = read(reader)
        assert op is not None
        found = with_half(half, op, dx)
        assert found is not None
        spec, operands = found
        editor.replace(op, spec, [half.node], operands=operands, attributes=half.attributes)
    editor.remove_dead([half.node])


def with_half(half: Op, reader: Op, dx: ir.Value) -> tuple[OpSpec, dict[str, ir.Value]] | None:
    """Compose a reader's operator with the half, on its way in or among what it adds, and give the operands.

    None where it has no room or reads dx otherwise.
    """
    if not isinstance(reader.spec, OpSpec) or not reader.spec.is_gradient:
        return None
    names = [name for name, value in reader.operands.items() if value is dx]
    if names == ["other"] and half.spec == INPUT_HALF:
        return added(half, reader.spec)
    spec = try_spec((*half.steps.prologue, *reader.spec.prologue), reader.spec.core, reader.spec.epilogue)
    agree = all(reader.attributes.get(key, value) == value for key, value in half.attributes.items())
    return (spec, half.operands) if names == ["dy"] and spec is not None and agree else None


def added(half: Op, spec: OpSpec) -> tuple[OpSpec, dict[str, ir.Value]] | None:
    """Compose an operator that adds a half's dx with AddBatchNormGrad in AddGradient's place, and give the operands."""
    without = tuple(step for step in spec.epilogue if step != "AddGradient")
    found = with_step(OpSpec(spec.prologue, spec.core, without), "AddBatchNormGrad")
    return (found, operands_of_sum(half)) if found is not None else None


def operands_of_sum(half: Op) -> dict[str, ir.Value]:
    """Give the operands of AddBatchNormGrad: dy, grad_x, grad_p, ... of a bare half by other names."""
    return {("other_dy" if name == "dy" else f"other_{name[5:]}"): value for name, value in half.operands.items()}
