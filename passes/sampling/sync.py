"""SyncBN: the statistics of a data-parallel run are those of all ranks' samples, and so are their gradients.

    y, mean, variance = ConvStatistics(x, w)          y, m, v        = ConvStatistics(x, w)            as it was
    a, b, .. = BatchNormFinalize(                     mean, variance = AllReduceMoments(m, v)          C-sized
      .., mean, variance, ..)                   ->    a, b, ..       = BatchNormFinalize(
                                                        .., mean, variance, ..)                        as it was
    q, w = BatchNormGradFinalize(                     B, G = AllReduceTerms(beta, gamma)               C-sized
      beta, gamma, mean)                              q, w = BatchNormGradFinalize(B, G, mean)

Behind all other passes, so fusion is what it is without: between the statistics on a map's way out and the coefficients
on its way in there is an exchange of 2*C numbers, and one backward. Each channel of a map is exchanged once, however
many BatchNorms read it: where it is written, and where its input gradient is made of what all of them contributed.
Gradients of scale and bias stay those of a rank's own samples, as all other gradients of parameters do: what averages
these over the ranks averages them too. BatchNorms that the level leaves whole are split first.

So a run computes what one rank does at the global batch, and three forms are cheaper ([Chen18], section 4.3). Sampled
statistics (fs, bs, ns) are exchanged like full ones. Those of virtual samples are not exchanged at all: all ranks draw
the same ones, normalise them alike, and take the gradient of their own losses at them. A mixture exchanges its other
part.
With `ranks` the statistics are those of the first so many ranks: samples of others are normalised by them and have no
part in their gradient.

Raises for a BatchNorm that cannot be split (its input is no static float32 map of rank 4), for l1bn and rbn, whose
estimates are no moments, and for local statistics, which are of groups of one rank's samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.exchanges import MOMENTS, TERMS
from bnfuse.graph.sampling import sampling_of
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import OpSpec
from bnfuse.passes.dialect.source_ops import constant_of, is_batch_norm, is_batch_norm_grad, sizes
from bnfuse.passes.rewriter import Editor, FusionResult, Op, own_op

MEAN = PLAIN_OPS["BatchNormFinalize"].operands.index("mean")
STATISTICS = ("BatchNormStatistics", "SampledStatistics", "PointStatistics")
FINALIZES = ("BatchNormGradFinalize", "SampledGradFinalize")
REFUSED = {
    "L1Statistics": "l1bn estimates the variance by absolute deviations, which are no moments: sample it otherwise",
    "RangeStatistics": "rbn estimates the variance by the range, which is no moment: sample it otherwise",
    "LocalStatistics": "its statistics are of groups of one rank's samples (local-bn): leave one of the two out",
}


class Sync(ir.passes.InPlacePass):
    """Exchange statistics and the sums of their gradients between the ranks; `ranks` of them count, 0 for all."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__()
        self.ranks = ranks

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place. Raises BnfuseError where statistics cannot be those of all ranks."""
        require_exchangeable(model.graph)
        ops = [op for node in model.graph if (op := own_op(node)) is not None]
        taken = {op.node: op for op in ops if takes_statistics(op)}
        if not taken:
            what = "no BatchNorm takes statistics of its batch, so there are none to exchange"
            raise BnfuseError(f"sync: {what}: leave it out")
        virtual = virtual_rows(model)
        alike = {node for node, op in taken.items() if is_of_virtual(op, virtual)}
        editor = Editor(model, "sync")
        made: dict[tuple[ir.Value, ir.Value, int, int], dict[str, ir.Value]] = {}
        for op in ops:
            if op.node in taken:
                if op.node not in alike:
                    exchange_moments(editor, op, self.ranks)
            elif op.spec.name in FINALIZES and op.operands["mean"].producer() not in alike:
                exchange_terms(editor, op, self.ranks, made)
            elif op.spec.name == "BatchNormFinalize" and op.attributes.get("elements"):
                count_elements(op.node, alike, self.ranks)
        return editor.result()


def require_exchangeable(graph: ir.Graph) -> None:
    """Raise BnfuseError for statistics that are no moments of a whole rank's samples."""
    for node in graph:
        if is_batch_norm(node) or is_batch_norm_grad(node):
            what = "cannot have the statistics of all ranks: its input is no static float32 map of rank 4"
            raise at_node(node.name or "", node.op_type, f"{what}. Leave sync out.")
        if (op := own_op(node)) is not None and (why := REFUSED.get(op.spec.name)):
            raise BnfuseError(f"sync: node '{node.name}': {why}")


