"""Which halves of which BNs still sweep a map of their own, and why: the honest end of every rewrite."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from bnfuse.opset.spec import DOMAIN, OpSpec
from bnfuse.passes.fuse_scale import is_scale
from bnfuse.passes.rewriting import Op, Refusal, sources
from bnfuse.passes.source_ops import read

MONOLITHS = ("BatchNormInternal", "BatchNormalizationGrad", "BatchNormalization")


@dataclasses.dataclass(frozen=True)
class Unfused:
    """A BN, one of its halves, and why that half is a kernel of its own."""

    node: str
    half: str
    reason: str


def batch_norms(model: ir.Model) -> tuple[str, ...]:
    """Names of the BNs of a source graph."""
    return tuple(node.name or "" for node in model.graph if node.op_type in ("BatchNormInternal", "BatchNormalization"))


def find_unfused(model: ir.Model, names: tuple[str, ...], refused: list[Refusal]) -> tuple[Unfused, ...]:
    """Every half of the named BNs that is left on its own, with the reason that the last pass to look at it gave."""
    reasons = {refusal.node: refusal.reason for refusal in refused}
    found = []
    for node in model.graph:
        half = standalone_half(node)
        if half is None:
            continue
        of = [name for name in sources(node) if name in names] or _through_gradient(node, names)
        found += [Unfused(name, half, reasons.get(node.name or "") or _default(node, half)) for name in of]
    return tuple(dict.fromkeys(found))


def standalone_half(node: ir.Node) -> str | None:
    if node.op_type in MONOLITHS:
        return "gradient" if node.op_type == "BatchNormalizationGrad" else "forward"
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
    if steps.core == "Map" and steps.prologue[0] == "Normalize" and not {"Add", "AddNormalized"} & {*steps.prologue}:
        return "normalise"
    if steps.core == "MapGrad" and {"Reduce", "ReduceOther"} & {*steps.epilogue}:
        return "gradient reductions"
    if steps.core == "MapGrad" and ("BatchNormGrad" in steps.prologue or is_scale(op)):
        return "gradient input"
    return None


def _through_gradient(node: ir.Node, names: tuple[str, ...]) -> list[str]:
    """A gradient node that no pass touched is named after its forward node."""
    return [name for name in names if (node.name or "").startswith(f"{name}_Grad/")]


def _default(node: ir.Node, half: str) -> str:
    if node.domain == DOMAIN and node.op_type.startswith(("L1", "Range")):
        return "this estimate of the variance is made in sweeps of its own"
    return f"the level in use leaves the {half} half alone"
