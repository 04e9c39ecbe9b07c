"""What papers/004 leaves open about the machine, as named choices.

Choices about the passes of a network are `layerwise.Passes`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """How the software-managed cache, the memory bus and the arithmetic behave."""

    mac_operations: int = 1
    """Operations that a multiply-add of a dense layer takes of the peak rate."""

    prefetch: Literal["latency", "next", "none"] = "latency"
    """When a load is issued: so many layers ahead that their computing covers it, one layer ahead, or when needed."""

    look_ahead: bool = True
    """A tensor that will not stay until its next use leaves right after its use, not when its space is needed."""

    demand_first: bool = True
    """What a layer waits for overtakes the transfers that were issued before and that nothing waits for yet."""

    streams_overlap: bool = True
    """Tensors that pass through the cache row by row do so while their layer computes."""

    loads_overlap: bool = False
    """A layer computes on the part of its whole inputs that has come, instead of waiting for all of them."""

    leaving_holds_space: bool = True
    """The space of a tensor that is written out is free when the transfer is done, not when it is issued."""
