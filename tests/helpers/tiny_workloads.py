"""Workloads of a few layers, written by names: `workload({"a": 4}, [step("first", 10, reads="a")])`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from bnfuse.estimating.hardware import Hardware
from bnfuse.estimating.workload import Access, Layer, Tensor, Workload


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    flops: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    type: str = "Other"
    sweeps: int = 1


def step(name: str, flops: int, reads: str = "", writes: str = "", type: str = "Other", sweeps: int = 1) -> Step:
    return Step(name, flops, tuple(reads.split()), tuple(writes.split()), type, sweeps)


def workload(
    sizes: Mapping[str, int], steps: Sequence[Step], *, kept: str = "", weights: str = "", name: str = "tiny"
) -> Workload:
    """A tensor that is read before anything writes it is given."""
    index = {tensor: number for number, tensor in enumerate(sizes)}
    given, written = set(), set()
    for one in steps:
        given.update(set(one.reads) - written)
        written.update(one.writes)

    def accesses(names: Sequence[str], sweeps: int) -> tuple[Access, ...]:
        return tuple(Access(index[n], sizes[n], sweeps) for n in names)

    tensors = tuple(
        Tensor(n, size, "weight" if n in weights.split() else "map", n in given, n in kept.split())
        for n, size in sizes.items()
    )
    layers = tuple(
        Layer(s.name, s.type, "forward", s.flops, accesses(s.reads, s.sweeps), accesses(s.writes, 1)) for s in steps
    )
    return Workload(name, 1, tensors, layers)


def machine(
    cache: int, *, flops: float = 1.0, bandwidth: float = 1.0, cache_bandwidth: float | None = None
) -> Hardware:
    """One operation and one byte a second, so that times can be added up in the head."""
    return Hardware("unit", "for tests", flops, bandwidth, cache, cache_bandwidth)
