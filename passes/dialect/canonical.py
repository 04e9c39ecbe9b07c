"""Canonical form: one spelling for what onnxruntime's gradient builder spells in several nodes.

    Identity(x) -> y                                          y's readers read x
    ConcatTraining, SplitTraining of a single map              the map itself
    Mul(dy, Cast(And(x >= min, x <= max)))            ->      ClipGrad      (PointwiseGradClipGrad)
    Expand(Scale(dy, H*W), Shape(x))                  ->      GlobalAveragePoolGrad
    MaxPoolGrad, AveragePoolGrad                              the same in our domain: these two are in no standard opset

Refuses nothing: what does not match these shapes is not theirs.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.opset.spec import OpSpec
from bnfuse.passes.dialect.source_ops import clip_bounds, constant_of, is_map, read, sizes
from bnfuse.passes.rewriter import Editor, FusionResult, is_only_read_by


class Canonicalize(ir.passes.InPlacePass):
    """Bring chains of nodes that onnxruntime's gradient builder writes into one operator each."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "canonical")
        for node in list(model.graph):
            if node.graph is None:
                continue
            if node.op_type == "Identity":
                bypass(editor, node, node.inputs[0])
            elif node.op_type == "ConcatTraining" and len(node.inputs) == 1:
                bypass_single_concat(editor, node)
            elif node.op_type == "Mul":
                clip_gradient(editor, node)
            elif node.op_type in ("MaxPoolGrad", "AveragePoolGrad") and node.domain == "":
                pool_gradient(editor, node)
            elif node.op_type == "Expand":
                global_average_pool_gradient(editor, node)
        return editor.result()


def bypass(editor: Editor, node: ir.Node, source: ir.Value | None) -> None:
    """Let readers of the node's result read its source; where the result is a graph output, the node stays for it."""
    y = node.outputs[0]
    if source is None or not is_map(source) or (y.is_graph_output() and not y.uses()):
        return
    for reader, index in list(y.uses()):
        reader.replace_input_with(index, source)
    editor.fused.append(node.name or node.op_type)
    editor.remove_dead([node])


def bypass_single_concat(editor: Editor, node: ir.Node) -> None:
    """Take out a ConcatTraining of a single map, together with the SplitTraining of its gradient."""
    for split, _ in list(node.outputs[1].uses()) if len(node.outputs) > 1 else []:
        if split.op_type == "SplitTraining" and len(split.outputs) == 1:
            bypass(editor, split, split.inputs[0])
    bypass(editor, node, node.inputs[0])


def clip_gradient(editor: Editor, mul: ir.Node) -> None:
    """Put a PointwiseGradClipGrad in the place of Mul(dy, Cast(mask of x)), where the nodes are these."""
    match = match_clip_gradient(mul)
    if match is None:
        return
    dy, x, attributes, nodes = match
    operands = {"dy": dy, "x": x}
    spec = OpSpec((), "PointwiseGrad", ("ClipGrad",))
    editor.emit(spec, operands, attributes, {"dx": mul.outputs[0]}, before=mul, of=nodes, name=mul.name)
    editor.graph.remove(mul, safe=True)
    editor.remove_dead(nodes[1:])


def match_clip_gradient(mul: ir.Node) -> tuple[ir.Value, ir.Value, dict[str, float], list[ir.Node]] | None:
    """Match Mul(dy, Cast(mask of x)) with one or two bounds: dy, x, bounds and the nodes, or None."""
    dy, mask = mul.inputs[:2]
    cast = mask.producer() if mask is not None else None
    if dy is None or not is_map(dy) or cast is None or cast.op_type != "Cast" or not is_only_read_by(mask, mul):  # type: ignore[arg-type]
        return None
    inner = cast.inputs[0].producer() if cast.inputs[0] is not None else None
    if inner is None:
        return None
    tests = [v.producer() for v in inner.inputs if v is not None] if inner.op_type == "And" else [inner]
    bounds: dict[str, ir.Value | None] = {"GreaterOrEqual": None, "LessOrEqual": None}
    x: ir.Value | None = None
    for test in tests:
        if test is None or test.op_type not in bounds or (x is not None and test.inputs[0] is not x):
            return None
        x, bounds[test.op_type] = test.inputs[0], test.inputs[1]
    attributes = clip_bounds(bounds["GreaterOrEqual"], bounds["LessOrEqual"])
    if x is None or not is_map(x) or attributes is None:
        return None
    nodes = [mul, cast, *([inner] if inner.op_type == "And" else []), *(test for test in tests if test is not None)]
    return dy, x, attributes, nodes


def pool_gradient(editor: Editor, node: ir.Node) -> None:
    """Put the operator of our domain in the place of a pooling's gradient that can be read as one."""
    if (op := read(node)) is not None:
        editor.replace(op, op.steps)


def global_average_pool_gradient(editor: Editor, expand: ir.Node) -> None:
    """Put a GlobalAveragePoolGrad in the place of Expand(Scale(dy, H*W), Shape(x))."""
    scaled, shape = expand.inputs[:2]
    scale = scaled.producer() if scaled is not None else None
    shape_node = shape.producer() if shape is not None else None
    if scale is None or scale.op_type != "Scale" or shape_node is None or shape_node.op_type != "Shape":
        return
    x, dy = shape_node.inputs[0], scale.inputs[0]
    factor = constant_of(scale.inputs[1])
    if not (is_map(x) and is_map(dy)) or factor is None or scaled is None or not is_only_read_by(scaled, expand):
        return
    down = scale.attributes["scale_down"].as_int() if "scale_down" in scale.attributes else 0
    if not down or sizes(dy)[2:] != (1, 1) or factor.size != 1 or not np.isclose(factor.item(), np.prod(sizes(x)[2:])):
        return
    nodes = [expand, scale, shape_node]
    spec = OpSpec((), "GlobalAveragePoolGrad")
    editor.emit(spec, {"dy": dy, "x": x}, {}, {"dx": expand.outputs[0]}, before=expand, of=nodes, name=expand.name)
    editor.graph.remove(expand, safe=True)
    editor.remove_dead(nodes[1:])
