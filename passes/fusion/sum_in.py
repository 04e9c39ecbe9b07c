"""BNFF: a residual sum that few read goes into what reads it.

    y = NormalizeAddNormalizedPointwise(x, a, b, skip, ..)        u = NormalizeAddNormalizedConv(x, w, a, b, skip, ..)
    u = Conv(y, w)                                          ->    dy, dw =
    dy, dw = ConvGrad(du, y, w)                                     NormalizeAddNormalizedConvGrad(du, x, w, a, b, ..)

To store a sum of two maps reads both, writes it, and reads it for each reader; to add where it is read reads both for
each. With two readers that is one map less (ConvMixer's 1x1 convolutions, linear bottlenecks in front of a stride).
It runs when all other passes have found nothing more to do.

Refuses a sum that is a graph output or that more than two read, and readers other than 1x1 convolutions and their
gradients: windows would read the two maps several times. Sums of activated terms, which each reader would compute anew,
and those whose statistics are taken are not its business.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.spec import CONV_GRADS, CONVS, OpSpec
from bnfuse.passes.dialect.source_ops import read
from bnfuse.passes.fusion.pointwise import SUMS, absorb, has_room_for
from bnfuse.passes.rewriter import Editor, FusionResult, Op

READERS = 2  # two maps read by each move less than two read, one written and one read by each


class SumIn(ir.passes.InPlacePass):
    """Move sums of two maps into the 1x1 convolutions that read them."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in list(model.graph):
            total = read(node) if node.graph is not None else None
            if total is not None and is_plain_sum(total) and (reason := move(editor, total)):
                editor.refuse(node, reason)
        return editor.result()


def is_plain_sum(op: Op) -> bool:
    """Tell whether an operator stores a sum of two maps, normalised at most, and does nothing with it."""
    spec = op.spec
    if not isinstance(spec, OpSpec) or spec.core != "Pointwise" or spec.epilogue:
        return False
    return spec.prologue[-1] in SUMS and {*spec.prologue} <= {"Normalize", *SUMS}


def move(editor: Editor, total: Op) -> str | None:
    """Move a sum into all that reads it, or give the reason why it stays."""
    y = total.results["y"]
    readers = list(dict.fromkeys(use.node for use in y.uses()))
    if y.is_graph_output():
        return f"{y.name} is a graph output"
    if len(readers) > READERS:
        return f"more than two operators read {y.name}"
    if not all(is_pointwise_conv(read(node)) and has_room_for(total, node) for node in readers):
        return f"{y.name} is read by what is no 1x1 convolution, or has no room for a sum"
    for node in readers:
        reader = read(node)  # as what came before has left it
        assert reader is not None
        absorb(editor, total, reader)
    editor.remove_dead([total.node])
    return None


def is_pointwise_conv(op: Op | None) -> bool:
    """Tell whether an operator is a 1x1 convolution, or a gradient of one."""
    if op is None or not isinstance(op.spec, OpSpec) or op.spec.core not in (*CONVS, *CONV_GRADS):
        return False
    return {*op.attributes["kernel_shape"]} == {1} and not {"StoreInput"} & {*op.spec.epilogue}
