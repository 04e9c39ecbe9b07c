"""Levels: which passes run, in which order, and what they did.

    none    nothing
    rcf     the ReLU into the following convolutions
    mvf     + mean and variance in one sweep: BN split into its halves
    bnff    + fission and fusion of the BN halves inside composite layers, forward and backward;
            no bias in a convolution that only BNs read
    icf     + across composite layers, through Concat; average pooling before 1x1 convolutions

([Jung19], sections 3.2 and 3.3.) Removal, virtual samples, sampled and local statistics come before a level's passes,
and exchanges between ranks behind them; all mean the same at every level. A pass that fails is named together with
those that ran before it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.core.heap import young_garbage
from bnfuse.graph.exchanges import NOTHING, Exchanged, exchanged, ranks_of, without_exchanges
from bnfuse.graph.io import FILE_KEY, file_of
from bnfuse.graph.microsoft import convert
from bnfuse.graph.signature import METADATA_KEY as ROLES_KEY
from bnfuse.graph.signature import GraphSignature, signature_of
from bnfuse.opset.functions import add_functions
from bnfuse.passes.concat.backward import SinkBackward
from bnfuse.passes.concat.forward import SinkForward
from bnfuse.passes.concat.gradient import ConcatGradient
from bnfuse.passes.concat.part import PartReduction
from bnfuse.passes.concat.statistics import ConcatStatistics
from bnfuse.passes.dialect.canonical import Canonicalize
from bnfuse.passes.dialect.resample import ResizeAsResample
from bnfuse.passes.dialect.rows import RowsAsMaps
from bnfuse.passes.dialect.shuffle import ChannelShuffle
from bnfuse.passes.dialect.source_ops import is_batch_norm, is_batch_norm_grad
from bnfuse.passes.dialect.splits import MergeSplits
from bnfuse.passes.dialect.stacks import UnstackMaps
from bnfuse.passes.fission.batch_norm import SplitBatchNorm
from bnfuse.passes.fission.batch_norm_grad import SplitBatchNormGrad
from bnfuse.passes.fission.group_norm import SplitGroupNorm
from bnfuse.passes.fusion.batch_norm_grad import BatchNormGradFusion
from bnfuse.passes.fusion.difference import DifferenceAsSum
from bnfuse.passes.fusion.gate import GateFusion
from bnfuse.passes.fusion.gate_sums import GateSumsFusion
from bnfuse.passes.fusion.gradient_sum import GradientSumFusion
from bnfuse.passes.fusion.image_sums import ImageSumsFusion
from bnfuse.passes.fusion.layer_scale import LayerScaleFusion
from bnfuse.passes.fusion.long_sum import LongSumFusion
from bnfuse.passes.fusion.mask import MaskFusion
from bnfuse.passes.fusion.pointwise import PointwiseFusion, ReluConvFusion
from bnfuse.passes.fusion.pool_first import PoolFirst
from bnfuse.passes.fusion.relu_out import ReluOut
from bnfuse.passes.fusion.scale import ScaleFusion
from bnfuse.passes.fusion.shared_mask import SharedMaskFusion
from bnfuse.passes.fusion.statistics import StatisticsFusion
from bnfuse.passes.fusion.sum_in import SumIn
from bnfuse.passes.fusion.sum_mask import SumIntoMask
from bnfuse.passes.fusion.unfused import Unfused, batch_norms, find_unfused, group_norms, layer_norms
from bnfuse.passes.removal.drop_bias import DropBias
from bnfuse.passes.removal.placements import Selection, select
from bnfuse.passes.removal.remove import RemoveBatchNorm, Removed
from bnfuse.passes.rewriter import FusionResult, Refusal, is_unused, sort
from bnfuse.passes.sampling.baseline_statistics import BaselineStatistics
from bnfuse.passes.sampling.decay import SetDecay
from bnfuse.passes.sampling.local import Group, LocalBatchNorm, batch_of
from bnfuse.passes.sampling.local import check as check_local
from bnfuse.passes.sampling.sample import Sample, Sampled
from bnfuse.passes.sampling.spec import SamplePlan, parse_plan
from bnfuse.passes.sampling.sync import Sync
from bnfuse.passes.sampling.virtual import AddVirtual

LEVELS = ("none", "rcf", "mvf", "bnff", "icf")

ROUNDS = 8  # of a stage; one is enough inside layers, and two across all networks of the zoo

PassFactory = Callable[[], ir.passes.InPlacePass]


@dataclasses.dataclass(frozen=True)
class PassReport:
    """One pass: how many places it changed, what it refused, and how long it took."""

    name: str
    changed: int
    refused: tuple[Refusal, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What a rewrite did. `batch_norms` counts the source graph's BNs, `group_norms` its Group- and InstanceNorms,
    `layer_norms` its LayerNorms over channels."""

    level: str
    batch_norms: int
    unfused: tuple[Unfused, ...]
    passes: tuple[PassReport, ...]
    nodes_before: int
    nodes_after: int
    removed: tuple[Removed, ...] = ()
    sampled: tuple[Sampled, ...] = ()
    group_norms: int = 0
    layer_norms: int = 0
    exchanged: Exchanged = NOTHING

    def to_json(self) -> dict[str, Any]:
        """Give the report as JSON's types:

        level, batch_norms, group_norms, layer_norms, unfused [{node, half, reason, norm}],
        passes [{name, changed, refused, seconds}], nodes, removed [{index, node, kept_affine}],
        sampled [{node, spec, ratio, elements}], exchanged {moments, terms, moment_bytes, term_bytes}.
        """
        return {
            "level": self.level,
            "batch_norms": self.batch_norms,
            "group_norms": self.group_norms,
            "layer_norms": self.layer_norms,
            "unfused": [dataclasses.asdict(entry) for entry in self.unfused],
            "passes": [
                {
                    "name": entry.name,
                    "changed": entry.changed,
                    "refused": [dataclasses.asdict(refusal) for refusal in entry.refused],
                    "seconds": round(entry.seconds, 3),
                }
                for entry in self.passes
            ],
            "nodes": {"before": self.nodes_before, "after": self.nodes_after},
            "removed": [dataclasses.asdict(entry) for entry in self.removed],
            "sampled": [dataclasses.asdict(entry) for entry in self.sampled],
            "exchanged": dataclasses.asdict(self.exchanged),
        }


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """The rewritten model (a copy; the model that was given stays as it was) and the report."""

    model: ir.Model
    report: Report


