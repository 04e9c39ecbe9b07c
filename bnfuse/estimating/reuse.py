"""Where data is reused: each further access to a tensor, by where the access before it was ([Tsai21], section 3.3).

A reuse is an access that reads what an earlier layer read or wrote. Its scope:

    intra-layer         the same layer: sweeps after the first
    recurrent-weight    another time step of the same weights, or of their gradient
    forward-backward    the earlier access was in another pass
    adjacent-layer      the layer before, in the order of execution
    block-scale         a layer further back in the same pass
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from bnfuse.core.text import Section, csv_text, scaled
from bnfuse.estimating import cache
from bnfuse.estimating.quantities import cache_text
from bnfuse.estimating.workload import NEVER, Touch, Workload

INTRA, ADJACENT, BLOCK = "intra-layer", "adjacent-layer", "block-scale"
RECURRENT, FORWARD_BACKWARD = "recurrent-weight", "forward-backward"
SCOPES = (INTRA, ADJACENT, BLOCK, RECURRENT, FORWARD_BACKWARD)  # from near to far

UNBOUNDED = 1 << 62  # bytes of a cache that holds everything


def scope_of(workload: Workload, tensor: int, before: int, now: int) -> str:
    """Give the scope of layer `now`'s access to a tensor that layer `before` accessed last."""
    first, second = workload.layers[before], workload.layers[now]
    if first.phase != second.phase:
        return FORWARD_BACKWARD
    steps = (first.recurrence, second.recurrence)
    if workload.tensors[tensor].kind in ("weight", "weight_gradient") and None not in steps and steps[0] != steps[1]:
        return RECURRENT
    return ADJACENT if now == before + 1 else BLOCK


@dataclasses.dataclass(frozen=True)
class Captured:
    """Bytes that a cache keeps off the memory bus in one iteration, by scope.

    `saved_in` are reads of what is there. `saved_out` are writes that never reach memory: of values written over, or
    dead, before they had to leave; they count for the widest scope in which the value was read.
    """

    cache: int
    saved_in: dict[str, int]
    saved_out: dict[str, int]

    @property
    def saved(self) -> dict[str, int]:
        """Bytes that each scope saves, both ways."""
        return {scope: self.saved_in[scope] + self.saved_out[scope] for scope in SCOPES}


def captured(workload: Workload, capacity: int) -> Captured:
    """Tell what a cache of `capacity` bytes captures."""
    recorder = Recorder(workload, capacity)
    for index, touched in enumerate(workload.touches):
        recorder.run(index, touched)
    return Captured(capacity, recorder.saved_in, recorder.saved_out)


class Recorder(cache.Cache):
    """The cache of estimates, which notes every access that the memory bus does not see."""

    def __init__(self, workload: Workload, capacity: int) -> None:
        super().__init__(workload, capacity, look_ahead=True)
        self.workload = workload
        self.saved_in = dict.fromkeys(SCOPES, 0)
        self.saved_out = dict.fromkeys(SCOPES, 0)
        self.widest = [0] * len(workload.tensors)  # since the value was written: index of its widest scope

    def hold(self, index: int, touch: Touch) -> None:
        """Hold a tensor, and count what need not be loaded under its scope."""
        tensor = touch.tensor
        before, dirty = self.present[tensor], self.dirty[tensor]
        scope = scope_of(self.workload, tensor, self.last[tensor], index) if before else INTRA
        super().hold(index, touch)
        if touch.read and before:
            self.saved_in[scope] += min(touch.read, before)
            self.widest[tensor] = max(self.widest[tensor], SCOPES.index(scope))
        self.saved_in[INTRA] += touch.swept_in - touch.read
        self.saved_out[INTRA] += touch.swept_out - touch.written
        self.saved_out[scope] += dirty + touch.written - self.dirty[tensor]
        if touch.written:
            self.widest[tensor] = 0

    def stream(self, index: int, touch: Touch) -> None:
        """Stream a tensor, and count what need not be stored."""
        before = self.stream_out[index]
        super().stream(index, touch)
        self.saved_out[INTRA] += touch.swept_out - (self.stream_out[index] - before)  # nobody reads it
        self.widest[touch.tensor] = 0

    def release(self, index: int, touch: Touch) -> None:
        """Release a tensor, and count what need not be stored under its scope."""
        if touch.until == NEVER and not touch.kept:
            self.saved_out[SCOPES[self.widest[touch.tensor]]] += self.dirty[touch.tensor]
        super().release(index, touch)


