"""BNFF forward: a Relu in front of a BatchNorm goes out of the convolution that writes its map.

    c = ConvBias(x, w, bias)                     r, mean, variance = ConvBiasReluStatistics(x, w, bias)
    r, mean, variance = ReluPointwiseStatistics(c)   ->

As ConvMixer has it. What reads r (the normalise half, on the way into the next operators) stays as it was, and so does
the gradient: a Relu's result has the sign of its input, so nothing needs c. It runs when all other passes have found
nothing more to do: a Relu that its readers apply on their way in needs no sweep anyway.

Refuses a c that is a graph output or that something else reads, and one that no convolution writes.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.spec import CONVS, OpSpec
from bnfuse.passes.dialect.source_ops import forward_of, read
from bnfuse.passes.dialect.steps import try_spec
from bnfuse.passes.rewriter import Editor, FusionResult, Op

STORED = (OpSpec(("Relu",), "Pointwise"), OpSpec(("Relu",), "Pointwise", ("Statistics",)))
MASK = OpSpec((), "PointwiseGrad", ("ReluGrad",))


class ReluOut(ir.passes.InPlacePass):
    """Move Relus whose results are stored into the convolutions that write what they read."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in list(model.graph):
            relu = read(node)
            if relu is not None and relu.spec in STORED and (reason := fuse(editor, relu)):
                editor.refuse(node, reason)
        return editor.result()


def fuse(editor: Editor, relu: Op) -> str | None:
    """Let the writer of a Relu's map store its result, or give the reason why not."""
    c, r = relu.operands["x"], relu.results["y"]
    conv = forward_of(c)
    if conv is None or conv.steps.core not in CONVS:
        return f"{c.name} is written by no convolution"
    masks = [use.node for use in c.uses() if use.node is not relu.node]
    if c.is_graph_output() or not all((op := read(node)) is not None and op.spec == MASK for node in masks):
        return f"{c.name} has other readers"
    spec = try_spec(conv.steps.prologue, conv.steps.core, (*conv.steps.epilogue, "Relu", *relu.steps.epilogue))
    if spec is None:
        return f"'{conv.node.name}' has no room for Relu"
    for mask in masks:
        mask.replace_input_with(1, r)
    editor.replace(conv, spec, [relu.node], results=relu.results)
    return None
