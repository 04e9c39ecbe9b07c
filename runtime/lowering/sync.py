"""Lowering of exchanges between ranks (RANK_OPS of bnfuse/opset/plain.py): what is per channel around p.GATHER, p.SUM.

    mean, variance  ->  GATHER [ranks, C]  ->  their combination, the same on all ranks
    terms           ->  each divided by the number of ranks  ->  SUM

    mean, variance  ->  their combination        where GPUs reach each other's memory: the kernel exchanges them itself,
    terms           ->  their mean               as one of those that are done per channel (kernels/cuda/mapped.py)

Statistics are gathered and not summed: a variance made of raw sums would cancel where a mean is large. Terms of
gradients are sums already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.coefficients import box_words
from bnfuse.runtime.kernels.common.generic import GenericProblem
from bnfuse.runtime.lowering.norm import coefficients
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.vectors import new_vectors, vector_range
from bnfuse.runtime.program import program as p

Values = Mapping[str, ir.Value]
Attributes = Mapping[str, Any]


def all_reduce_moments(low: Lowering, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower AllReduceMoments: mean and variance of all ranks, [C] each."""
    (channels,) = low.shape(operands["mean"])
    own = {name: low.dense(value) for name, value in operands.items()}
    refs: dict[str, Ref] = {**own, **new_vectors(low, results, channels)}
    if is_mapped(low, attributes):
        boxed = boxes(low, len(own), channels)
        coefficients(low, "all_moments", (channels, low.ranks.size, low.ranks.size, True), {**refs, **boxed})
        return
    if low.ranks.size > 1:
        gathered = {name: low.storage(channels * low.ranks.size) for name in own}
        low.exchange(p.GATHER, [storage for name in own for storage in (own[name], gathered[name])])
        refs |= gathered
    coefficients(low, "all_moments", (channels, low.ranks.size, counted(low, attributes)), refs)


def all_reduce_terms(low: Lowering, operands: Values, results: Values, attributes: Attributes) -> None:
    """Lower AllReduceTerms: the mean over the ranks of channels [start, stop) of both terms."""
    start, stop = int(attributes["start"]), int(attributes["stop"])
    (length,) = low.shape(operands["beta_term"])
    if not 0 <= start < stop <= length:
        raise BnfuseError(f"node '{low.node}' exchanges channels {start} to {stop} of {length}: rewrite the graph anew")
    ranks = counted(low, attributes)
    made = {name: low.new_dense(value, (stop - start,)) for name, value in results.items()}
    read: dict[str, Ref] = {name: vector_range(low, value, start) for name, value in operands.items()}
    if is_mapped(low, attributes):
        boxed = boxes(low, len(read), stop - start)
        coefficients(low, "all_terms", (stop - start, length, ranks, True), {**read, **made, **boxed})
        return
    summed = made if ranks == low.ranks.size else {name: low.storage(stop - start) for name in made}
    coefficients(low, "all_terms", (stop - start, length, ranks), {**read, **summed})
    if low.ranks.size > 1:
        low.exchange(p.SUM, summed.values())
    if summed is not made:
        for name, storage in summed.items():
            where_counted(low, ranks, storage, made[name])


def is_mapped(low: Lowering, attributes: Attributes) -> bool:
    """Tell whether kernels exchange by themselves: what is of some ranks alone goes as everywhere."""
    return low.ranks.mapped and low.ranks.size > 1 and counted(low, attributes) == low.ranks.size


def boxes(low: Lowering, sent: int, channels: int) -> dict[str, int]:
    """Make the boxes of an exchange by a kernel, at the same place for each rank; and the header before them all."""
    if p.MAPPED not in low.regions:
        for region in (p.MAPPED, *map(p.mapped_of, range(low.ranks.size))):
            header = low.storage(p.HEADER, "uint64", region)
            low.header = header if region == p.MAPPED else low.header
    assert low.header is not None
    words = box_words(low.ranks.size, sent, channels)
    outboxes = {f"outbox{rank}": low.storage(words, "uint64", p.mapped_of(rank)) for rank in range(low.ranks.size)}
    return {"header": low.header, "inbox": low.storage(words, "uint64", p.MAPPED), **outboxes}


def where_counted(low: Lowering, ranks: int, source: int, target: int) -> None:
    """Copy a vector on the first `ranks` ranks; on the others, whose samples have no part in statistics, write zeros.

    Which rank this is, the session says: all ranks have the same program.
    """
    if low.counts is None:
        low.counts, low.counted_ranks = low.constant_storage(np.zeros(1, np.float32)), ranks
    if low.counted_ranks != ranks:
        raise BnfuseError(
            f"node '{low.node}' exchanges with {ranks} ranks, others with {low.counted_ranks}: rewrite anew"
        )
    shape = (low.storages[source].elements,)
    problem = GenericProblem("Mul", ((shape, "float32"), ((1,), "float32")), ((shape, "float32"),))
    low.launch(registry.GENERIC, (problem, low.target), {"in0": source, "in1": low.counts, "out0": target})


def counted(low: Lowering, attributes: Attributes) -> int:
    """Give of how many ranks the statistics are. Raises BnfuseError where there are not so many."""
    ranks = int(attributes.get("ranks", 0))
    if ranks < 0:
        raise BnfuseError(f"node '{low.node}' takes the statistics of {ranks} ranks: rewrite the source graph anew")
    if ranks > low.ranks.size > 1:
        raise BnfuseError(
            f"node '{low.node}' takes the statistics of {ranks} ranks, and {low.ranks.size} run the step: start as "
            "many, or rewrite with --sync-ranks"
        )
    return min(ranks, low.ranks.size) or low.ranks.size
