"""When loads are issued: latency-aware prefetching ([Tsai21], section 4.2.3 and listing 1).

A load for layer i is issued at layer i-k, k the least for which the computing of layers i-k to i-1 covers its transfer.
Where the cache has no room for it from there to layer i it is put off to the layer from which on it has.
"""

from __future__ import annotations

from typing import Literal

from bnfuse.estimating.cache import Load, Residency


def issued(
    cache: Residency,
    capacity: int,
    bandwidth: float,
    compute: list[float],
    how: Literal["latency", "next", "none"],
) -> dict[int, list[Load]]:
    """List, by layer, the loads that are issued at its beginning for later layers. Reserves their space in `cache`."""
    waiting: dict[int, list[Load]] = {}
    chosen: dict[int, list[Load]] = {}
    if how == "none":
        return chosen
    for loads in cache.loads:
        for load in loads:
            first = max(earliest(load, bandwidth, compute) if how == "latency" else load.layer - 1, load.after + 1)
            if 0 <= first < load.layer:
                waiting.setdefault(first, []).append(load)
    occupied = cache.occupied
    for index in range(len(compute)):
        for load in waiting.get(index, ()):
            room = capacity - load.bytes
            first = load.layer
            while first > index and occupied[first - 1] <= room:
                first -= 1
            if first == index:
                chosen.setdefault(index, []).append(load)
                for at in range(index, load.layer):
                    occupied[at] += load.bytes
            elif first < load.layer:
                waiting.setdefault(first, []).append(load)
    return chosen


def earliest(load: Load, bandwidth: float, compute: list[float]) -> int:
    """Find the layer at which a load is issued so that the computing from there on hides it; the first, where none is
    early enough."""
    missing = load.bytes / bandwidth
    first = load.layer
    while missing > 0 and first > 0:
        first -= 1
        missing -= compute[first]
    return first
