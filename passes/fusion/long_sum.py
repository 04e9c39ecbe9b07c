"""BNFF forward: a sum whose only reader is another sum becomes more terms of that.

    s = NormalizeAddNormalizedPointwise(x, a, b, skip, ..)
    y, mean, variance =                                       ->    y, mean, variance =
      NormalizeAddReluPointwiseStatistics(u, c, d, s)                 NormalizeAddNormalizedPlusNormalizedRelu
                                                                        PointwiseStatistics(x, .., skip, .., u, c, d)

RepVGG, MobileOne and HRNet add three maps and more, each with its BatchNorm: s is neither written nor read. Two of the
terms may be activated or gated, the others are normalised at most.

Refuses a sum that something else reads, that is activated, or whose statistics are taken; and one of three terms that
are activated or gated, of which one would be stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.spec import OpSpec, further_terms, of_skip
from bnfuse.passes.dialect.source_ops import forward_of, read
from bnfuse.passes.dialect.steps import try_spec
from bnfuse.passes.rewriter import Editor, FusionResult, Op, is_only_read_by

SUMS = ("Add", "AddNormalized")


@dataclasses.dataclass(frozen=True)
class Term:
    """What is added: a map, what is done to it before, and the operands of that by their names as a first term."""

    steps: tuple[str, ...]
    operands: dict[str, ir.Value]

    @property
    def is_plain(self) -> bool:
        """Tell whether the map is normalised at most."""
        return self.steps in ((), ("Normalize",))


class LongSumFusion(ir.passes.InPlacePass):
    """Join sums with the sums that read them."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        for node in list(model.graph):
            total = read(node) if node.graph is not None else None
            while total is not None and is_sum(total):
                total = join(editor, total)
        return editor.result()


def is_sum(op: Op) -> bool:
    """Tell whether an operator stores a sum, whatever it does with it then."""
    return isinstance(op.spec, OpSpec) and op.spec.core == "Pointwise" and bool({*SUMS} & {*op.spec.prologue})


def join(editor: Editor, total: Op) -> Op | None:
    """Put the terms of a sum in its place, where it is a term of `total`. Gives what became of that; None where none
    is."""
    terms, behind = terms_of(total)
    for place, term in enumerate(terms):
        inner = forward_of(term.operands["x"])
        if term.steps or inner is None or not is_sum(inner) or inner.steps.epilogue:
            continue
        more, activation = terms_of(inner)
        if activation or not is_only_read_by(inner.results["y"], total.node) or not _agree(inner, total):
            continue
        joined = [*terms[:place], *more, *terms[place + 1 :]]
        if sum(not to_be(each).is_plain for each in joined) > 2:
            continue
        found = composed(joined, behind, total.steps.epilogue)
        if found is not None:
            spec, operands = found
            kept = {name: total.operands[name] for name in total.operands if name not in PROLOGUE}
            made = dataclasses.replace(total, operands=kept)
            return editor.replace(made, spec, [inner.node], operands=operands, attributes=inner.attributes)
    return None


def to_be(term: Term) -> Term:
    """Give a term with the steps that are still to move into its sum: those of a map that nothing else reads."""
    made = forward_of(term.operands["x"])
    if term.steps or made is None or made.steps.core != "Pointwise" or made.steps.epilogue or is_sum(made):
        return term
    y = made.results["y"]
    return term if y.is_graph_output() or len(list(y.uses())) > 1 else Term(made.steps.prologue, made.operands)


PROLOGUE = ("x", "a", "b", "active", "gate", "skip", "skip_a", "skip_b", "skip_gate")


def terms_of(op: Op) -> tuple[list[Term], tuple[str, ...]]:
    """List the terms of a sum, and the activation behind it."""
    prologue = op.steps.prologue
    place = next(prologue.index(step) for step in SUMS if step in prologue)
    front = [step for step in prologue[:place] if step != "SkipGate" and not of_skip(step)]
    names = {"x": "x", "a": "a", "b": "b", "active": "active", "gate": "gate"}
    first = Term(tuple(front), _renamed(op, names))
    skip = [kind for step in prologue[:place] if (kind := of_skip(step))]
    normalized = ["Normalize"] if prologue[place] == "AddNormalized" else []
    gated = ["Gate"] if "SkipGate" in prologue else []
    names = {"skip": "x", "skip_a": "a", "skip_b": "b", "skip_gate": "gate"}
    second = Term((*normalized, *skip, *gated), _renamed(op, names))
    rest = []
    for name, a, b in further_terms(op.operands):
        rest.append(Term(("Normalize",) if a in op.operands else (), _renamed(op, {name: "x", a: "a", b: "b"})))
    return [first, second, *rest], tuple(step for step in prologue[place:] if step in ACTIVATIONS)


def _renamed(op: Op, names: dict[str, str]) -> dict[str, ir.Value]:
    return {new: op.operands[name] for name, new in names.items() if name in op.operands}


def composed(
    terms: Sequence[Term], behind: tuple[str, ...], epilogue: tuple[str, ...]
) -> tuple[OpSpec, dict[str, ir.Value]] | None:
    """Compose the sum of these terms, and its operands; None where the grammar has no room for them."""
    first, second, *rest = sorted(
        terms, key=lambda term: (to_be(term).is_plain, not term.steps, "Where" not in term.steps)
    )
    if not all(term.is_plain for term in rest) or "Where" in second.steps:
        return None
    operands = dict(first.operands)
    normalized, gated = second.steps[:1] == ("Normalize",), second.steps[-1:] == ("Gate",)
    kinds = second.steps[normalized : len(second.steps) - gated]
    prologue = [*first.steps, *(f"Skip{kind}" for kind in kinds), *(["SkipGate"] if gated else [])]
    prologue.append("AddNormalized" if normalized else "Add")
    operands |= {_of_skip(name): value for name, value in second.operands.items()}
    for number, term in enumerate(rest, 1):
        prologue.append("PlusNormalized" if term.steps else "Plus")
        operands |= {_of_plus(name, number): value for name, value in term.operands.items()}
    spec = try_spec((*prologue, *behind), "Pointwise", epilogue)
    return None if spec is None else (spec, operands)


def _of_skip(name: str) -> str:
    return "skip" if name == "x" else f"skip_{name}"


def _of_plus(name: str, number: int) -> str:
    return f"plus_{number}" if name == "x" else f"plus_{name}_{number}"


def _agree(inner: Op, total: Op) -> bool:
    """Tell whether the attributes that both have agree: steps of one kind share an operator's attributes."""
    return all(total.attributes.get(key, value) == value for key, value in inner.attributes.items())
