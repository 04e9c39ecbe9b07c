"""Per-channel launches done together: what computes a BatchNorm's coefficients waits until something reads them.

    conv1  finalize1  conv2  finalize2  concat-reader     ->     conv1  conv2  finalize1+finalize2  concat-reader

A launch over C channels takes less time than its call, and one call serves a group of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from bnfuse.runtime.kernels.registry import COEFFICIENTS
from bnfuse.runtime.kernels.request import Request
from bnfuse.runtime.lowering.early import depends
from bnfuse.runtime.lowering.messages import group_exchanges
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.program import program as p

MOST = 8  # launches in a group: each combination of operators is a kernel of its own


def group_coefficients(low: Lowering) -> None:
    """Group the launches of a lowering, and forget the kernels that none is left of."""
    launches: list[p.Launch] = []
    for phase in p.ALL_PHASES:
        of_phase = [launch for launch in low.launches if launch.phase == phase]
        if any(launch.exchanges for launch in of_phase):
            launches += group_exchanges(low, of_phase, lambda waiting: _by_most(low, waiting))
        else:
            launches += _grouped(low, of_phase)
    used = sorted({launch.kernel for launch in launches if not launch.exchanges})
    places = {kernel: index for index, kernel in enumerate(used)} | {kernel: kernel for kernel in p.EXCHANGES}
    low.launches = [p.Launch(x.phase, places[x.kernel], x.node, x.arguments) for x in launches]
    low.requests = [low.requests[index] for index in used]
    low.kernels = {low.made[request].key: index for index, request in enumerate(low.requests)}


def _grouped(low: Lowering, launches: Sequence[p.Launch]) -> list[p.Launch]:
    bases = {part: base for part, (base, _) in low.parts.items()}
    done: list[p.Launch] = []
    waiting: list[p.Launch] = []

    def flush() -> None:
        done.extend(_by_most(low, waiting))
        waiting.clear()

    for launch in launches:
        request = low.request_of(launch)
        if request is not None and request.kind == COEFFICIENTS:
            waiting.append(launch)
            continue
        if any(depends(launch, earlier, bases) for earlier in waiting):
            flush()
        done.append(launch)
    flush()
    return done


def _by_most(low: Lowering, launches: Sequence[p.Launch]) -> list[p.Launch]:
    return [_together(low, launches[start : start + MOST]) for start in range(0, len(launches), MOST)]


def _together(low: Lowering, launches: Sequence[p.Launch]) -> p.Launch:
    if len(launches) == 1:
        return launches[0]
    members = tuple(member for launch in launches for member in low.requests[launch.kernel].arguments[0])
    kernel = low.kernel(Request(COEFFICIENTS, (members, low.target)))
    buffers = [b for launch in launches for b in launch.buffers]
    offsets = [a for launch in launches for a in launch.arguments if isinstance(a, int)]
    node = f"{launches[0].node} and {len(launches) - 1} more"
    return p.Launch(launches[0].phase, low.kernels[kernel.key], node, (*buffers, *offsets))
