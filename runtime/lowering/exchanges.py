"""What several ranks exchange in a step that each runs on its part of the batch.

    forward    running statistics -> theirs/ranks, loss -> loss/ranks         summed in one message
    backward   gradients in buckets, each when backward is done with it       summed; the update divides them
    update     gradients added up over several steps                          summed, in the place of each step's

A bucket is one range of memory: where there are ranks, parameters lie in the order in which their gradients are
finished (`by_gradient`), from the last layer to the first. What is exchanged is a mean over the ranks, and so it is of
the whole batch, whose parts are equally large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.signature import GraphSignature
from bnfuse.opset.traffic import RESHAPES
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.generic import GenericProblem
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.pieces import meet

FLOAT = np.dtype(np.float32).itemsize


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together: their names, the last launch that touches one of them (its place among all
    launches), and the ranges of elements in their region."""

    names: tuple[str, ...]
    after: int
    ranges: tuple[tuple[int, int], ...]


# -- where parameters lie -------------------------------------------------------------------------------------------


def by_gradient(nodes: Sequence[ir.Node], graph: ir.Graph, signature: GraphSignature) -> list[str]:
    """Order the trainable parameters by the last nodes that make or read their gradients; those without one are the
    last."""
    order = {node: index for index, node in enumerate(nodes)}
    outputs = {value.name: value for value in graph.outputs}

    def finished(name: str) -> int:
        value: ir.Value | None = outputs.get(signature.gradients.get(name))
        last = len(order) if value is None else -1
        while value is not None:
            node = value.producer()
            touching = [node, *(use.node for use in value.uses())]
            last = max([last, *(order.get(each, -1) for each in touching if each is not None)])
            renamed = node is not None and node.op_type in RESHAPES and not node.domain
            value = node.inputs[0] if node is not None and renamed else None
        return last

    return sorted(signature.trainable, key=finished)


# -- means over the ranks: running statistics, the loss ---------------------------------------------------------------


def mean_results(low: Lowering) -> None:
    """Make new running statistics and the loss means over the ranks, at the end of the forward phase. Wants to be
    called when launches are in their order.

    What the graph computes of running statistics goes to a region of its own, in which backward reads it, if it does.
    """
    if low.ranks.size == 1:
        return
    before, low.launches = low.launches, []
    low.phase, low.node = "forward", "means over the ranks"
    factor = low.constant_storage(np.full(1, 1 / low.ranks.size, np.float32))
    summed = []
    for start, stop in own_running(low):
        own = low.storage(stop - start, region=p.OWN_RUNNING, offset=start * FLOAT)
        mean = low.storage(stop - start, region=p.NEW_RUNNING, offset=start * FLOAT)
        times(low, own, factor, mean)
        summed.append(mean)
    loss = next((value for value in low.graph.outputs if value.name == low.signature.loss), None)
    if loss is not None:
        low.mean_loss = low.storage(1, region=p.OUTPUTS)
        times(low, low.destinations[loss], factor, low.mean_loss)
        summed.append(low.mean_loss)
    if summed:
        low.exchange(p.SUM, summed)
    low.launches = [
        *(x for x in before if x.phase == "forward"),
        *low.launches,
        *(x for x in before if x.phase != "forward"),
    ]


