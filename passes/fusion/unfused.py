"""Which halves of which BNs, GroupNorms and LayerNorms still sweep a map of their own, and why.

The honest end of every rewrite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from bnfuse.analysis.owners import forward_name
from bnfuse.opset.spec import DOMAIN, OpSpec
from bnfuse.passes.dialect.source_ops import BATCH_NORM, BATCH_NORM_GRAD, read
from bnfuse.passes.dialect.steps import ADDITIONS, REDUCTIONS
from bnfuse.passes.fission.group_norm import GROUP_NORM, GROUP_NORM_GRAD
from bnfuse.passes.fusion.scale import is_scale
from bnfuse.passes.rewriter import Op, Refusal, sources

CONCATS = ("Concat", "Split")
OF_GROUPS = {
    GROUP_NORM: "forward",
    GROUP_NORM_GRAD: "gradient",
    "GroupNormStatistics": "statistics",
    "GroupNormGradReduce": "gradient reductions",
}
OF_PIXELS = {"LayerNorm": "forward", "LayerNormGrad": "gradient"}
MONOLITHS = (BATCH_NORM, BATCH_NORM_GRAD, "BatchNormalization")


@dataclasses.dataclass(frozen=True)
class Unfused:
    """A BN, a GroupNorm or a LayerNorm, one of its halves, and why that half is a kernel of its own."""

    node: str
    half: str
    reason: str
    norm: str = "BatchNorm"


def batch_norms(model: ir.Model) -> tuple[str, ...]:
    """Name the BNs of a source graph."""
    return tuple(node.name or "" for node in model.graph if node.op_type in (BATCH_NORM, "BatchNormalization"))


def group_norms(model: ir.Model) -> tuple[str, ...]:
    """Name the GroupNorms and InstanceNorms of a source graph."""
    return tuple(node.name or "" for node in model.graph if node.op_type == GROUP_NORM and node.domain == DOMAIN)


def layer_norms(model: ir.Model) -> tuple[str, ...]:
    """Name the LayerNorms over channels of a source graph."""
    return tuple(node.name or "" for node in model.graph if node.op_type == "LayerNorm" and node.domain == DOMAIN)


def find_unfused(model: ir.Model, names: Mapping[str, str], refused: list[Refusal], level: str) -> tuple[Unfused, ...]:
    """Find every half of the named norms that is left on its own, with the reason of the last pass that looked at it.

    `names` says of each whether it is a BatchNorm, a GroupNorm or a LayerNorm.

    Where no pass of the level looked at it, the reason is the level, or what the half has become.
    """
    reasons = {refusal.node: refusal.reason for refusal in refused}
    found = []
    for node in model.graph:
        half = standalone_half(node)
        if half is None:
            continue
        of = [name for name in sources(node) if name in names] or _through_gradient(node, names)
        reason = reasons.get(node.name or "") or _left_by(level, node)
        if level == "bnff" and any(other.op_type in CONCATS for other in _neighbours(node)):
            reason += "; level icf works across concatenations"
        found += [Unfused(name, half, reason, names[name]) for name in of]
    return tuple(dict.fromkeys(found))


def standalone_half(node: ir.Node) -> str | None:
    """Name the half of a BN that a node is on its own (statistics, normalise, gradient input, ...), or None."""
    if node.op_type in MONOLITHS:
        return "gradient" if node.op_type == BATCH_NORM_GRAD else "forward"
    if node.domain == DOMAIN and node.op_type in OF_GROUPS:
        return OF_GROUPS[node.op_type]
    if node.domain == DOMAIN and node.op_type in OF_PIXELS:
        return OF_PIXELS[node.op_type]
    if node.op_type in ("BatchNormStatistics", "L1Statistics", "RangeStatistics", "LocalStatistics"):
        return "statistics"
    if node.op_type in ("L1GradInput", "RangeGradInput", "LocalScale"):
        return "gradient input"
    if node.op_type in ("BatchNormGradReduce", "LocalGradReduce"):
        return "gradient reductions"
    if node.op_type == "LocalNormalize":
        return "normalise"
    op = read(node)
    if op is None or not isinstance(op.spec, OpSpec):
        return None
    return _standalone_map(op)


def _standalone_map(op: Op) -> str | None:
    steps = op.steps
    if (
        steps.core == "Pointwise"
        and steps.prologue[0] == "Normalize"
        and not {"Add", "AddNormalized"} & {*steps.prologue}
    ):
        return "normalise"
    if steps.core == "PointwiseGrad" and {*REDUCTIONS} & {*steps.epilogue}:
        return "gradient reductions"
    if steps.core == "PointwiseGrad" and ("BatchNormGrad" in steps.prologue or is_scale(op)):
        return None if is_shared_sum(op) else "gradient input"
    return None


def is_shared_sum(op: Op) -> bool:
    """Tell whether an operator makes a sum of gradients that several read, as `x + y` is of maps in the forward pass.

    Like that it is a map of the network's own, which is stored once: no half of a BN, wherever it went, would save it.
    """
    dx = op.results["dx"]
    return bool({*ADDITIONS} & {*op.steps.epilogue}) and (dx.is_graph_output() or len(dx.uses()) > 1)


def _through_gradient(node: ir.Node, names: Iterable[str]) -> list[str]:
    """Name a gradient node that no pass touched after its forward node."""
    owner = forward_name(node.name or "")
    return [name for name in names if name == owner]


def _left_by(level: str, node: ir.Node) -> str:
    """Why a half that no pass refused is a kernel of its own."""
    if node.domain == DOMAIN and node.op_type in OF_PIXELS:
        return "the channels of each pixel are normalised in one sweep, which stores the result"
    if node.domain == DOMAIN and node.op_type.startswith(("L1", "Range")):
        return "this estimate of the variance is made in sweeps of its own"
    if node.domain == DOMAIN and node.op_type in (GROUP_NORM, GROUP_NORM_GRAD):
        return f"level {level} leaves GroupNorms whole: bnff takes them apart"
    if node.domain == DOMAIN and node.op_type in OF_GROUPS:
        return f"level {level} leaves its sums in sweeps of their own: bnff moves them into what writes the map"
    if level in ("none", "rcf"):
        return f"level {level} leaves BatchNorms whole: mvf splits off the statistics, bnff moves the halves"
    if level == "mvf":
        return "level mvf leaves the halves where they are: bnff moves them into the operators around them"
    op = read(node)
    if op is not None and isinstance(op.spec, OpSpec) and op.steps.core == "PointwiseGrad":
        return _left_gradient(op)
    return f"neither what writes its map nor what reads it takes it: {_named(_neighbours(node))}"


def _left_gradient(op: Op) -> str:
    """Say why a PointwiseGrad that is neither a bare input half nor a mask that could move is a kernel of its own."""
    dy, dx = op.operands["dy"], op.results["dx"]
    adds = bool({*ADDITIONS} & {*op.steps.epilogue})
    if {*REDUCTIONS} & {*op.steps.epilogue}:
        if "BatchNormGrad" in op.steps.prologue:
            what = "a sum that ends in the input gradient" if adds else "made from the input gradient"
            return f"{dx.name} is {what} of a BatchNorm, not of a convolution: '{op.node.name}' makes it in a sweep"
        writer = dy.producer()
        return f"'{op.node.name}' makes {dx.name} of {dy.name}, and {_named([writer] if writer else [])} cannot"
    if adds:
        return (
            f"{dx.name} is a sum of gradients, and only {_named(use.node for use in dx.uses()) or 'no node'} reads it, "
            "without room for a sum"
        )
    return f"{dx.name} is read by {_named(use.node for use in dx.uses()) or 'no node'}, without room for it"


def _neighbours(node: ir.Node) -> list[ir.Node]:
    """List what writes the operands of a node, or the terms of a Sum among them, and what reads its results."""
    writers = _writers(node)
    writers += [term for writer in writers if writer.op_type == "Sum" for term in _writers(writer)]
    return [*dict.fromkeys((*writers, *(use.node for value in node.outputs for use in value.uses())))]


def _writers(node: ir.Node) -> list[ir.Node]:
    return [writer for value in node.inputs if value is not None and (writer := value.producer()) is not None]


def _named(nodes: Iterable[ir.Node]) -> str:
    """At most three nodes, by operator and name."""
    found = [f"{node.op_type} '{node.name}'" for node in dict.fromkeys(nodes)]
    return ", ".join((*found[:3], *([f"{len(found) - 3} more"] if len(found) > 3 else ())))
