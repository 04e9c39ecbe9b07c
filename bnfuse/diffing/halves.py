"""What became of each BatchNorm: which operators now do its statistics, its normalising and its gradient's halves.

Nothing is taken from names: the C-sized coefficients are followed through the graph, from `BatchNormFinalize`
back to the operators that took the statistics, and on to those that normalise, reduce and apply the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

from bnfuse.analysis.match import label, sources
from bnfuse.analysis.work import adds
from bnfuse.graph.exchanges import MOMENTS
from bnfuse.graph.exchanges import TERMS as EXCHANGED_TERMS
from bnfuse.opset.plain import PLAIN_OPS, PlainOp
from bnfuse.opset.spec import DOMAIN, OpSpec, parse

BATCH_NORMS = ("BatchNorm", "BatchNormalization")
# operators that only carry coefficients of one BN into a vector of several, or a part of one
CARRIERS = {"Concat", "Slice", "Split", "Identity", "Gather", "Reshape", "Add", "Sum", "Mul", "Sub", "Neg"}
TERMS = ("BatchNormGradTerms", "BatchNormGradTermsAccumulate")
STATISTICS = ("BatchNormStatistics", "LocalStatistics", "L1Statistics", "RangeStatistics")
SAMPLED_STATISTICS = ("SampledStatistics", "PointStatistics")
ADDITIONS = ("AddSampled", "AddAtPoints", "LocalAddSampled")
WHOLE_INPUTS = ("L1GradInput", "RangeGradInput")  # an estimate's input gradient, in one operator


@dataclasses.dataclass(frozen=True)
class Place:
    """An operator that does a half: on its way in ("prologue"), on its way out ("epilogue"), or as its "own" work.

    "sample": an operator of its own that touches a sample of the map only.
    """

    node: str
    where: str

    def __str__(self) -> str:
        if self.where == "sample":
            return f"a sample, by {self.node}"
        return f"{self.where} of {self.node}" if self.where != "own" else f"its own {self.node}"


@dataclasses.dataclass(frozen=True)
class BatchNormFate:
    """The halves of one BN of the graph before. `whole` says that the BN is still one node."""

    name: str
    channels: int | None
    whole: bool
    statistics: tuple[Place, ...] = ()
    normalize: tuple[Place, ...] = ()
    gradient_reduce: tuple[Place, ...] = ()
    gradient_input: tuple[Place, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether no half needs a sweep of its own over a feature map."""
        halves = (*self.statistics, *self.normalize, *self.gradient_reduce, *self.gradient_input)
        return not self.whole and all(place.where != "own" for place in halves)


def batch_norm_fates(before: ir.Graph, after: ir.Graph) -> tuple[BatchNormFate, ...]:
    """Tell of each BatchNorm of the graph before where its halves are afterwards."""
    finalizers = [node for node in after if is_own(node, "BatchNormFinalize", "LocalFinalize")]
    return tuple(fate(bn, finalizers, after) for bn in before if bn.op_type in BATCH_NORMS)


def is_own(node: ir.Node, *ops: str) -> bool:
    """Tell whether a node is one of these operators of ai.bnfuse."""
    return node.domain == DOMAIN and node.op_type in ops


def fate(bn: ir.Node, finalizers: Iterable[ir.Node], after: ir.Graph) -> BatchNormFate:
    """Find where the halves of one BatchNorm are afterwards."""
    scale = bn.inputs[1]
    channels = scale.shape[0] if scale is not None and scale.shape is not None and len(scale.shape) == 1 else None
    channels = channels if isinstance(channels, int) else None
    mine = [node for node in finalizers if belongs(node, bn)]
    if not mine:
        remains = [n for n in after if n.op_type in BATCH_NORMS and names(n.inputs[1:]) == names(bn.inputs[1:])]
        return BatchNormFate(label(bn), channels, whole=bool(remains))
    finalize = mine[0]
    done = results_by_name(finalize)
    return BatchNormFate(
        label(bn),
        channels,
        whole=False,
        statistics=tuple(unique(places_of_statistics(operands_by_name(finalize).get("mean")))),
        normalize=tuple(unique(places_of_normalize(done.get("a")))),
        gradient_reduce=tuple(unique(places_of_reduce(done.get("inv_std")))),
        gradient_input=tuple(unique(places_of_gradient_input(done.get("inv_std")))),
    )


def belongs(finalize: ir.Node, bn: ir.Node) -> bool:
    """Tell whether a finalizer is a BatchNorm's: by provenance where the nodes have it, by the same parameters and
    running statistics otherwise."""
    made_of = sources(finalize)
    if made_of and bn.name:
        return bn.name in made_of
    operands = operands_by_name(finalize)
    mine = [operands.get(k) for k in ("scale", "bias", "running_mean", "running_variance")]
    return names(mine) == names(bn.inputs[1:5])


def names(values: Iterable[ir.Value | None]) -> list[str | None]:
    """Give the names of values; None stays None."""
    return [value.name if value is not None else None for value in values]


def grammar(node: ir.Node) -> OpSpec | PlainOp | None:
    """Give what ai.bnfuse's grammar says of a node; None for an operator of others."""
    if node.domain != DOMAIN:
        return None
    return PLAIN_OPS.get(node.op_type) or parse(node.op_type)


