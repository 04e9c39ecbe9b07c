"""Worlds of parallel.py where there are no ranks, or where their exchanges are noted."""

from __future__ import annotations

import time
from typing import Any

from bnfuse.parallel import Exchanged, Request, World


class Single:
    """The world of one process."""

    rank = local_rank = 0
    size = local_size = 1
    name = "none"

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data


class Planned(Single):
    """What a step of `size` ranks is compiled with where they are not: nothing is exchanged."""

    name = "planned"
    limit = 1.0
    device = 0

    def __init__(self, size: int, *, maps: bool = False) -> None:
        self.size = self.local_size = size
        self.maps = maps  # GPUs that reach each other's memory

    def start(self, exchange: Exchanged) -> Request:
        raise AssertionError("nothing runs where steps are compiled")

    sum = enqueue_sums = enqueue_gathers = share = watch = start

    def gather(self, data: bytes) -> list[bytes]:
        return [data] * self.size

    def end(self, message: str, status: int) -> Any:
        raise SystemExit(message)


class Recorder:
    """A world that notes when exchanges begin and end."""

    def __init__(self, world: World) -> None:
        self.world, self.spans = world, list[list[Any]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def start(self, exchange: Exchanged) -> Request:
        size = sum(array.nbytes for array in exchange.arrays)
        span = [f"{exchange.kind} {size / 1024:.0f} KiB", time.perf_counter(), None]
        self.spans.append(span)
        return Noted(self.world.start(exchange), span)


def noting(step: Any) -> list[tuple[str, float, float]]:
    """Let a step on a CPU note its launches: phase and node, begin and end."""
    spans: list[tuple[str, float, float]] = []
    runner = step._train

    def noted(function: Any, name: str) -> Any:
        def run(*arguments: Any) -> None:
            start = time.perf_counter()
            function(*arguments)
            spans.append((name, start, time.perf_counter()))

        return run

    for phase, calls in runner.calls.items():
        for place, launch in enumerate(runner.program.phase(phase)):
            function, *others = calls[place]
            if not launch.exchanges:
                calls[place] = (noted(function, f"{phase}: {launch.node}"), *others)
    return spans


class Noted:
    def __init__(self, request: Request, span: list[Any]) -> None:
        self.request, self.span = request, span

    def test(self) -> bool:
        done = self.request.test()
        self._note(done)
        return done

    def wait(self) -> None:
        self.request.wait()
        self._note(True)

    def _note(self, done: bool) -> None:
        if done and self.span[2] is None:
            self.span[2] = time.perf_counter()