def is_pool_first(level: str) -> bool:
    """Tell whether a level moves average poolings first where nothing else is asked for."""
    return level == "icf"


def passes_of(level: str, pool_first: bool) -> list[list[tuple[str, PassFactory]]]:
    """List the passes of a level, in stages: each stage runs until none of its passes finds anything more to do."""
    if level not in LEVELS:
        raise BnfuseError(f"there is no level '{level}'; the levels are {', '.join(LEVELS)}")
    rank = LEVELS.index(level)
    icf = rank >= LEVELS.index("icf")
    listed: list[tuple[str, PassFactory]] = []
    if pool_first:
        listed += [("pool-first", PoolFirst)]
    if rank >= LEVELS.index("mvf"):
        listed += [("canonical/rows", RowsAsMaps)]
    if rank >= LEVELS.index("rcf"):
        listed += [("canonical", Canonicalize), ("canonical/shuffle", ChannelShuffle)]
        listed += [("canonical/stacks", UnstackMaps)]
        listed += [("canonical/splits", MergeSplits), ("canonical/resample", ResizeAsResample)]
        listed += [("rcf", ReluConvFusion)]
    if rank >= LEVELS.index("bnff"):
        listed += [("bnff/drop-bias", DropBias)]
    if rank >= LEVELS.index("mvf"):
        listed += [("mvf", SplitBatchNorm)]
    if rank >= LEVELS.index("bnff"):
        listed += [("bnff/split-gradient", SplitBatchNormGrad), ("bnff/group-norm", SplitGroupNorm)]
        listed += _fusions("bnff", concats=not icf)
    across: list[tuple[str, PassFactory]] = [
        ("icf/sink", SinkForward),
        ("icf/concat-statistics", ConcatStatistics),
    ]
    across += [("icf/concat-gradient", ConcatGradient), *_fusions("icf", concats=True)]
    stages = [listed, across] if icf else [listed] if listed else []
    if rank >= LEVELS.index("bnff"):  # what is left then has no better place
        stages.append([(f"{level}/shared-mask", SharedMaskFusion), *_fusions(level, concats=True)])
        if icf:
            stages.append([("icf/part", PartReduction), *_fusions(level, concats=True)])
        last: list[tuple[str, PassFactory]] = [(f"{level}/relu-out", ReluOut), (f"{level}/sum-and-mask", SumIntoMask)]
        last.append((f"{level}/sum-in", SumIn))
        stages.append([*last, *_fusions(level, concats=True)])
        stages.append([(f"{level}/gate-sums", GateSumsFusion)])
        stages.append([(f"{level}/image-sums", ImageSumsFusion)])
    return stages


