"""How BatchNorms share the GPU tiles of a pipeline: from loads, in seconds of one tile, to what each takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Shared = tuple[list[float], list[float]]  # tiles and seconds of each load
STEPS = 40  # of halving the range in which the least longest time lies


def own(loads: Sequence[float], tiles: int) -> Shared:
    """Give each load a tile of its own, and each further one to what takes longest; where tiles are too few, put
    several on one."""
    if len(loads) > tiles:
        return _packed(loads, tiles)
    dealt = [1] * len(loads)
    for _ in range(tiles - len(loads) if loads else 0):
        slowest = max(range(len(loads)), key=lambda i: loads[i] / dealt[i])
        dealt[slowest] += 1
    return [float(n) for n in dealt], [load / n for load, n in zip(loads, dealt, strict=True)]


def _packed(loads: Sequence[float], tiles: int) -> Shared:
    """Put the largest load first, each onto the tile that has the least."""
    totals, where = [0.0] * tiles, [0] * len(loads)
    for index in sorted(range(len(loads)), key=lambda i: -loads[i]):
        where[index] = min(range(tiles), key=lambda t: totals[t])
        totals[where[index]] += loads[index]
    times = [totals[tile] for tile in where]
    return [load / time for load, time in zip(loads, times, strict=True)], times


def balanced(loads: Sequence[float], tiles: int) -> Shared:
    """Give large loads whole tiles, and let small ones share: the least longest time that halving a range finds."""
    if not loads:
        return [], []
    low, high = sum(loads) / tiles, sum(loads)
    best = _within(loads, tiles, high)
    for _ in range(STEPS):
        middle = (low + high) / 2
        found = _within(loads, tiles, middle)
        if found is None:
            low = middle
        else:
            best, high = found, max(found[1])
    assert best is not None  # the sum fits on one tile
    return best


def _within(loads: Sequence[float], tiles: int, longest: float) -> Shared | None:
    """First fit, the largest first; None where the tiles are too few for that time."""
    limit = longest * (1 + 1e-9)
    shares, times = [0.0] * len(loads), [0.0] * len(loads)
    shared: list[list[int]] = []
    left = tiles
    for index in sorted(range(len(loads)), key=lambda i: -loads[i]):
        load = loads[index]
        if load > limit:
            count = math.ceil(load / limit)
            left -= count
            shares[index], times[index] = float(count), load / count
            continue
        tile = next((tile for tile in shared if sum(loads[i] for i in tile) + load <= limit), None)
        if tile is None:
            left -= 1
            shared.append([index])
        else:
            tile.append(index)
    for tile in shared:
        total = sum(loads[i] for i in tile)
        for index in tile:
            shares[index], times[index] = loads[index] / total, total
    return (shares, times) if left >= 0 else None


def in_turns(loads: Sequence[float], tiles: int) -> Shared:
    """Give every load all tiles for its part of the time."""
    total = sum(loads)
    return [tiles * load / total for load in loads], [total / tiles] * len(loads)


SHARING: dict[str, Callable[[Sequence[float], int], Shared]] = {"own": own, "balanced": balanced, "time": in_turns}
