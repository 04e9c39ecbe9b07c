"""ICF backward: one accumulated gradient per concatenation, and no Split, Sum or BN gradient sweep (docs/maths.md).

Let BN layers l = 1..L read channels of the same map x, each with its own scale: dx = sum_l p_l*dz_l + q*x + w with
q = -sum_l(p_l*inv_std_l*dgamma_l)/m and w = -sum_l(p_l*dbeta_l)/m - q*mean. So with t1 = Concat(x0, y1) inside
t2 = Concat(x0, y1, y2), read by the convolutions of layers 1 and 2 through their BNs:

    dt2 = BatchNormGradPointwiseGrad(dz2, t2, ..)     G2 = ...GradReduceScale(.., p2)                 p2*dz2
    a2, b2, dy2 = Split(dt2)                          dy2 is read as G2[8:12] + q*y2 + w
    dt1 = BatchNormGradPointwiseGrad(dz1, t1, ..) ->  G1 = ...GradReduceAccumulate(.., G2, p1)        G2[0:8] + p1*dz1
    a1, b1 = Split(dt1)                               dy1 is read as G1[4:8] + q*y1 + w
    dx0 = Sum(a1, a2); dy1 = Sum(b1, b2)              dx0 is read as G1[0:4] + q*x0 + w

The operator that wrote dz_l adds p_l*dz_l to G instead; what reads the gradient of a producer reads its channels of G.
A sampled BN has no q*x + w for all elements: its term is added to G as p*dz, and then its AddSampled adds to G in its
sample; the producer's channels of what comes out are read plainly. So has the scale of a removed BN.

Channels are traced to their producers, so nested and flat concatenations, and any mix, are one case. Gradients of
readers that are not BNs are terms of G with the factor 1.

Refuses concatenations whose terms do not cover nested channel ranges in the order in which they are computed, and those
of which a producer's gradient is not the sum of all terms at its channels: Concat(x, y1) and Concat(x, y2) meet in x,
but y1 and y2 do not.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.provenance import channels, is_channel_split, leaves
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import OpSpec
from bnfuse.passes.concat.statistics import statistics_of
from bnfuse.passes.dialect.sampled_chain import accumulated, scaled_base
from bnfuse.passes.dialect.source_ops import gradient_of, is_map, sizes
from bnfuse.passes.dialect.steps import ACCUMULATIONS, ADDITIONS, try_spec
from bnfuse.passes.fission.batch_norm_grad import INPUT_HALF
from bnfuse.passes.fusion.gradient_sum import gathers_concat
from bnfuse.passes.fusion.scale import is_scale
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by, own_op, sort


@dataclasses.dataclass(frozen=True)
class Term:
    """A gradient that covers channels [start, stop) of the accumulated one: of a BN (`half`), or of another reader."""

    value: ir.Value
    start: int
    stop: int
    half: Op | None = None  # the BN's input half, BatchNormGradPointwiseGrad
    writer: Op | None = None  # the operator that writes the half's dz; without a half, what scales a sampled BN's dz


@dataclasses.dataclass
class Group:
    """Producers whose channels meet in concatenations: their gradients, and the terms of those gradients."""

    gradients: dict[ir.Value, tuple[int, int]]  # a producer's gradient -> its channels of G
    addends: dict[ir.Value, list[ir.Value]]  # a producer's gradient -> the terms that it is the sum of
    terms: list[Term]
    glue: list[ir.Node]  # the Splits and Sums that G replaces


class ConcatGradient(ir.passes.InPlacePass):
    """Accumulate the gradients of all readers of a concatenation in one map G."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "icf")
        for glue in find_glue(model.graph):
            order = {node: index for index, node in enumerate(model.graph)}
            group = make_group(glue, order)
            if group is not None and not any(term.writer for term in group.terms):
                continue  # no BN: the Splits are views, and there is nothing to gain
            reason = why_not(group) if group is not None else "its channels meet others' in no common order"
            if reason is None and group is not None:
                accumulate(editor, group)
            else:
                for half in halves_into(glue):
                    editor.refuse(half, str(reason))
        sort(model.graph)
        return editor.result()


def find_glue(graph: ir.Graph) -> list[list[ir.Node]]:
    """List the Splits that are connected through the Sums of their pieces, with those Sums, in the graph's order."""
    order = {node: index for index, node in enumerate(graph)}
    found: list[list[ir.Node]] = []
    for node in graph:
        if is_channel_split(node) and is_map(node.inputs[0]) and not any(node in glue for glue in found):
            found.append(sorted(connected_glue(node), key=lambda other: order[other]))
    return found