def own_running(low: Lowering) -> list[tuple[int, int]]:
    """Move what the graph computes of running statistics to their own region; tells which elements it has there.

    Where the session takes them from lie their means.
    """
    names = set(low.signature.running.values())
    outputs = [value for value in low.graph.outputs if value.name in names]
    held = [low.destinations[value] for value in outputs]
    for value, index in zip(outputs, held, strict=True):
        storage = low.storages[index]
        low.storages[index] = dataclasses.replace(storage, region=p.OWN_RUNNING)
        low.destinations[value] = low.storage(storage.elements, storage.dtype, p.NEW_RUNNING, storage.offset)
    if held:
        low.regions[p.OWN_RUNNING] = low.regions[p.NEW_RUNNING]
    return joined((low.storages[i].offset // FLOAT, low.storages[i].elements) for i in held)


def times(low: Lowering, source: int, factor: int, target: int) -> None:
    """Multiply the elements of a storage by the one of another."""
    shape = (low.storages[source].elements,)
    problem = GenericProblem("Mul", ((shape, "float32"), ((1,), "float32")), ((shape, "float32"),))
    low.launch(registry.GENERIC, (problem, low.target), {"in0": source, "in1": factor, "out0": target})


# -- gradients ------------------------------------------------------------------------------------------------------


def exchange_gradients(low: Lowering) -> None:
    """Add the exchanges of gradients. Wants to be called when launches are in their order, before memory is planned."""
    if low.ranks.size == 1 or not low.signature.gradients:
        return
    if p.ACCUMULATED in low.regions:
        exchange_accumulated(low)
        return
    for number, bucket in enumerate(buckets(low)):
        storages = [
            low.storage(stop - start, region=p.GRADIENTS, offset=start * FLOAT) for start, stop in bucket.ranges
        ]
        buffers = tuple(p.Buffer(storage, "inout") for storage in storages)
        exchange = p.Launch("backward", p.SUM, node_of(number, bucket.names), buffers)
        low.launches.insert(bucket.after + 1 + number, exchange)  # behind those of former buckets
    scale_constants(low)


def exchange_accumulated(low: Lowering) -> None:
    """Sum what steps have added up, in front of the update: in pieces, so that a message is no copy of all of it."""
    elements = low.regions[p.ACCUMULATED] // FLOAT
    step = max(low.ranks.bucket // FLOAT // 16 * 16, 16)
    place = next(index for index, launch in enumerate(low.launches) if launch.phase == "update")
    starts = range(0, elements, step)
    for number, start in enumerate(starts):
        storage = low.storage(min(step, elements - start), region=p.ACCUMULATED, offset=start * FLOAT)
        node = f"gradients {number + 1} of {len(starts)}"
        low.launches.insert(place + number, p.Launch("update", p.SUM, node, (p.Buffer(storage, "inout"),)))


def node_of(number: int, names: Sequence[str]) -> str:
    """Name an exchange by what is in it."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"gradients {number + 1}: {names[0]}{more}"


def buckets(low: Lowering) -> list[Bucket]:
    """Put gradients together in the order in which backward is done with them, until a bucket is full."""
    finished = finishing(low)
    order = sorted(finished, key=lambda name: (finished[name][0], finished[name][1].offset))
    found: list[Bucket] = []
    names: list[str] = []
    size = 0
    for index, name in enumerate(order):
        names.append(name)
        size += finished[name][1].bytes
        if size >= low.ranks.bucket or index + 1 == len(order):
            held = [finished[one][1] for one in names]
            ranges = joined((storage.offset // FLOAT, storage.elements) for storage in held)
            found.append(Bucket(tuple(names), finished[name][0], tuple(ranges)))
            names, size = [], 0
    return found


def finishing(low: Lowering) -> dict[str, tuple[int, p.Storage]]:
    """Find for each gradient the last launch of backward that touches it (its place among all), and where it lies.

    A BatchNorm's gradients are sums that the layer before it reads: they are this rank's own until then. A gradient
    that no launch writes is a constant, and not exchanged.
    """
    touched: list[tuple[int, p.Storage, bool]] = []
    for index, launch in enumerate(low.launches):
        for buffer in launch.buffers:
            storage = low.storages[buffer.storage]
            if launch.phase == "backward" and storage.region == p.GRADIENTS:
                touched.append((index, storage, buffer.access != "in"))
    found = {}
    for name, index in gradient_storages(low).items():
        held = low.storages[index]
        places = [(place, writes) for place, storage, writes in touched if meet(storage, held)]
        if held.elements and any(writes for _, writes in places):
            found[name] = max(place for place, _ in places), held
    return found


def gradient_storages(low: Lowering) -> dict[str, int]:
    """Give the storages of gradients by their parameters."""
    outputs = {value.name: value for value in low.graph.outputs}
    pairs = low.signature.gradients.items()
    return {name: low.destinations[outputs[output]] for name, output in pairs if output in outputs}


def scale_constants(low: Lowering) -> None:
    """Make a gradient that is a constant what its sum over the ranks would be."""
    for index in gradient_storages(low).values():
        if index in low.initial:
            low.initial[index] = low.initial[index] * np.asarray(low.ranks.size, low.initial[index].dtype)


def joined(held: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join runs of elements, (start, elements), where nothing but alignment lies between them: (start, stop)."""
    found: list[tuple[int, int]] = []
    for start, elements in sorted(set(held)):
        if found and start <= p.aligned(found[-1][1] * FLOAT) // FLOAT:
            found[-1] = found[-1][0], max(found[-1][1], start + elements)
        else:
            found.append((start, start + elements))
    return found


def require_loss(low: Lowering) -> None:
    """Refuse a graph without a loss: a framework that calls it has its own way to average gradients."""
    if low.ranks.size > 1 and low.signature.output_gradients:
        raise BnfuseError(
            "a graph without a loss is not trained by several ranks: give it one, or let torch's "
            "DistributedDataParallel average its gradients"
        )