def _fusions(level: str, *, concats: bool) -> list[tuple[str, PassFactory]]:
    """List the passes inside a layer; after a Concat has been crossed they find new work.

    What is scaled can no longer sink through a Concat, so below icf the scale moves at once, and there afterwards.
    """
    return [
        (f"{level}/layer-scale", LayerScaleFusion),
        (f"{level}/gate", GateFusion),
        (f"{level}/difference", DifferenceAsSum),
        (f"{level}/map", PointwiseFusion),
        (f"{level}/long-sum", LongSumFusion),
        (f"{level}/gradient-sum", lambda: GradientSumFusion(concats=concats)),
        *([(f"{level}/sink-gradient", SinkBackward)] if level == "icf" else []),
        (f"{level}/mask", MaskFusion),
        *([(f"{level}/scale", ScaleFusion)] if concats else []),
        (f"{level}/statistics", StatisticsFusion),
        (f"{level}/gradient-input", BatchNormGradFusion),
    ]


@young_garbage()
def rewrite(
    model: ir.Model,
    *,
    level: str = "icf",
    pool_first: bool | None = None,
    remove: Selection | None = None,
    keep_affine: bool = False,
    decay: float | None = None,
    sample: str | SamplePlan | None = None,
    local_bn: int | None = None,
    sync: bool = False,
    sync_ranks: int | None = None,
    signature: GraphSignature | None = None,
) -> Rewritten:
    """Run a level's passes on a copy of a training graph.

    `pool_first` defaults to on at level icf and off below it. `remove` lists BatchNorms to take out first
    (passes/removal/placements.py), `keep_affine` leaves their affine part. `decay` is the weight of a batch in every
    running statistic. `sample` says what the statistics are taken from (passes/sampling/spec.py); with `local_bn` each
    group of so many samples has its own. With `sync` statistics are those of all ranks of a data-parallel run
    (passes/sampling/sync.py), or of its first `sync_ranks`; a graph that has such exchanges keeps them. `signature` is
    the model's, where its metadata does not state it. Raises BnfuseError for an unknown level, and for a list or a spec
    that is wrong.
    """
    stages = passes_of(level, is_pool_first(level) if pool_first is None else pool_first)
    check_sync(sync, sync_ranks, local_bn)
    converted = convert(model, file_of(model) if FILE_KEY in model.meta else None)
    model = converted if converted is not model else model.clone()
    names, groups, pixels = batch_norms(model), group_norms(model), layer_norms(model)
    before = model.graph.num_nodes()
    kept = ranks_of(model.graph)
    taken = without_exchanges(model.graph)
    reports: list[PassReport] = []
    if decay is not None:
        reports.append(run_pass(model, "decay", functools.partial(SetDecay, decay), reports))
    removed = remove_batch_norms(model, remove, keep_affine, signature, reports)
    sampled = sample_batch_norms(model, sample, local_bn, level, names, signature, reports)
    for stage in stages:
        for again in range(ROUNDS):
            done = [run_pass(model, name, factory, reports) for name, factory in stage]
            changed = any(report.changed for report in done)
            if changed or not again:
                reports += done
            if not changed:
                break
    refused = [refusal for report in reports for refusal in report.refused]
    if reports:
        finish(model)
    # what kept a half from crossing a Concat says more than what the passes inside a layer say of it afterwards
    refused += [
        refusal
        for report in reports
        if report.name.startswith(("icf/concat", "icf/sink"))
        for refusal in report.refused
    ]
    norms = dict.fromkeys(names, "BatchNorm") | dict.fromkeys(groups, "GroupNorm")
    norms |= dict.fromkeys(pixels, "LayerNorm")
    unfused = find_unfused(model, norms, refused, level)
    if sync or kept is not None:
        exchange(model, (sync_ranks or 0) if sync else kept or 0, taken, reports)
    report = Report(
        level,
        len(names),
        unfused,
        tuple(reports),
        before,
        model.graph.num_nodes(),
        removed,
        sampled,
        len(groups),
        len(pixels),
        exchanged(model.graph),
    )
    return Rewritten(model, report)


def check_sync(sync: bool, ranks: int | None, local_bn: int | None) -> None:
    """Raise BnfuseError for options about ranks that do not go together."""
    if ranks is not None and not sync:
        raise BnfuseError("sync-ranks says which ranks statistics are of: give sync too")
    if ranks is not None and ranks < 1:
        raise BnfuseError(f"sync-ranks {ranks}: statistics are of at least one rank: take 1 or more")
    if sync and local_bn is not None:
        raise BnfuseError("sync takes statistics over all ranks, local-bn over groups of one's samples: leave one out")


