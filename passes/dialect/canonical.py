"""Canonical form: what passes data on as it is goes, so that the passes see what gives a map and what reads it.

    Identity(x) -> y                       y's readers read x
    Concat, Split of a single map          the map itself
    x + 0, x - 0, x*1, x/1                 x: Python's sum() of maps begins with 0

Refuses nothing: what does not match these shapes is not theirs.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.passes.dialect.source_ops import constant_of, is_map
from bnfuse.passes.rewriter import Editor, FusionResult


class Canonicalize(ir.passes.InPlacePass):
    """Take out nodes whose result is their operand."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "canonical")
        for node in list(model.graph):
            if gives_its_operand(node):
                bypass(editor, node, node.inputs[0])
            elif (x := unchanged(node)) is not None:
                bypass(editor, node, x)
        return editor.result()


def gives_its_operand(node: ir.Node) -> bool:
    """Tell whether a node's only result is its first operand: an Identity, or a Concat or Split of one part."""
    if node.domain or len(node.outputs) != 1:
        return False
    return node.op_type in ("Identity", "Split") or (node.op_type == "Concat" and len(node.inputs) == 1)


NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}


def unchanged(node: ir.Node) -> ir.Value | None:
    """Find the operand that a node gives as it is: the other one is 0 where it is added, 1 where it multiplies."""
    if node.domain or node.op_type not in NEUTRAL:
        return None
    x, y = node.inputs[:2]
    for value, other in ((x, y), (y, x)) if node.op_type in ("Add", "Mul") else ((x, y),):
        constant = constant_of(other)
        if constant is not None and (constant == NEUTRAL[node.op_type]).all() and is_map(value):
            return value if value.shape == node.outputs[0].shape else None
    return None


def bypass(editor: Editor, node: ir.Node, source: ir.Value | None) -> None:
    """Let readers of the node's result read its source; where the result is a graph output, the node stays for it."""
    y = node.outputs[0]
    if source is None or not is_map(source) or (y.is_graph_output() and not y.uses()):
        return
    for reader, index in list(y.uses()):
        reader.replace_input_with(index, source)
    editor.fused.append(node.name or node.op_type)
    editor.remove_dead([node])
