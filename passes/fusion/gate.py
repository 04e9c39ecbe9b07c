"""BNFF around gates: squeeze-excitation (u = g*y, g a small network of y's mean) and drop paths, forward and backward.

    t  = Mul(du, y)                                   m  = GateGlobalAveragePool(y, du)
    dg = ReduceSum(t, H W)                      ->    dg = Mul(m, H*W)

    dy1 = Mul(du, g)
    dy  = GlobalAveragePoolGradAddGradient(      ->   dy = GlobalAveragePoolGradAddGatedGradient(ds, y, du, g)
              ds, y, dy1)

    dz = Mul(d, s)                                    d, db, dg = ...ReduceGated(..., x, mean, inv_std, s)
    db, dg = BatchNormGradReduce(dz, x, ...)    ->
    dt, dw = BatchNormGradConvGrad(dz, ...)           dt, dw = GateGradBatchNormGradConvGrad(d, ..., s)

What a gate multiplies is not stored: the product goes into what reads it (u into the convolution behind it, by
`PointwiseFusion`), and y, the normalised map, is left for the pooling and the gate's gradient to compute on their way
in. A factor for each sample, [N, 1, 1, 1], becomes one for each sample and channel first, and is divided there by what
the map would be divided by; a number (BiFPN's weights, a constant) becomes one for each channel. Their gradients are
the sums of those of the channels.

Refuses a product that has other readers than these, or one without room: it must exist then.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.opset.spec import SHARED, OpSpec
from bnfuse.passes.dialect.source_ops import constant_of, forward_of, gradient_of, is_gate_of, is_map, read, sizes
from bnfuse.passes.dialect.steps import has_room_after, try_spec
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by, sort

GATE = OpSpec(("Gate",), "Pointwise")
MEAN_GRAD = OpSpec((), "GlobalAveragePoolGrad")
AREA = (2, 3)  # the axes of height and width


class GateFusion(ir.passes.InPlacePass):
    """Move products of a map and a gate, and the gradient of the gate, into the operators around them."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in list(model.graph):
            if node.graph is not None and node.op_type == "Mul" and not node.domain:
                merge_division(editor, node)
        for node in list(model.graph):
            if node.graph is not None and node.op_type == "Mul" and not node.domain:
                narrow(editor, node)
                widen(editor, node)
        for node in list(model.graph):
            if node.graph is None:
                continue
            if node.op_type == "ReduceSum" and not node.domain:
                fuse_gate_gradient(editor, node)
            elif (op := read(node)) is not None:
                if "AddGradient" in op.node.op_type:
                    fuse_added(editor, op)
                elif op.spec == MEAN_GRAD:
                    repeat(editor, op)
                elif op.spec.name == "BatchNormGradReduce":
                    fuse_reduce(editor, op)
                elif op.spec == GATE:
                    fuse_gradient(editor, op)
        sort(model.graph)
        return editor.result()


def gate_of(value: ir.Value | None) -> Op | None:
    """Read the product of a map and a gate that a value is, or None."""
    op = read(value.producer()) if value is not None else None
    return op if op is not None and op.spec == GATE else None


# Factors of a sample


def merge_division(editor: Editor, node: ir.Node) -> None:
    """Divide the factors of the samples, not the map: Mul(map, s)/k and Mul(map/k, s) are Mul(map, s/k)."""
    factored = map_and_factor(node)
    if factored is None:
        return
    x, factor = factored
    before, y = x.producer(), node.outputs[0]
    after = next(iter(y.uses())).node if len(list(y.uses())) == 1 and not y.is_graph_output() else None
    if before is not None and is_division(before) and is_only_read_by(x, node):
        division, source, result = before, before.inputs[0], y
    elif after is not None and is_division(after) and after.inputs[0] is y:
        division, source, result = after, x, after.outputs[0]
    else:
        return
    both = [node, division]
    last = after if division is after else node
    small = divided(factor, division.inputs[1])
    if small is None:
        (small,) = editor.standard("Div", [factor, division.inputs[1]], 1, before=last, of=both)
        small.shape, small.type = factor.shape, factor.type
    (made,) = editor.standard("Mul", [source, small], 1, before=last, of=both)
    editor.take_over(result, made)
    editor.remove_dead([last, node, division])
    editor.fused.append(node.name or "Mul")


def divided(factor: ir.Value, divisor: ir.Value | None) -> ir.Value | None:
    """Find the quotient of the two in the graph."""
    for use in factor.uses():
        if use.node.op_type == "Div" and list(use.node.inputs) == [factor, divisor]:
            return use.node.outputs[0]
    return None