def halves_into(glue: list[ir.Node]) -> list[ir.Node]:
    """List the input halves of BNs whose results the glue reads, and what scales the dz of sampled ones."""
    values = dict.fromkeys(value for node in glue for value in node.inputs if value is not None)
    halves = [op.node for value in values if (op := gradient_of(value)) is not None and op.spec == INPUT_HALF]
    return halves + [op.node for value in values if (op := scaled_base(value)) is not None and is_scale(op)]


def connected_glue(first: ir.Node) -> set[ir.Node]:
    """Find the Splits and Sums reachable from one another through their operands and results."""
    found, pending = {first}, [first]
    while pending:
        node = pending.pop()
        near = [use.node for value in node.outputs for use in value.uses()]
        operands = node.inputs[:1] if node.op_type == "Split" else node.inputs
        near += [value.producer() for value in operands if value is not None and value.producer() is not None]  # type: ignore[misc]
        for other in near:
            if other not in found and _is_glue(other):
                found.add(other)
                pending.append(other)
    return found


def _is_glue(node: ir.Node) -> bool:
    return (is_channel_split(node) or (node.op_type == "Sum" and gathers_concat(node))) and is_map(node.inputs[0])


def make_group(glue: list[ir.Node], order: dict[ir.Node, int]) -> Group | None:
    """Place every term and every producer's gradient in one range of channels; None where they do not fit together."""
    ends = [value for node in glue for value in node.outputs if is_read_outside(value, glue)]
    if not ends:
        return None
    found: dict[ir.Value, tuple[int, int]] = {}  # a term -> its channels
    gradients: dict[ir.Value, tuple[int, int]] = {}
    addends: dict[ir.Value, list[ir.Value]] = {}
    pending = list(ends)
    placed = False
    while pending:
        progress = []
        for end in pending:
            pieces = pieces_of(end, 0, channels(end), glue)
            offsets = {found[value][0] + start for value, start, _ in pieces if value in found}
            if placed and not offsets:
                progress.append(end)
                continue
            if len(offsets) > 1:
                return None
            offset = offsets.pop() if offsets else 0
            placed = True
            for value, start, _ in pieces:
                where = (offset - start, offset - start + channels(value))
                if found.setdefault(value, where) != where:
                    return None
            gradients[end] = (offset, offset + channels(end))
            addends[end] = [value for value, *_ in pieces]
        if len(progress) == len(pending):
            return None
        pending = progress
    lowest = min(start for start, _ in found.values())
    found = {value: (start - lowest, stop - lowest) for value, (start, stop) in found.items()}
    gradients = {value: (start - lowest, stop - lowest) for value, (start, stop) in gradients.items()}
    terms = [make_term(value, start, stop, glue) for value, (start, stop) in found.items()]
    terms.sort(key=lambda term: _position(term, order))
    return Group(gradients, addends, terms, glue)


def is_read_outside(value: ir.Value, glue: list[ir.Node]) -> bool:
    """Whether the value is a gradient that something beyond the glue waits for."""
    return value.is_graph_output() or any(use.node not in glue for use in value.uses())


def pieces_of(value: ir.Value, start: int, stop: int, glue: list[ir.Node]) -> list[tuple[ir.Value, int, int]]:
    """List the terms that add up to channels [start, stop) of a gradient: tensors outside the glue, their channels."""
    node = value.producer()
    if node is None or node not in glue:
        return [(value, start, stop)]
    if node.op_type == "Sum":
        return [piece for term in node.inputs if term is not None for piece in pieces_of(term, start, stop, glue)]
    before = sum(channels(output) for output in node.outputs[: node.outputs.index(value)])
    source = node.inputs[0]
    assert source is not None
    return pieces_of(source, before + start, before + stop, glue)


def make_term(value: ir.Value, start: int, stop: int, glue: list[ir.Node]) -> Term:
    """Describe a gradient at channels [start, stop) of G: a BN's, with what writes its dz, or any other."""
    half = gradient_of(value)
    if is_read_outside(value, glue):
        return Term(value, start, stop)
    if half is None or half.spec != INPUT_HALF:
        return Term(value, start, stop, writer=scaled_base(value))
    dz = half.operands["dy"]
    writer = gradient_of(dz)
    if writer is None or not is_only_read_by(dz, half.node) or {*ACCUMULATIONS} & {*writer.steps.epilogue}:
        return Term(value, start, stop)
    return Term(value, start, stop, half, writer)


def _position(term: Term, order: dict[ir.Node, int]) -> int:
    node = term.writer.node if term.writer else term.value.producer()
    return order[node] if node is not None else -1


