"""What is computed per channel of an operator's sums is done where these are joined, on a GPU.

    conv + merge of its statistics  ->  finalize  ->  reader     ->     conv + merge, finalize  ->  reader

Sums over a map's pixels come from many blocks, and a second stage of the kernel joins them, a thread a channel in the
end. What a BatchNorm makes of them is a formula for each channel, so this thread does that too: one node fewer on the
way from each convolution to the next. What reads other channels, as coefficients of a concatenation do, stays a launch
of its own (grouping.py); so does everything on a CPU, where a launch is a call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.coefficients import LOOPS, Loop
from bnfuse.runtime.kernels.common.tails import tail_name
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.kernels.request import Request
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.program import program as p

KINDS = (
    registry.CONV_FORWARD,
    registry.CONV_BACKWARD,
    registry.POINTWISE_FORWARD,
    registry.POINTWISE_BACKWARD,
    registry.POOL_FORWARD,
    registry.POOL_BACKWARD,
)
STATISTICS, SUMS = ("mean", "variance"), ("dbeta", "dgamma")
MOST = 6  # operators behind one: chosen by hand


def join_tails(low: Lowering) -> None:
    """Put operators per channel behind the operators whose sums they read, where the target's kernels do so."""
    if low.target.backend != "cuda":
        return
    launches: list[p.Launch] = []
    for launch in low.launches:
        request = low.request_of(launch)
        is_tail = request is not None and request.kind == registry.COEFFICIENTS
        place = _place(low, launches, launch) if is_tail else None
        if place is None:
            launches.append(launch)
        else:
            launches[place] = _with_tail(low, launches[place], launch)
    low.launches = launches


def _place(low: Lowering, before: list[p.Launch], launch: p.Launch) -> int | None:
    """Find the launch that `launch` can be done behind, by its number; None where there is none."""
    bases = {buffer.storage: low.parts.get(buffer.storage, (buffer.storage, 0))[0] for buffer in launch.buffers}
    read = {bases[b.storage] for b in launch.buffers if b.access == "in"}
    made = {bases[b.storage] for b in launch.buffers if b.access != "in"}
    for place in reversed(range(len(before))):
        earlier = before[place]
        touched = {low.parts.get(b.storage, (b.storage, 0))[0]: b for b in earlier.buffers}
        if earlier.phase != launch.phase or made & {*touched}:
            return None
        if any(low.parts.get(b.storage, (b.storage, 0))[0] in read for b in earlier.buffers if b.access != "in"):
            return place if _joins(low, earlier, launch, bases) else None
    return None


def _joins(low: Lowering, earlier: p.Launch, launch: p.Launch, bases: Mapping[int, int]) -> bool:
    """Tell whether all that a launch reads of an earlier one is of the same channel."""
    request = low.request_of(earlier)
    if request is None:
        return False
    problem, (member,) = request.arguments[0], low.requests[launch.kernel].arguments[0]
    if request.kind not in KINDS or not isinstance(problem, Problem) or len(problem.tail) == MOST:
        return False
    loop, result = _loop(member), dict(problem.maps).get("dx" if problem.spec.is_gradient else "y")
    if loop.rows or result is None or loop.channels != result.c:
        return False
    results = {
        buffer.storage
        for name, buffer in _buffers(low, earlier).items()
        if buffer.access == "out" and is_of_channel(name, problem)
    }
    written = {low.parts.get(b.storage, (b.storage, 0))[0] for b in earlier.buffers if b.access != "in"}
    offsets = _offsets(low, launch)
    for name, buffer in _buffers(low, launch).items():
        if buffer.access != "in" or bases[buffer.storage] not in written:
            continue
        is_part = name in loop.ranges and (offsets[name] != 0 or loop.ranges[name] != loop.channels)
        if buffer.storage not in results or is_part:
            return False
    return True


def is_of_channel(name: str, problem: Problem) -> bool:
    """Tell whether a result is one that the thread of its channel has made: a sum that is joined, or of the tail."""
    return name.startswith("tail") or name in STATISTICS or name.startswith(SUMS)


def _loop(member: tuple[str, tuple[object, ...]]) -> Loop:
    name, arguments = member
    return LOOPS[name](*arguments)


def _buffers(low: Lowering, launch: p.Launch) -> dict[str, p.Buffer]:
    """Give the buffers of a launch by the names of its kernel's parameters."""
    params = low.made[low.requests[launch.kernel]].params
    return dict(zip((param.name for param in params), launch.buffers, strict=True))


def _offsets(low: Lowering, launch: p.Launch) -> dict[str, p.Argument]:
    """Give the offsets of a launch's maps by the names of its kernel's parameters."""
    params = low.made[low.requests[launch.kernel]].params
    maps = [param.name for param in params if param.is_map]
    return dict(zip(maps, launch.arguments[len(launch.buffers) :], strict=True))


def _with_tail(low: Lowering, earlier: p.Launch, launch: p.Launch) -> p.Launch:
    """Make the launch of an operator with one more behind it."""
    kind, (problem, target, *_) = low.requests[earlier.kernel].kind, low.requests[earlier.kernel].arguments
    (member,) = low.requests[launch.kernel].arguments[0]
    number = len(problem.tail)
    kernel = low.kernel(Request(kind, (dataclasses.replace(problem, tail=(*problem.tail, member)), target)))
    buffers, offsets = _buffers(low, earlier), _offsets(low, earlier)
    buffers |= {tail_name(number, name): buffer for name, buffer in _buffers(low, launch).items()}
    offsets |= {tail_name(number, name): offset for name, offset in _offsets(low, launch).items()}
    arguments: list[p.Argument] = [buffers[param.name] for param in kernel.params]
    arguments += [offsets[param.name] for param in kernel.params if param.is_map]
    return p.Launch(earlier.phase, low.kernels[kernel.key], earlier.node, tuple(arguments))
