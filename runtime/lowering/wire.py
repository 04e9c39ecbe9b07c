"""Gradients on their way between ranks in half of their bits.

    SUM g        ->      n = bfloat16(g)
                         SUM n
                         g = float32(n)

Both ways are a sweep, at the place of the exchange. bfloat16 keeps 8 bits: each rank's gradient is off by at most 2^-8
of itself, and each sum on the way, of which there are ranks - 1 at most, by 2^-8 of what it is. Parameters, moments and
the update itself stay float32. Running statistics, the loss and the sums of SyncBN go as they are.
"""

from __future__ import annotations

import dataclasses

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.kernel import MapType
from bnfuse.runtime.lowering.layout import MapRef
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.program import program as p

HALF = "bfloat16"
ROW = 16  # elements: those of an alignment, which all regions are multiples of
HALVED = (p.GRADIENTS, p.ACCUMULATED)


def require_wire(low: Lowering) -> None:
    """Refuse half of the bits where no kernel makes them."""
    if low.ranks.wire == "bf16" and low.ranks.size > 1 and low.target.backend != "cuda":
        raise BnfuseError("wire='bf16' is for ranks on GPUs: between CPUs gradients go as float32, leave it out")


def halve_gradients(low: Lowering) -> None:
    """Let gradients be exchanged as bfloat16, where the ranks want that. Wants the launches in their order."""
    if low.ranks.wire != "bf16" or low.ranks.size == 1:
        return
    launches, low.launches = low.launches, []
    for launch in launches:
        if launch.kernel == p.SUM and all(low.storages[b.storage].region in HALVED for b in launch.buffers):
            halve(low, launch)
        else:
            low.launches.append(launch)


def halve(low: Lowering, launch: p.Launch) -> None:
    """Add an exchange of gradients, from and to what is float32."""
    low.phase, low.node = launch.phase, launch.node
    pairs = [in_both_types(low, buffer.storage) for buffer in launch.buffers]
    for wide, narrow in pairs:
        low.launch(registry.COPY_MAP, (wide.type, narrow.type, low.target), {"x": wide, "y": narrow})
    low.exchange(p.SUM, [narrow.storage for _, narrow in pairs])
    for wide, narrow in pairs:
        low.launch(registry.COPY_MAP, (narrow.type, wide.type, low.target), {"x": narrow, "y": wide})


def in_both_types(low: Lowering, storage: int) -> tuple[MapRef, MapRef]:
    """Give gradients, with what aligns them, as rows of a map, and the memory for them in half of the bits.

    It has a region of its own: memory of the arena would be used again by launches, which would wait for the exchange.
    """
    held = low.storages[storage]
    rows = -(-held.elements // ROW)
    wide = low.storage(rows * ROW, region=held.region, offset=held.offset)
    kind = MapType(1, 1, rows, ROW, ROW, align=8)
    narrow = low.storage(rows * ROW, HALF, p.WIRE)
    return MapRef(wide, 0, kind), MapRef(narrow, 0, dataclasses.replace(kind, dtype=HALF))