@dataclasses.dataclass(frozen=True)
class Requirement:
    """The least cache that captures a whole scope, and the layer that needs it."""

    scope: str
    bytes: int
    layer: str


def requirements(workload: Workload) -> dict[str, Requirement]:
    """Give the cache that each scope needs by itself (section 3.3): the tensors of the layer that runs, and what waits.

    Adjacent-layer reuse needs the tensors of a layer. A wider scope needs besides, at each layer, every tensor that
    was touched before and is touched after it in that scope. Scopes without a reuse in this workload are left out.
    """
    touches = workload.touches
    own = [sum(touch.size for touch in touched) for touched in touches]
    waiting = {scope: [0] * (len(own) + 1) for scope in SCOPES}  # changes of the sum, from a layer on
    found = set()
    last: dict[int, int] = {}
    for now, touched in enumerate(touches):
        for touch in touched:
            before = last.get(touch.tensor)
            if before is not None and touch.read:
                scope = scope_of(workload, touch.tensor, before, now)
                found.add(scope)
                waiting[scope][before + 1] += touch.read
                waiting[scope][now] -= touch.read
            last[touch.tensor] = now
    return {scope: requirement(workload, scope, own, waiting[scope]) for scope in SCOPES if scope in found}


def requirement(workload: Workload, scope: str, own: list[int], changes: list[int]) -> Requirement:
    """Find the cache that a scope needs, and the layer that needs it."""
    most, where, waiting = -1, 0, 0
    for index, size in enumerate(own):
        waiting += changes[index]
        if size + waiting > most:
            most, where = size + waiting, index
    return Requirement(scope, most, workload.layers[where].name)


@dataclasses.dataclass(frozen=True)
class Reuse:
    """Bytes saved by scope over cache sizes. `possible` is what a cache that holds everything saves."""

    workload: str
    caches: tuple[Captured, ...]
    possible: Captured
    requirements: dict[str, Requirement]

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "workload": self.workload,
            "possible_bytes": self.possible.saved,
            "requirements": {name: dataclasses.asdict(found) for name, found in self.requirements.items()},
            "caches": [
                {"cache": found.cache, "saved_in_bytes": found.saved_in, "saved_out_bytes": found.saved_out}
                for found in self.caches
            ],
        }

    def to_csv(self) -> str:
        """Give a cache and scope a line."""
        rows = ((c.cache, scope, c.saved_in[scope], c.saved_out[scope]) for c in self.caches for scope in SCOPES)
        return csv_text(["cache", "scope", "saved_in_bytes", "saved_out_bytes"], rows)

    def sections(self) -> list[Section]:
        """Show the scopes: what each could save, what cache it needs, and what caches save."""
        columns = ("scope", "possible", "cache for all of it", *(cache_text(c.cache) for c in self.caches))
        rows = []
        for scope in SCOPES:
            possible = self.possible.saved[scope]
            if not possible:
                continue
            need = self.requirements.get(scope)
            shares = [f"{100 * found.saved[scope] / possible:.0f} %" for found in self.caches]
            rows.append((scope, scaled(possible, "B"), cache_text(need.bytes) if need else "-", *shares))
        return [Section.table(f"{self.workload}: bytes kept off the memory bus, by scope of reuse", columns, rows)]


def reuse(workload: Workload, capacities: Iterable[int]) -> Reuse:
    """Tell what caches of these capacities capture, and what each scope needs."""
    found = [captured(workload, capacity) for capacity in (*capacities, UNBOUNDED)]
    return Reuse(workload.name, tuple(found[:-1]), found[-1], requirements(workload))