def operands_by_name(node: ir.Node) -> dict[str, ir.Value]:
    """Map the grammar's names to the node's operands."""
    spec = grammar(node)
    pairs = zip(spec.operands, node.inputs, strict=False) if spec else ()
    return {name: value for name, value in pairs if value is not None}


def results_by_name(node: ir.Node) -> dict[str, ir.Value]:
    """Map the grammar's names to the node's results."""
    spec = grammar(node)
    return dict(zip(spec.results, node.outputs, strict=False)) if spec else {}


def readers(value: ir.Value | None, carriers: Callable[[ir.Node], bool]) -> Iterator[tuple[ir.Node, str]]:
    """List the `ai.bnfuse` operators that a coefficient reaches through carriers, with the operand it arrives at."""
    pending, seen = [value] if value is not None else [], set()
    while pending:
        current = pending.pop()
        for use in current.uses():
            node = use.node
            for name, operand in operands_by_name(node).items():
                if operand is current and not carriers(node):
                    yield node, name
            if carriers(node) and node not in seen:
                seen.add(node)
                pending += [out for out in node.outputs if out.name]


def carries(node: ir.Node) -> bool:
    """Tell whether coefficients go on through a node: a concatenation, a slice, arithmetic."""
    return node.domain == "" and node.op_type in CARRIERS


def carries_terms(node: ir.Node) -> bool:
    """Tell whether a BatchNorm's share of the terms of an input gradient goes on through a node."""
    return carries(node) or is_own(node, TERMS[1], EXCHANGED_TERMS)


def places_of_statistics(mean: ir.Value | None) -> Iterator[Place]:
    """Go back from the mean to whatever took it."""
    pending, seen = [mean], set()
    while pending:
        value = pending.pop()
        node = value.producer() if value is not None else None
        if node is None or node in seen:
            continue
        seen.add(node)
        if carries(node) or is_own(node, "MixStatistics", MOMENTS):
            pending += [v for v in node.inputs if v is not None]
        elif is_own(node, *SAMPLED_STATISTICS):
            yield Place(label(node), "sample")
        elif is_own(node, *STATISTICS):
            yield Place(label(node), "own")
        else:
            yield Place(label(node), "epilogue")


def places_of_normalize(a: ir.Value | None) -> Iterator[Place]:
    """Find the forward operators that apply a and b. (Backward operators recompute with them; that costs no sweep.)"""
    for node, operand in readers(a, carries):
        spec = grammar(node)
        if is_own(node, "LocalNormalize"):
            yield Place(label(node), "own")
        elif operand in ("a", "skip_a") and isinstance(spec, OpSpec) and not spec.is_gradient:
            only_work = spec.core == "Pointwise" and not {"Add", "AddNormalized"} & {*spec.prologue}
            yield Place(label(node), "own" if only_work else "prologue")


def places_of_reduce(inv_std: ir.Value | None) -> Iterator[Place]:
    """Find the operators that take the sums of dz and dz*x_hat."""
    for node, operand in readers(inv_std, carries):
        if is_own(node, "BatchNormGradReduce", "LocalGradReduce"):
            yield Place(label(node), "own")
        elif isinstance(grammar(node), OpSpec) and operand.startswith("inv_std"):
            yield Place(label(node), "epilogue")


def places_of_gradient_input(inv_std: ir.Value | None) -> Iterator[Place]:
    """Find the operators that apply p*dz + q*x + w: those that read the q which this BN's terms are part of.

    A sampled BN's are what adds q*x + w in the sample, and what applies p before it.
    """
    for node, operand in readers(inv_std, carries):
        if not (is_own(node, *TERMS) and operand == "inv_std"):
            continue
        for finalize, _ in readers(results_by_name(node)["gamma_term"], carries_terms):
            q = next((value for key, value in results_by_name(finalize).items() if key.startswith("q")), None)
            for reader, name in readers(q, carries):
                spec = grammar(reader)
                if is_own(reader, *WHOLE_INPUTS):
                    yield Place(label(reader), "own")
                elif is_own(reader, *ADDITIONS):
                    yield Place(label(reader), "sample")
                    yield from places_of_scale(operands_by_name(node).get("a"))
                if name == "grad_q" and isinstance(spec, OpSpec):
                    only_work = spec.core == "PointwiseGrad" and not adds(spec)
                    yield Place(label(reader), "own" if only_work else "prologue")
                elif name == "other_q":
                    yield Place(label(reader), "epilogue")


def places_of_scale(a: ir.Value | None) -> Iterator[Place]:
    """Find the gradient operators that apply p = a to dz alone."""
    for node, operand in readers(a, carries):
        spec = grammar(node)
        if operand == "acc_p" and isinstance(spec, OpSpec):
            only_work = spec.core == "PointwiseGrad" and spec.epilogue in (("Scale",), ("Accumulate",))
            yield Place(label(node), "own" if only_work else "epilogue")
        elif is_own(node, "LocalScale"):
            yield Place(label(node), "own")


def unique(places: Iterable[Place]) -> Iterator[Place]:
    """List places in the order met, each once."""
    yield from dict.fromkeys(places)