def exchange(model: ir.Model, ranks: int, taken: int, reports: list[PassReport]) -> None:
    """Insert the exchanges between ranks behind all other passes; BatchNorms that are whole are split first.

    `taken` is how many there were before; a report that says the same would say that something changed.
    """
    splitting: list[tuple[str, PassFactory]] = [
        ("sync/rows", RowsAsMaps),
        ("sync/split", SplitBatchNorm),
        ("sync/split-gradient", SplitBatchNormGrad),
    ]
    if any(is_batch_norm(node) or is_batch_norm_grad(node) for node in model.graph):
        reports += [run_pass(model, name, factory, reports) for name, factory in splitting]
        sort(model.graph)
    done = run_pass(model, "sync", lambda: Sync(ranks), reports)
    reports.append(dataclasses.replace(done, changed=done.changed if done.changed != taken else 0))
    finish(model)


def remove_batch_norms(
    model: ir.Model,
    which: Selection | None,
    keep_affine: bool,
    signature: GraphSignature | None,
    reports: list[PassReport],
) -> tuple[Removed, ...]:
    """Take out the BatchNorms that `which` lists, none for None; appends to `reports` and gives who left."""
    if which is None:
        if keep_affine:
            raise BnfuseError("keep-affine is about removed BatchNorms: say with remove which they are")
        return ()
    chosen = select(model, which)
    names = {norm.node for norm in chosen}
    make = functools.partial(RemoveBatchNorm, names, signature or signature_of(model), keep_affine=keep_affine)
    reports.append(run_pass(model, "remove", make, reports))
    return tuple(Removed(norm.index, norm.node, keep_affine) for norm in chosen)


def sample_batch_norms(
    model: ir.Model,
    spec: str | SamplePlan | None,
    local_bn: int | None,
    level: str,
    names: tuple[str, ...],
    signature: GraphSignature | None,
    reports: list[PassReport],
) -> tuple[Sampled, ...]:
    """Sample before the level's passes; a bias that BNs take out leaves first, where the level drops it.

    Appends to `reports`, and says of each BatchNorm what its statistics are taken from now.
    """
    if spec is None and local_bn is None:
        return ()
    if not names:
        raise BnfuseError("there is no BatchNorm whose statistics to sample. Rewrite what `bnfuse build` wrote")
    plan = spec if isinstance(spec, SamplePlan) else parse_plan("bn" if spec is None else spec)
    plan.check_names(names)
    if not batch_norms(model):
        raise BnfuseError("every BatchNorm is removed, so none is left to sample: leave one of the two out")
    signature = signature_of(model) if ROLES_KEY in model.metadata_props else signature or signature_of(model)
    groups = 1
    if local_bn is not None:
        check_local(plan, local_bn, batch_of(model, signature))
        groups = batch_of(model, signature) // local_bn
    if plan.virtual:
        adder = AddVirtual(plan.virtual, signature, groups=groups)
        reports.append(run_pass(model, "virtual", lambda: adder, reports))
        signature = adder.signature
    makers: dict[str, Sample | BaselineStatistics | LocalBatchNorm]
    if local_bn is not None:
        makers = {"local": LocalBatchNorm(plan, Group(plan.virtual, local_bn))}
    else:
        makers = {"sample": Sample(plan, signature, virtual=plan.virtual), "baseline": BaselineStatistics(plan)}
    if LEVELS.index(level) >= LEVELS.index("bnff"):
        reports.append(run_pass(model, "bnff/drop-bias", DropBias, reports))
    for name, maker in makers.items():
        reports.append(run_pass(model, name, lambda maker=maker: maker, reports))  # type: ignore[misc]
    return tuple(entry for maker in makers.values() for entry in maker.sampled)


def run_pass(model: ir.Model, name: str, factory: PassFactory, before: list[PassReport]) -> PassReport:
    """Run one pass and time it in seconds. Raises BnfuseError that names the pass and those that ran before it."""
    start = time.perf_counter()
    try:
        result = factory()(model)
    except BnfuseError:
        raise
    except Exception as error:
        done = ", ".join(report.name for report in before) or "none"
        raise BnfuseError(f"pass {name} failed ({error}); passes that ran before it: {done}") from error
    assert isinstance(result, FusionResult)
    return PassReport(name, len(result.fused), result.refused, time.perf_counter() - start)


def finish(model: ir.Model) -> None:
    """Leave a valid model: nodes in an order that runs, no constants that nothing reads, and a function for every
    operator in use."""
    sort(model.graph)
    for value in [v for v in model.graph.initializers.values() if is_unused(v) and not v.is_graph_input()]:
        del model.graph.initializers[str(value.name)]
    add_functions(model)
