"""BNFF backward: where gradients of several readers meet, the last one to be written adds the others.

    g1 = ConvGrad(...)              g1 = ConvGrad(...)
    g2 = ConvGrad(...)        ->    g  = ConvGradAddGradient(..., g1)
    g  = Sum(g1, g2)

A Sum of more gradients becomes a chain. Where the last gradient is that of a sampled BN, its scaled dz is added to the
others (Accumulate), and the sample's terms to the sum. The mask and the reductions that follow can then go into the
last one.

Refuses a Sum whose last gradient is read elsewhere or is written by something with no epilogue (a Split, a Reshape).
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.analysis.provenance import is_channel_split
from bnfuse.opset.spec import OpSpec
from bnfuse.passes.dialect.sampled_chain import accumulated, scaled_base
from bnfuse.passes.dialect.source_ops import gradient_of, is_map
from bnfuse.passes.dialect.steps import has_room_after
from bnfuse.passes.rewriter import Editor, FusionResult, is_only_read_by, sort


class GradientSumFusion(ir.passes.InPlacePass):
    """Move Sums of gradients into the operators that write their last terms.

    `concats=False` leaves the Sums that gather the gradients of a Concat's channels to the ICF passes.
    """

    def __init__(self, *, concats: bool = True) -> None:
        super().__init__()
        self.concats = concats

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        order = {node: index for index, node in enumerate(model.graph)}
        for node in [node for node in model.graph if node.op_type == "Sum" and is_map(node.outputs[0])]:
            if self.concats or not gathers_concat(node):
                absorb_sum(editor, node, order)
        sort(model.graph)
        return editor.result()


def gathers_concat(node: ir.Node) -> bool:
    """Tell whether a Sum belongs to a Concat: a term is a Split's piece, or its result is split."""
    return any(
        is_channel_split(other)
        for other in [*(v.producer() for v in node.inputs if v is not None), *(u.node for u in node.outputs[0].uses())]
    )


def absorb_sum(editor: Editor, node: ir.Node, order: dict[ir.Node, int]) -> None:
    """Move a Sum into the epilogue of what writes its last term; what is left of several terms follows in a chain."""
    terms = [value for value in node.inputs if value is not None]
    total = node.outputs[0]
    while len(terms) > 1:
        last = max(terms, key=lambda value: _position(value, order))
        producer = gradient_of(last)
        base = scaled_base(last) if is_only_read_by(last, node) else None
        if base is not None and len(terms) == 2:
            other = terms[terms[0] is last]
            spec, operands, attributes = accumulated(base, other)
            fused = editor.replace(base, spec, [node], operands=operands, attributes=attributes)
            editor.take_over(total, fused.results["dx"] if base.results["dx"] is last else last)
            editor.remove_dead([node])
            order[fused.node] = order[base.node]
            return
        if producer is None or not is_only_read_by(last, node) or not has_room_after(producer.steps, "AddGradient"):
            editor.refuse(
                node, f"{last.name}, its last term, has other readers or is written by something with no epilogue"
            )
            return
        terms.remove(last)
        if len(terms) == 1:
            other = terms[0]
        else:
            (other,) = editor.standard("Sum", terms, 1, before=producer.node, of=[node])
            other.shape, other.type = total.shape, total.type
        spec = OpSpec(producer.steps.prologue, producer.steps.core, _with_sum(producer.steps.epilogue))
        fused = editor.replace(producer, spec, [node], operands={"other": other}, results={"dx": total})
        order[fused.node] = order[producer.node]
        if len(terms) == 1:
            return
        node, total = other.producer(), other  # type: ignore[assignment]
        order[node] = order[producer.node]


def _with_sum(epilogue: tuple[str, ...]) -> tuple[str, ...]:
    return (*(s for s in epilogue if s == "BiasGrad"), "AddGradient", *(s for s in epilogue if s != "BiasGrad"))


def _position(value: ir.Value, order: dict[ir.Node, int]) -> int:
    producer = value.producer()
    return order[producer] if producer is not None else -1
