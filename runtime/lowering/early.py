"""Gradients as early as they can be: a launch that gives nothing but gradients moves up to behind what it needs.

    dlogits  conv1 ... conv53  sum(dlogits) -> db     ->     dlogits  sum(dlogits) -> db  conv1 ... conv53

The file has the sum of a classifier's bias last. Whoever sends gradients on while others are computed
(program/pieces.py) waits for all that is sent together, and what the sum reads would be kept until the end.
"""

from __future__ import annotations

from collections.abc import Mapping

from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.program import program as p


def gradients_early(low: Lowering) -> None:
    """Move such launches of the backward phase. Wants to be called before memory is planned."""
    bases = {part: base for part, (base, _) in low.parts.items()}
    ordered: list[p.Launch] = []
    for launch in low.launches:
        place = len(ordered)
        if launch.phase == "backward" and gives_gradients_alone(low, launch):
            while place and ordered[place - 1].phase == "backward" and not depends(launch, ordered[place - 1], bases):
                place -= 1
        ordered.insert(place, launch)
    low.launches = ordered


def gives_gradients_alone(low: Lowering, launch: p.Launch) -> bool:
    """Tell whether all that a launch writes are gradients of parameters."""
    written = [low.storages[buffer.storage].region for buffer in launch.buffers if buffer.access != "in"]
    return bool(written) and all(region == p.GRADIENTS for region in written)


def depends(launch: p.Launch, earlier: p.Launch, bases: Mapping[int, int]) -> bool:
    """Tell whether two launches must keep their order: one writes what the other reads or writes."""

    def touched(of: p.Launch, written: bool) -> set[int]:
        return {bases.get(b.storage, b.storage) for b in of.buffers if not written or b.access != "in"}

    return bool(touched(earlier, True) & touched(launch, False) or touched(earlier, False) & touched(launch, True))