def map_and_factor(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Give the operands of Mul(map, [N, 1, 1, 1]), the map first; None for any other product."""
    for x, factor in (node.inputs[:2], node.inputs[1::-1]):
        if is_map(x) and is_map(factor) and sizes(factor) == (sizes(x)[0], 1, 1, 1) and sizes(x)[2] * sizes(x)[3] > 1:
            return x, factor
    return None


def is_division(node: ir.Node) -> bool:
    """Tell whether a node divides by one constant."""
    divisor = constant_of(node.inputs[1]) if node.op_type == "Div" and not node.domain else None
    return divisor is not None and divisor.size == 1


def narrow(editor: Editor, node: ir.Node) -> None:
    """Multiply by a gate as it is, not by what a graph expands it to."""
    for place, (x, wide) in enumerate((node.inputs[1::-1], node.inputs[:2])):
        expand = wide.producer() if wide is not None else None
        if expand is None or expand.op_type != "Expand" or expand.domain or not (is_map(x) and is_map(wide)):
            continue
        gate = expand.inputs[0]
        if is_map(gate) and sizes(x) == sizes(wide) and is_gate_of(sizes(gate), sizes(x)):
            node.replace_input_with(place, gate)
            editor.remove_dead([expand])
            editor.fused.append(node.name or "Mul")
            return


def map_and_number(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Give the operands of a product of a map of several pixels and a number, the map first; None for another."""
    for x, factor in (node.inputs[:2], node.inputs[1::-1]):
        if factor is None or factor.shape is None or factor.dtype != ir.DataType.FLOAT or not is_map(x):
            continue
        if all(size == 1 for size in factor.shape) and len(factor.shape) <= 4 and sizes(x)[2] * sizes(x)[3] > 1:
            return x, factor
    return None


def widen(editor: Editor, node: ir.Node) -> None:
    """Give each channel the factor of its sample, or of all, where the map is one of a BN, or the gradient of one."""
    factored, shared = map_and_factor(node), map_and_number(node)
    if shared is not None and (factored is None or sizes(factored[0])[0] == 1):
        x, factor = shared
        shape: tuple[int, ...] = (1, sizes(x)[1], 1, 1)
    elif factored is not None:
        x, factor = factored
        shape = (*sizes(x)[:2], 1, 1)
    else:
        return
    if sizes(x)[1] == 1 or not (is_normalised(x) or gradient_of(x) is not None):
        return
    number = constant_of(factor)
    wide = next((use.node.outputs[0] for use in factor.uses() if is_widened(use.node, shape)), None)
    if number is not None:
        wide = editor.constant(f"{factor.name}/channels", np.broadcast_to(number.reshape(-1, 1, 1, 1), shape).copy())
    elif wide is None:
        target = editor.constant(f"{factor.name}/channels", np.array(shape, np.int64))
        first = min((use.node for use in factor.uses()), key=[*editor.graph].index)
        (wide,) = editor.standard("Expand", [factor, target], 1, before=first, of=[node])
        wide.shape, wide.type = ir.Shape(shape), factor.type
    node.replace_input_with(0 if node.inputs[0] is factor else 1, wide)
    editor.fused.append(node.name or "Mul")


def is_normalised(x: ir.Value) -> bool:
    """Tell whether a map is what a normalise half makes."""
    op = forward_of(x)
    return op is not None and op.steps.core == "Pointwise" and "Normalize" in op.steps.prologue


def is_widened(node: ir.Node, shape: tuple[int, ...]) -> bool:
    """Tell whether a node expands a factor to this shape already."""
    return node.op_type == "Expand" and is_map(node.outputs[0]) and sizes(node.outputs[0]) == shape


# The gate's gradient


def fuse_gate_gradient(editor: Editor, node: ir.Node) -> None:
    """Sum a product of two maps over each image without storing it."""
    product, y = node.inputs[0], node.outputs[0]
    mul = product.producer() if product is not None else None
    over = summed_axes(node)
    if product is None or mul is None or mul.op_type != "Mul" or mul.domain or over is None:
        return
    first, second = mul.inputs[:2]
    if not (is_map(first) and is_map(second) and sizes(first) == sizes(second)):
        return
    if not is_only_read_by(product, node):
        editor.refuse(mul, f"{product.name} has other readers than the sum over each image")
        return
    x, gate = (second, first) if is_normalised(second) or gradient_of(first) is not None else (first, second)
    spec = OpSpec(("Gate",), "GlobalAveragePool")
    mean = editor.emit(spec, {"x": x, "gate": gate}, {}, {}, before=node, of=[mul, node])["y"]
    height, width = sizes(x)[2:]
    count = editor.constant(f"{node.name}/pixels", np.array(height * width, np.float32))
    (total,) = editor.standard("Mul", [mean, count], 1, before=node, of=[mul, node])
    if over != AREA:
        total.shape, total.type = mean.shape, mean.type
        kept = node.attributes.get_int("keepdims", 1)
        of = [mul, node]
        (total,) = editor.standard("ReduceSum", [total, node.inputs[1]], 1, before=node, of=of, keepdims=kept)
    editor.take_over(y, total)
    editor.remove_dead([node, mul])


def summed_axes(node: ir.Node) -> tuple[int, ...] | None:
    """Give the axes over which a ReduceSum sums a map: those of [N, C, 1, 1], or the channels' as well; None for
    others."""
    axes = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    over = tuple(sorted(int(axis) % 4 for axis in axes.flat)) if axes is not None else ()
    if over == AREA:
        return over if node.attributes.get_int("keepdims", 1) == 1 else None
    return over if {1, *AREA} <= {*over} else None


# Gradients behind a gate


def repeat(editor: Editor, mean: Op) -> None:
    """Give each sum of gradients a pooling's gradient of its own, where several add one: those of branches."""
    dx = mean.results["dx"]
    readers = list(dict.fromkeys(use.node for use in dx.uses()))
    if dx.is_graph_output() or any(reader.op_type != "Sum" or reader.domain for reader in readers):
        return
    for reader in readers[1:]:
        own = editor.emit(MEAN_GRAD, mean.operands, {}, {}, before=reader, of=[mean.node])["dx"]
        for place, value in enumerate(reader.inputs):
            if value is dx:
                reader.replace_input_with(place, own)


def fuse_added(editor: Editor, op: Op) -> None:
    """Multiply the gradient of another reader by its gate where it is added."""
    gate = gate_of(op.operands.get("other"))
    if gate is None or "AddGradient" not in op.steps.epilogue:
        return
    if not is_only_read_by(gate.results["y"], op.node):
        editor.refuse(gate.node, f"{gate.results['y'].name} has other readers")
        return
    epilogue = tuple("AddGatedGradient" if step == "AddGradient" else step for step in op.steps.epilogue)
    operands = {"other": gate.operands["x"], "other_gate": gate.operands["gate"]}
    editor.replace(op, OpSpec(op.steps.prologue, op.steps.core, epilogue), [gate.node], operands=operands)


def fuse_reduce(editor: Editor, reduce: Op) -> None:
    """Move the reductions over a gated gradient into what writes the gradient itself."""
    gate = gate_of(reduce.operands["dz"])
    producer = gradient_of(gate.operands["x"]) if gate is not None else None
    if gate is None or producer is None or not has_room_after(producer.steps, "ReduceGated"):
        return
    spec = try_spec(producer.steps.prologue, producer.steps.core, (*producer.steps.epilogue, "ReduceGated"))
    if spec is None:
        return
    number = sum(step in SHARED for step in spec.epilogue)
    operands = {f"{name}_{number}": reduce.operands[name] for name in ("x", "mean", "inv_std")}
    operands[f"gate_{number}"] = gate.operands["gate"]
    results = {f"{name}_{number}": reduce.results[name] for name in ("dbeta", "dgamma")}
    editor.replace(producer, spec, [reduce.node], operands=operands, results=results)


def fuse_gradient(editor: Editor, gate: Op) -> None:
    """Multiply a gradient by its gate in all that reads the product, where nothing needs the product itself."""
    product = gate.results["y"]
    readers = [read(use.node) for use in product.uses()]
    if product.is_graph_output() or gradient_of(gate.operands["x"]) is None or not readers:
        return
    fused = []
    for op in readers:
        spec = with_gate(op, product) if op is not None else None
        if op is None or spec is None:
            return
        fused.append((op, spec))
    operands = {"dy": gate.operands["x"], "grad_gate": gate.operands["gate"]}
    for op, spec in fused:
        editor.replace(op, spec, [gate.node], operands=operands)
    editor.remove_dead([gate.node])


def with_gate(op: Op, product: ir.Value) -> OpSpec | None:
    """Compose an operator with the gate in front of its other steps; None where it reads the product otherwise."""
    if not isinstance(op.spec, OpSpec) or not op.spec.is_gradient or "Slice" in op.spec.prologue:
        return None
    if [name for name, value in op.operands.items() if value is product] != ["dy"]:
        return None
    return try_spec(("GateGrad", *op.spec.prologue), op.spec.core, op.spec.epilogue)
