"""BNFF backward: where gradients of several readers meet, one that writes a term adds the others on its way out.

    g1 = ConvGrad(...)              g1 = ConvGrad(...)
    g2 = ConvGrad(...)        ->    g  = ConvGradAddGradient(..., g1)
    g  = Sum(g1, g2)

A Sum of more gradients becomes a chain. A term that is the input gradient of a BN (of an identity branch, say) is not
stored for it, and a term that was masked takes what goes past its activation behind the mask:

    g1 = BatchNormGradPointwiseGrad(dz, u, p, q, w)
    g2 = ConvGrad(...)                                ->    g = ConvGradAddBatchNormGrad(..., dz, u, p, q, w)
    g  = Sum(g1, g2)
    g  = Sum(ConvGradReluGrad(...), g1)               ->    g = ConvGradReluGradAddSkipGradient(..., g1)

The term whose operator takes the others is that of a convolution or pooling with room before its mask, or else behind
it, or else that of a BN; of several the last to be written, or an earlier one that nothing else waits for. The mask and
the reductions that follow can then go into it. Where the last gradient is that of a sampled BN, its scaled dz is added
to the others (Accumulate), and the sample's terms to the sum.

Refuses a Sum of which every term has other readers, is written by something with no epilogue (a Split, a Reshape), or
is itself needed for another term.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.analysis.ancestors import ancestors
from bnfuse.analysis.provenance import is_channel_split
from bnfuse.passes.dialect.sampled_chain import accumulated, scaled_base
from bnfuse.passes.dialect.source_ops import gradient_of, is_map
from bnfuse.passes.dialect.steps import has_room_after, with_step
from bnfuse.passes.fission.batch_norm_grad import INPUT_HALF
from bnfuse.passes.fusion.batch_norm_grad import operands_of_sum
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by, sort

Order = dict[ir.Node, int]


class GradientSumFusion(ir.passes.InPlacePass):
    """Move Sums of gradients into the operators that write their terms.

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


def absorb_sum(editor: Editor, node: ir.Node, order: Order) -> None:
    """Move a Sum into the epilogue of what writes one of its terms; what is left of several follows in a chain."""
    terms = [value for value in node.inputs if value is not None]
    while len(terms) > 1:
        if len(terms) == 2 and accumulate_sampled(editor, node, terms, order):
            return
        found = choose(node, terms, order)
        if found is None:
            reason = "every term has other readers, is written by something with no epilogue, or is needed for another"
            editor.refuse(node, reason)
            return
        producer, step = found
        terms.remove(producer.results["dx"])
        rest = absorb_into(editor, node, producer, step, terms, order)
        if rest is None:
            return
        node, terms = rest, [value for value in rest.inputs if value is not None]


def accumulate_sampled(editor: Editor, node: ir.Node, terms: list[ir.Value], order: Order) -> bool:
    """Add the scaled dz of a sampled BN to the other term, where that of the sampled BN is the last one."""
    last = max(terms, key=lambda value: _position(value, order))
    base = scaled_base(last) if is_only_read_by(last, node) else None
    if base is None:
        return False
    spec, operands, attributes = accumulated(base, terms[terms[0] is last])
    fused = editor.replace(base, spec, [node], operands=operands, attributes=attributes)
    editor.take_over(node.outputs[0], fused.results["dx"] if base.results["dx"] is last else last)
    editor.remove_dead([node])
    order[fused.node] = order[base.node]
    return True


def choose(node: ir.Node, terms: list[ir.Value], order: Order) -> tuple[Op, str] | None:
    """Choose the operator that takes the other terms, and the step that adds them; None where no one can."""
    found: list[tuple[tuple[int, int], Op, str]] = []
    for value in terms:
        producer = gradient_of(value)
        step = step_for_sum(producer) if producer is not None and is_only_read_by(value, node) else None
        if producer is not None and step is not None:
            sweeps = producer.steps.core == "PointwiseGrad"
            rank = 0 if sweeps and step == "AddGradient" else 1 if sweeps or step == "AddSkipGradient" else 2
            found.append(((rank, _position(value, order)), producer, step))
    latest = max(_position(value, order) for value in terms)
    for (_, position), producer, step in sorted(found, key=lambda entry: entry[0], reverse=True):
        others = [value for value in terms if value is not producer.results["dx"]]
        if position == latest or producer.node not in ancestors(others):
            return producer, step
    return None


def step_for_sum(producer: Op) -> str | None:
    """Name the step by which an operator can add another gradient to all of its dx: before its mask, or behind it."""
    masked = has_room_after(producer.steps, "AddSkipGradient") and with_step(producer.steps, "AddSkipGradient")
    if has_room_after(producer.steps, "AddGradient"):
        return "AddGradient"
    return "AddSkipGradient" if masked else None


def absorb_into(
    editor: Editor, node: ir.Node, producer: Op, step: str, terms: list[ir.Value], order: Order
) -> ir.Node | None:
    """Let an operator add the other terms of a Sum. Gives the Sum of what is left, or None where nothing is."""
    spec, more = producer.steps, [node]
    operands: dict[str, ir.Value] = {}
    half = next((op for op in map(gradient_of, terms) if op and is_own_half(op, node)), None)
    with_half = with_step(spec, "AddBatchNormGrad") if step == "AddGradient" and half is not None else None
    if with_half is not None and half is not None:
        spec = with_half
        operands |= operands_of_sum(half)
        terms = [value for value in terms if value is not half.results["dx"]]
        more.append(half.node)
    where = max(order[producer.node], *(_position(value, order) for value in node.inputs if value is not None))
    rest = None
    if len(terms) > 1:
        (total,) = editor.standard("Sum", terms, 1, before=producer.node, of=[node])
        total.shape, total.type = node.outputs[0].shape, node.outputs[0].type
        rest, terms = total.producer(), [total]
        assert rest is not None
        order[rest] = where
    if terms:
        added = with_step(spec, step)
        assert added is not None, (spec.name, step)
        spec = added
        operands["other" if step == "AddGradient" else "skip_grad"] = terms[0]
    fused = editor.replace(producer, spec, more, operands=operands, results={"dx": node.outputs[0]})
    order[fused.node] = where
    return rest


def is_own_half(op: Op, node: ir.Node) -> bool:
    """Tell whether an operator is the bare input half of a BN's gradient, which nothing but the Sum reads."""
    return op.spec == INPUT_HALF and is_only_read_by(op.results["dx"], node)


def _position(value: ir.Value, order: Order) -> int:
    producer = value.producer()
    return order[producer] if producer is not None else -1
