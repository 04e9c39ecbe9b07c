"""Mean and variance of a kernel's output, collected by threads while it is in registers.

A thread keeps two float64 sums per channel: of y and of y^2. It adds a micro tile at a time: its float32 sum, and its
squared deviations about its own mean plus the square of that mean. What cancels in sum(y^2)/m - mean^2 cancels in
float64, so at |mean|/std = 1e3 the variance is good to about 1e-8, the rounding of the tiles' float32 sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu.tir import Buffer, Expr, span, splat, store, vectors, widen, workspace, zero


@dataclasses.dataclass(frozen=True)
class Partials:
    """The sums of every thread: [thread][y, y^2][channel]."""

    buffer: Buffer
    channels: int
    threads: int
    lanes: int

    @staticmethod
    def allocate(channels: int, threads: int, lanes: int) -> Partials:
        """Allocate the sums, float64; `clear` sets them to 0."""
        return Partials(workspace(threads * 2 * channels, "float64"), channels, threads, lanes)

    def at(self, thread: Expr, moment: int, channel: Expr) -> Expr:
        """Write where a sum of a channel lies: `moment` is 0 for y, 1 for y^2."""
        return (thread * 2 + moment) * self.channels + channel

    def clear(self, thread: Expr) -> None:
        """Set a thread's sums to 0."""
        zero(self.buffer, self.at(thread, 0, 0), 2 * self.channels, self.lanes)

    def add(self, thread: Expr, channel: Expr, values: Sequence[Expr], width: int) -> None:
        """Add the vectors `values`, one per pixel, of the `width` channels from `channel` on."""
        self.add_sums(thread, channel, moments(values, width), width)

    def add_sums(self, thread: Expr, channel: Expr, sums: Sequence[Expr], width: int) -> None:
        """Add float64 sums of y and y^2, of the `width` channels from `channel` on."""
        for moment, value in enumerate(sums):
            index = span(self.at(thread, moment, channel), width)
            store(self.buffer, index, self.buffer[index] + value)

    def finish(self, count: int, mean: Buffer, variance: Buffer) -> None:
        """Store mean and variance of all channels, over `count` values each."""

        def body(start: Expr, width: int) -> None:
            def average(moment: int) -> Expr:
                parts = [self.buffer[span(self.at(p, moment, start), width)] for p in range(self.threads)]
                return T.bind(_sum(parts) * splat(1 / count, width, "float64"))

            first, second = average(0), average(1)
            difference, none = T.bind(second - first * first), splat(0, width, "float64")
            spread = tirx.Select(difference < none, none, difference)  # NaN stays NaN: a diverged run must show it
            for buffer, value in ((mean, first), (variance, spread)):
                store(buffer, span(start, width), tirx.Cast("float32" if width == 1 else f"float32x{width}", value))

        vectors(self.channels, self.lanes, body)


def moments(values: Sequence[Expr], width: int) -> tuple[Expr, Expr]:
    """Add up y and y^2 of the vectors `values`, lane by lane, as float64."""
    total = T.bind(_sum(values))
    mean = T.bind(total * splat(1 / len(values), width))
    deviations = T.bind(_sum([(value - mean) * (value - mean) for value in values]))
    wide = T.bind(widen(total, width))
    return wide, wide * wide * splat(1 / len(values), width, "float64") + widen(deviations, width)


def _sum(values: Sequence[Expr]) -> Expr:
    """Add up as a balanced tree: its depth is the latency."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return _sum(values[:half]) + _sum(values[half:])