def why_not(group: Group) -> str | None:
    """Tell why a group's terms cannot be accumulated, or None: ranges that are not nested, or sums of other terms."""
    previous: Term | None = None
    for term in group.terms:
        if previous and not (previous.start <= term.start and term.stop <= previous.stop):
            return (
                f"{term.value.name} covers channels {term.start} to {term.stop} of the concatenation, and the gradient "
                f"before it only {previous.start} to {previous.stop}"
            )
        previous = term
    for gradient, (start, stop) in group.gradients.items():
        met = [term for term in group.terms if term.start < stop and start < term.stop]
        if Counter(term.value for term in met) != Counter(group.addends[gradient]):
            return f"{gradient.name} is not the sum of all the gradients that meet in its channels"
        maps = {map_of(term.half, start - term.start, stop - term.start) for term in met if term.half}
        if len(maps) > 1 or None in maps:
            return f"the BNs that {gradient.name} is a sum of read different maps"
    return None


def map_of(half: Op, start: int, stop: int) -> ir.Value | None:
    """Find the map that fills channels [start, stop) of what a BN reads; None where there is no such one."""
    found = leaves(half.operands["grad_x"])
    return next((leaf.value for leaf in found if (leaf.start, leaf.stop) == (start, stop)), None)


@dataclasses.dataclass(frozen=True)
class Sum:
    """A value that covers channels [start, stop) of a group: G itself, or the coefficients' terms."""

    values: tuple[ir.Value, ...]
    start: int
    stop: int

    def covers(self, start: int, stop: int) -> bool:
        """Tell whether channels [start, stop) lie within this sum's."""
        return self.start <= start and stop <= self.stop


def accumulate(editor: Editor, group: Group) -> None:
    """Put one accumulated gradient in the place of a group's Splits, Sums and BN input halves."""
    maps: list[Sum] = []
    coefficients: list[Sum] = []
    for term in group.terms:
        if term.half and term.writer:
            maps.append(add_batch_norm(editor, term, maps[-1] if maps else None))
            coefficients.append(add_coefficients(editor, term, coefficients[-1] if coefficients else None))
        elif term.writer:
            maps.append(add_sampled(editor, term, maps[-1] if maps else None))
        else:
            maps.append(add_other(editor, term, maps[-1] if maps else None, group))
    for gradient, (start, stop) in group.gradients.items():
        total = [sum_ for sum_ in maps if sum_.covers(start, stop)][-1]
        shares = [sum_ for sum_ in coefficients if sum_.covers(start, stop)]
        read_share(editor, gradient, total, shares[-1] if shares else None, start, stop, group)
    halves = [term.half for term in group.terms if term.half]
    finalizes = [half.operands["grad_q"].producer() for half in halves]
    editor.remove_dead(
        [*group.glue, *(half.node for half in halves), *(node for node in finalizes if node is not None)]
    )


def add_batch_norm(editor: Editor, term: Term, before: Sum | None) -> Sum:
    """Let the operator that wrote dz add p*dz to G."""
    assert term.half is not None and term.writer is not None
    writer = gradient_of(term.half.node.inputs[0])  # as earlier terms may have left it
    assert writer is not None
    operands = {"acc_p": term.half.operands["grad_p"]}
    attributes = {}
    step = "Scale"
    if before is not None:
        step = "Accumulate"
        operands["acc"] = before.values[0]
        attributes = {"acc_start": term.start - before.start, "acc_stop": term.stop - before.start}
    spec = OpSpec(writer.steps.prologue, writer.steps.core, (*writer.steps.epilogue, step))
    fused = editor.replace(writer, spec, [term.half.node], operands=operands, attributes=attributes)
    return Sum((fused.results["dx"],), term.start, term.stop)


def add_sampled(editor: Editor, term: Term, before: Sum | None) -> Sum:
    """Let what scales a sampled BN's dz add to G; what the sample adds comes after it, by the operators there are."""
    base = scaled_base(term.value)
    assert base is not None
    value = term.value
    if before is not None:
        spec, operands, attributes = accumulated(base, before.values[0], term.start - before.start)
        fused = editor.replace(base, spec, operands=operands, attributes=attributes)
        if base.results["dx"] is value:
            value = fused.results["dx"]
    return Sum((value,), term.start, term.stop)


def add_coefficients(editor: Editor, term: Term, before: Sum | None) -> Sum:
    """Add the BN's terms of q and w to those of the BNs before it."""
    assert term.half is not None
    finalize = own_op(term.half.operands["grad_q"].producer())  # type: ignore[arg-type]
    assert finalize is not None
    beta, gamma = finalize.operands["beta_term"], finalize.operands["gamma_term"]
    if before is None:
        return Sum((beta, gamma), term.start, term.stop)
    terms = own_op(beta.producer())  # type: ignore[arg-type]
    assert terms is not None
    operands = {**terms.operands, "beta_acc": before.values[0], "gamma_acc": before.values[1]}
    attributes = {"acc_start": term.start - before.start, "acc_stop": term.stop - before.start}
    added = editor.emit(
        PLAIN_OPS["BatchNormGradTermsAccumulate"], operands, attributes, terms.results,
        before=finalize.node, of=[terms.node], name=terms.node.name,
    )  # fmt: skip
    editor.graph.remove(terms.node, safe=True)
    return Sum((added["beta_term"], added["gamma_term"]), term.start, term.stop)


