"""The other cheap statistics of [Chen18] (section 2): L1BN by mean absolute deviation, RBN by range.

Each reads the map twice: its mean or its extremes first, then what is counted against them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.reference_sampling import range_factor
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.norm import NormProblem
from bnfuse.runtime.kernels.common.steps import Expr, f64, to_f32
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.norm import map_sweep
from bnfuse.runtime.kernels.cpu.sweep import Args, Moments, Sum, Tile, Vector, sweep, vectors
from bnfuse.runtime.kernels.kernel import Kernel, MapType
from bnfuse.runtime.targets.target import CpuTarget


def l1_statistics(x: MapType, target: CpuTarget) -> Kernel:
    """Make the kernel x -> mean, variance, sign_mean, [c] float32.

    variance = pi/2 * (mean of |x - mean|)^2, sign_mean = mean of sign(x - mean). The signs are those that
    `l1_grad_input` finds with the mean as float32; deviations also know what that rounds away.
    """

    def emit(args: Args) -> None:
        count = f64(float(x.pixels))
        rest = tir.workspace(x.c)

        def mean(channel: Expr, value: Expr, _: Expr) -> None:
            T.buffer_store(args["mean"], to_f32(value), [channel])
            T.buffer_store(rest, to_f32(value - f64(args["mean"][channel])), [channel])

        def variance(channel: Expr, value: Expr) -> None:
            T.buffer_store(args["variance"], to_f32(value * value / (count * count) * f64(math.pi / 2)), [channel])

        moments, deviations = Moments(mean), Sum(variance)
        signs = Sum(lambda c, value: T.buffer_store(args["sign_mean"], to_f32(value / count), [c]))

        def add(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                moments.add(vector.base + j, args.read("x", pixel, vector.base + j), is_first)

        def compare(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                d = args.read("x", pixel, vector.base + j) - args["mean"][vector.base + j]
                exact = d - rest[vector.base + j]
                deviations.add(vector.base + j, tirx.Max(exact, steps.f32(0.0) - exact))
                signs.add(vector.base + j, steps.sign(d))

        sweep(x.pixels, x.c, target, add, [moments])
        sweep(x.pixels, x.c, target, compare, [deviations, signs])

    return map_sweep(NormProblem("L1Statistics", (("x", x),)), target, x.c, emit)


def l1_grad_input(dz: MapType, x: MapType, dx: MapType, target: CpuTarget) -> Kernel:
    """Make the kernel dz, x, mean, p, q, w -> dx = p*dz + q*sign(x - mean) + w."""

    def emit(args: Args) -> None:
        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                channel = vector.base + j
                sign = steps.sign(args.read("x", pixel, channel) - args["mean"][channel])
                rest = steps.fma(args["q"][channel], sign, args["w"][channel])
                args.write("dx", pixel, channel, steps.fma(args["p"][channel], args.read("dz", pixel, channel), rest))

        sweep(x.pixels, x.c, target, visit)

    return map_sweep(NormProblem("L1GradInput", (("dz", dz), ("x", x), ("dx", dx))), target, x.c, emit)


def range_statistics(x: MapType, target: CpuTarget) -> Kernel:
    """Make the kernel x -> mean, variance = ((high - low)*c)^2, low, high, low_count, high_count, [c] float32.

    The factor c is `range_factor` of the map's pixels.
    """

    def emit(args: Args) -> None:
        moments = Moments(lambda c, mean, _: T.buffer_store(args["mean"], to_f32(mean), [c]))
        extremes = Extremes(args)

        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                moments.add(vector.base + j, args.read("x", pixel, vector.base + j), is_first)
                extremes.add(vector.base + j, args.read("x", pixel, vector.base + j))

        sweep(x.pixels, x.c, target, visit, [moments, extremes])
        factor = steps.f32(range_factor(x.pixels))
        for vector in vectors(x.c, target.lanes):
            with vector.each() as j:
                c = vector.base + j
                width = (args["high"][c] - args["low"][c]) * factor
                T.buffer_store(args["variance"], width * width, [c])

    return map_sweep(NormProblem("RangeStatistics", (("x", x),)), target, x.c, emit)


class Extremes:
    """A reduction of kernels/cpu/sweep.py: least and greatest value of a channel, and how often each was met.

    A value beyond the extreme so far begins a new count. Counts are int32, results float32.
    """

    def __init__(self, args: Args) -> None:
        self.args = args

    def before_threads(self, shares: Sequence[int], channels: int, lanes: int) -> None:
        """Allocate a least and a greatest value (float32) and their counts (int32) per thread and channel."""
        self.shares, self.channels, self.lanes = shares, channels, lanes
        size = len(shares) * channels
        self.values = {name: tir.workspace(size) for name in ("low", "high")}
        self.counts = {name: tir.workspace(size, "int32") for name in ("low", "high")}

    def begin_thread(self, thread: Expr) -> None:
        """Begin at infinity and minus infinity, met no times."""
        self.base = thread * self.channels
        for vector in vectors(self.channels, self.lanes):
            for name, start in (("low", math.inf), ("high", -math.inf)):
                with vector.each() as j:
                    at = self.base + vector.base + j
                    T.buffer_store(self.values[name], steps.f32(start), [at])
                    T.buffer_store(self.counts[name], tirx.const(0, "int32"), [at])

    def begin_tile(self) -> None:
        """Do nothing: extremes are exact over any number of pixels."""

    def add(self, channel: Expr, value: Expr) -> None:
        """Take one value in."""
        at = self.base + channel
        for name in ("low", "high"):
            held, count = self.values[name][at], self.counts[name][at]
            is_beyond = value < held if name == "low" else value > held
            again = tirx.Select(value == held, count + 1, count)
            T.buffer_store(self.counts[name], tirx.Select(is_beyond, tirx.const(1, "int32"), again), [at])
            T.buffer_store(self.values[name], _extreme(name, value, held), [at])

    def end_tile(self, tile: Tile) -> None:
        """Do nothing: `add` has kept the thread's extremes."""

    def after_threads(self) -> None:
        """Store the threads' common extremes, and how often all of them met these."""
        for vector in vectors(self.channels, self.lanes):
            with vector.each() as j:
                for name in ("low", "high"):
                    self._join(name, vector.base + j)

    def _join(self, name: str, channel: Expr) -> None:
        places = [t * self.channels + channel for t, count in enumerate(self.shares) if count]
        extreme: Any = self.values[name][places[0]]
        for at in places[1:]:
            extreme = _extreme(name, extreme, self.values[name][at])
        T.buffer_store(self.args[name], extreme, [channel])
        zero = tirx.const(0, "int32")
        total: Any = zero
        for at in places:
            total = total + tirx.Select(self.values[name][at] == self.args[name][channel], self.counts[name][at], zero)
        T.buffer_store(self.args[f"{name}_count"], tirx.Cast("float32", total), [channel])


def _extreme(name: str, a: Expr, b: Expr) -> Expr:
    return tirx.Min(a, b) if name == "low" else tirx.Max(a, b)


def range_grad_input(dz: MapType, x: MapType, dx: MapType, target: CpuTarget) -> Kernel:
    """Make the kernel dz, x, low, high, p, q_low, q_high, w -> dx.

    dx = p*dz + w, plus q_low where x = low, plus q_high where x = high.
    """

    def emit(args: Args) -> None:
        def visit(pixel: Expr, vector: Vector, is_first: Expr) -> None:
            with vector.each() as j:
                channel = vector.base + j
                value, rest = args.read("x", pixel, channel), args["w"][channel]
                for name in ("low", "high"):
                    at = tirx.Select(value == args[name][channel], args[f"q_{name}"][channel], steps.f32(0.0))
                    rest = rest + at
                args.write("dx", pixel, channel, steps.fma(args["p"][channel], args.read("dz", pixel, channel), rest))

        sweep(x.pixels, x.c, target, visit)

    return map_sweep(NormProblem("RangeGradInput", (("dz", dz), ("x", x), ("dx", dx))), target, x.c, emit)