def takes_statistics(op: Op) -> bool:
    """Tell whether an operator gives mean and variance of a map's channels."""
    return "Statistics" in op.spec.epilogue if isinstance(op.spec, OpSpec) else op.spec.name in STATISTICS


def virtual_rows(model: ir.Model) -> int:
    """Count the virtual samples in front of the batch."""
    drawn = sampling_of(model).virtual
    return sum(sizes(value)[0] for value in model.graph.inputs if value.name in drawn)


def is_of_virtual(op: Op, virtual: int) -> bool:
    """Tell whether an operator takes the statistics of the virtual samples, which are the same on all ranks."""
    if op.spec.name != "SampledStatistics" or not virtual:
        return False
    offset = constant_of(op.operands["offset"])
    return offset is not None and offset[0] == 0 and op.attributes["extent"][0] == virtual


def count_elements(node: ir.Node, alike: Collection[ir.Node], ranks: int) -> None:
    """Say of a BatchNormFinalize whose ranks' elements its unbiased variance is of."""
    maker = node.inputs[MEAN].producer() if node.inputs[MEAN] is not None else None  # type: ignore[union-attr]
    if maker in alike:
        return
    node.attributes["of_ranks"] = ir.AttrInt64("of_ranks", ranks)
    mixed = own_op(maker) if maker is not None else None
    if (
        mixed is not None
        and mixed.spec.name == "MixStatistics"
        and (first := mixed.operands["mean"].producer()) in alike
    ):
        assert first is not None
        share = mixed.attributes["weight"] / math.prod(first.attributes["extent"].as_ints())
        node.attributes["own_share"] = ir.AttrFloat32("own_share", share)


def exchange_moments(editor: Editor, op: Op, ranks: int) -> None:
    """Let all that reads the statistics of an operator read those of all ranks."""
    raw = {name: op.results[name] for name in ("mean", "variance")}
    readers = [use.node for value in raw.values() for use in value.uses()]
    if not readers:
        return
    made = exchange(editor, MOMENTS, raw, {"ranks": ranks}, op.node, first_of(editor.graph, readers))
    for old, new in zip(raw.values(), made.values(), strict=True):
        for node, place in list(old.uses()):
            if node is not new.producer():
                node.replace_input_with(place, new)
        if old.is_graph_output():
            take_output(editor, old, new)


def take_output(editor: Editor, old: ir.Value, new: ir.Value) -> None:
    """Let an output of the graph be what is exchanged, under its name."""
    name, old.name = old.name, editor.fresh(f"{old.name}/own")
    new.name = name
    editor.graph.outputs[list(editor.graph.outputs).index(old)] = new


def exchange_terms(
    editor: Editor, op: Op, ranks: int, made: dict[tuple[ir.Value, ir.Value, int, int], dict[str, ir.Value]]
) -> None:
    """Let the coefficients of an input gradient be made of the terms of all ranks; `made` has what is exchanged."""
    node, names = op.node, ("beta_term", "gamma_term")
    raw = {name: op.operands[name] for name in names}
    start, stop = 0, 0
    if "start" in op.attributes:
        start, stop = op.attributes["start"], op.attributes["stop"]
    else:
        (stop,) = sizes(raw["beta_term"])
    key = (raw["beta_term"], raw["gamma_term"], start, stop)
    if key not in made:
        made[key] = exchange(editor, TERMS, raw, {"start": start, "stop": stop, "ranks": ranks}, node, node)
    for name in names:
        node.replace_input_with(op.spec.operands.index(name), made[key][f"all_{name}"])
    if "start" in op.attributes:
        node.attributes["start"] = ir.AttrInt64("start", 0)
        node.attributes["stop"] = ir.AttrInt64("stop", stop - start)


def exchange(
    editor: Editor, name: str, raw: dict[str, ir.Value], attributes: dict[str, int], of: ir.Node, before: ir.Node
) -> dict[str, ir.Value]:
    """Insert an exchange on behalf of a node; gives its results by name."""
    return editor.emit(
        PLAIN_OPS[name], raw, attributes, {}, before=before, of=[of], name=editor.fresh(f"{of.name}/sync")
    )


def first_of(graph: ir.Graph, readers: list[ir.Node]) -> ir.Node:
    """Find the first of some nodes in the order of the graph."""
    wanted = {*readers}
    return next(node for node in graph if node in wanted)