def add_other(editor: Editor, term: Term, before: Sum | None, group: Group) -> Sum:
    """Add a gradient of a reader that is no BN: a term with the factor 1."""
    if before is None:
        return Sum((term.value,), term.start, term.stop)
    acc = before.values[0]
    whole = (term.start, term.stop) == (before.start, before.stop)
    writer = gradient_of(term.value)
    free = (
        writer is not None
        and not is_read_outside(term.value, group.glue)
        and not {*ADDITIONS, *ACCUMULATIONS} & {*writer.steps.epilogue}
    )
    spec = (
        try_spec(writer.steps.prologue, writer.steps.core, (*writer.steps.epilogue, "AddGradient"))
        if free and writer
        else None
    )
    if whole and spec is not None and writer is not None:
        fused = editor.replace(writer, spec, group.glue[:1], operands={"other": acc})
        return Sum((fused.results["dx"],), term.start, term.stop)
    anchor = _first_reader_after(editor, term, group)
    if not whole:
        acc = slice_map(editor, acc, term.start - before.start, term.stop - before.start, anchor, group)
    (total,) = editor.standard("Sum", [acc, term.value], 1, before=anchor, of=group.glue[:1])
    total.shape, total.type = term.value.shape, term.value.type
    return Sum((total,), term.start, term.stop)


def _first_reader_after(editor: Editor, term: Term, group: Group) -> ir.Node:
    readers = {use.node for use in term.value.uses()}
    return next(node for node in editor.graph if node in readers)


def slice_map(editor: Editor, value: ir.Value, start: int, stop: int, before: ir.Node, group: Group) -> ir.Value:
    """Insert an operator that reads channels [start, stop) of a map [N, C, H, W]; gives the narrower map."""
    n, _, h, w = sizes(value)
    result = ir.Value(
        name=editor.fresh(f"{value.name}_{start}_{stop}"), shape=ir.Shape([n, stop - start, h, w]), type=value.type
    )
    spec = OpSpec(("Slice",), "PointwiseGrad")
    made = editor.emit(
        spec, {"dy": value}, {"grad_start": start, "grad_stop": stop}, {"dx": result}, before=before, of=group.glue[:1]
    )
    return made["dx"]


def read_share(
    editor: Editor, gradient: ir.Value, total: Sum, shares: Sum | None, start: int, stop: int, group: Group
) -> None:
    """Read a producer's gradient: its channels of G, plus q*x + w where BNs read it."""
    node = gradient.producer()
    assert node is not None
    operands = {"dy": total.values[0]}
    attributes = {"grad_start": start - total.start, "grad_stop": stop - total.start}
    whole = (start, stop) == (total.start, total.stop)
    prologue = () if whole else ("Slice",)
    of = [node]
    if whole and shares is None:
        gradient.replace_all_uses_with(total.values[0])
        return
    if shares is not None:
        x = producer_of(gradient, group)
        statistics = statistics_of(editor, x, node)
        n, _, h, w = sizes(x)
        ranges = {"count": math.prod((n, h, w)), "start": start - shares.start, "stop": stop - shares.start}
        coefficients = {"beta_term": shares.values[0], "gamma_term": shares.values[1], "mean": statistics["mean"]}
        of += [term.half.node for term in group.terms if term.half and term.start <= start and stop <= term.stop]
        made = editor.emit(
            PLAIN_OPS["BatchNormGradFinalize"], coefficients, ranges, {}, before=node, of=of,
            name=editor.fresh(f"{gradient.name}/finalize"),
        )  # fmt: skip
        ones = editor.constant(f"{gradient.name}/ones", np.ones(stop - start, np.float32))
        operands |= {"grad_x": x, "grad_p": ones, "grad_q": made["q"], "grad_w": made["w"]}
        prologue = (*prologue, "BatchNormGrad")
    spec = OpSpec(prologue, "PointwiseGrad")
    editor.emit(
        spec, operands, attributes, {"dx": gradient}, before=node, of=of, name=editor.fresh(f"{gradient.name}/share")
    )


def producer_of(gradient: ir.Value, group: Group) -> ir.Value:
    """Find the map that a gradient belongs to: the one at its channels in the map that a BN of the group reads."""
    start, stop = group.gradients[gradient]
    for term in group.terms:
        if term.half and (found := map_of(term.half, start - term.start, stop - term.start)) is not None:
            return found
    raise AssertionError(f"no producer for {gradient.name}")
