"""One sweep over the pixels of a map, the skeleton of every kernel here that is not a convolution.

    parallel thread:                       a static share of the tiles
        for tile:                          of 16 pixels
            for pixel in tile:
                for vector of channels:    visit(pixel, vector), which may add to reductions (float32, per channel, L1)
            reductions: the tile's sums join the thread's, float64
    reductions: the threads' sums join, results in float32

Pixels are the outer loop, so every map is streamed in the order in which it lies in memory. What does not fill a
vector is one shorter vector: any number of channels works.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.params import operator_params, unique_name
from bnfuse.runtime.kernels.common.steps import Expr, Load, f64
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param, Problem
from bnfuse.runtime.targets.target import CpuTarget

TILE = 16  # pixels whose float32 sums are few enough to be good to ~1e-6; chosen by hand


class Args:
    """The arguments of a kernel under construction, by name; maps by pixel and channel."""

    def __init__(self, arguments: tir.Arguments, maps: Mapping[str, MapType]) -> None:
        self.arguments = arguments
        self.maps = {name: arguments.map(name, kind) for name, kind in maps.items() if name in arguments}

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arguments

    def read(self, name: str, pixel: Expr, channel: Expr) -> Expr:
        """Read the element of a map at a pixel and channel."""
        return self[name][self.maps[name].at(pixel, channel)]

    def write(self, name: str, pixel: Expr, channel: Expr, value: Expr) -> None:
        """Store the element of a map at a pixel and channel."""
        tir.store(self[name], self.maps[name].at(pixel, channel), value)

    def loader(self, pixel: Expr, channel: Expr) -> Load:
        """Give the `load` of kernels/common/steps.py at one pixel and channel."""
        return lambda name, is_vector: self[name][channel] if is_vector else self.read(name, pixel, channel)


def prim_func(name: str, params: Sequence[Param], maps: Mapping[str, MapType], emit: Callable[[Args], None]) -> Any:
    """Make a TIR function with these parameters, whose body `emit` writes."""
    with tir.function(name, params) as arguments:
        emit(Args(arguments, maps))
    return arguments.result


def map_kernel(
    problem: Problem,
    target: CpuTarget,
    emit: Callable[[Args], None],
) -> Kernel:
    """Make the kernel of an operator of steps."""
    params = operator_params(problem)
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, params, lambda: prim_func(name, params, dict(problem.maps), emit))


@dataclasses.dataclass(frozen=True)
class Vector:
    """Channels base .. base + lanes."""

    base: Expr
    lanes: int

    def each(self) -> Any:
        """Write a vectorised loop over the lanes, by `with vector.each() as j:`."""
        return T.vectorized(0, self.lanes)

    def local(self, dtype: str = "float32") -> Any:
        """Give a register for one value per lane."""
        return tir.registers(self.lanes, dtype)


def vectors(channels: int, lanes: int) -> Iterator[Vector]:
    """Emit the loop over whole vectors, then the shorter one that is left, by `for vector in vectors(c, lanes):`."""
    whole = channels // lanes
    if whole == 1:
        yield Vector(tirx.const(0, "int32"), lanes)
    elif whole:
        with T.serial(0, whole) as v:
            yield Vector(v * lanes, lanes)
    if channels % lanes:
        yield Vector(tirx.const(whole * lanes, "int32"), channels % lanes)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A run of pixels and where its thread stands: all expressions, counts as float64."""

    start: Expr
    count: Expr
    before: Expr  # pixels that this thread has done already


class Reduction(Protocol):
    """Something per channel over all pixels. The methods emit code, in this order, at the places their names say."""

    def before_threads(self, shares: Sequence[int], channels: int, lanes: int) -> None:
        """Allocate what all threads' sums need; `shares` has the pixels of each thread."""

    def begin_thread(self, thread: Expr) -> None:
        """Begin a thread's sums."""

    def begin_tile(self) -> None:
        """Begin the sums of a tile, at most 16 pixels."""

    def end_tile(self, tile: Tile) -> None:
        """Join the tile's sums to the thread's."""

    def after_threads(self) -> None:
        """Join the threads' sums and store the results."""


class Sum:
    """The sum of a value per channel; `finish(channel, total)` stores the float64 total."""

    def __init__(self, finish: Callable[[Expr, Expr], None]) -> None:
        self.finish = finish

    def before_threads(self, shares: Sequence[int], channels: int, lanes: int) -> None:
        """Allocate a float64 sum per thread and channel."""
        self.shares, self.channels, self.lanes = shares, channels, lanes
        self.partial = tir.workspace(len(shares) * channels, "float64")

    def begin_thread(self, thread: Expr) -> None:
        """Begin with 0; a tile's sums are float32, the thread's own."""
        self.base = thread * self.channels
        self.tile = tir.workspace(self.channels)
        self._each(lambda c: T.buffer_store(self.partial, f64(0.0), [self.base + c]))

    def begin_tile(self) -> None:
        """Set the tile's sums to 0."""
        self._each(lambda c: T.buffer_store(self.tile, tirx.const(0.0, "float32"), [c]))

    def add(self, channel: Expr, value: Expr) -> None:
        """Take one value in."""
        T.buffer_store(self.tile, self.tile[channel] + value, [channel])

    def end_tile(self, tile: Tile) -> None:
        """Add the tile's sums to the thread's."""
        at = lambda c: self.base + c  # noqa: E731
        self._each(lambda c: T.buffer_store(self.partial, self.partial[at(c)] + f64(self.tile[c]), [at(c)]))

    def after_threads(self) -> None:
        """Add up the threads' sums and `finish` each channel."""

        def total(c: Expr) -> Expr:
            value = self.partial[c]
            for thread in range(1, len(self.shares)):
                value = value + self.partial[thread * self.channels + c]
            return value

        self._each(lambda c: self.finish(c, total(c)))

    def _each(self, emit: Callable[[Expr], None]) -> None:
        for vector in vectors(self.channels, self.lanes):
            with vector.each() as j:
                emit(vector.base + j)


class Moments:
    """Mean and biased variance of a value per channel.

    A tile sums d = value - shift and d*d in float32, where shift is the tile's first value. Its M2 is
    sum d*d - (sum d)^2/n, which loses at most a factor n + 1 of float32's precision whatever the mean, because
    sum d*d = M2 + n*(mean - shift)^2 and (mean - shift)^2 <= M2. Tiles and threads are merged in float64 by Chan's
    formula. A constant channel gives 0.
    """

    def __init__(self, finish: Callable[[Expr, Expr, Expr], None]) -> None:
        self.finish = finish  # (channel, float64 mean, float64 variance)

    def before_threads(self, shares: Sequence[int], channels: int, lanes: int) -> None:
        """Allocate a float64 mean and M2 per thread and channel."""
        self.shares, self.channels, self.lanes = shares, channels, lanes
        self.mean = tir.workspace(len(shares) * channels, "float64")
        self.m2 = tir.workspace(len(shares) * channels, "float64")

    def begin_thread(self, thread: Expr) -> None:
        """Begin with 0; a tile's shift and sums are float32, the thread's own."""
        self.base = thread * self.channels
        self.shift = tir.workspace(self.channels)
        self.sum = tir.workspace(self.channels)
        self.squares = tir.workspace(self.channels)
        for vector in vectors(self.channels, self.lanes):
            with vector.each() as j:
                T.buffer_store(self.mean, f64(0.0), [self.base + vector.base + j])
                T.buffer_store(self.m2, f64(0.0), [self.base + vector.base + j])

    def begin_tile(self) -> None:
        """Set the tile's sums to 0; its shift comes with its first value."""
        for vector in vectors(self.channels, self.lanes):
            with vector.each() as j:
                T.buffer_store(self.sum, tirx.const(0.0, "float32"), [vector.base + j])
                T.buffer_store(self.squares, tirx.const(0.0, "float32"), [vector.base + j])

    def add(self, channel: Expr, value: Expr, is_first: Expr) -> None:
        """Take one value in; `is_first` says whether its pixel is the first of the tile."""
        T.buffer_store(self.shift, tirx.Select(is_first, value, self.shift[channel]), [channel])
        d = value - self.shift[channel]
        T.buffer_store(self.sum, self.sum[channel] + d, [channel])
        T.buffer_store(self.squares, self.squares[channel] + d * d, [channel])

    def end_tile(self, tile: Tile) -> None:
        """Merge the tile's mean and M2 into the thread's."""
        weight = T.bind(tile.count / (tile.before + tile.count))
        cross = T.bind(tile.before * weight)
        for vector in vectors(self.channels, self.lanes):
            with vector.each() as j:
                c = vector.base + j
                total = f64(self.sum[c])
                m2 = T.bind(f64(self.squares[c]) - total * total / tile.count)
                m2 = tirx.Select(m2 < f64(0.0), f64(0.0), m2)  # NaN stays NaN
                delta = f64(self.shift[c]) + total / tile.count - self.mean[self.base + c]
                T.buffer_store(self.m2, self.m2[self.base + c] + m2 + delta * delta * cross, [self.base + c])
                T.buffer_store(self.mean, self.mean[self.base + c] + delta * weight, [self.base + c])

    def after_threads(self) -> None:
        """Merge the threads' means and M2s and `finish` each channel."""
        mean = tir.registers(self.lanes, "float64")
        m2 = tir.registers(self.lanes, "float64")
        for vector in vectors(self.channels, self.lanes):
            with vector.each() as j:
                T.buffer_store(mean, f64(0.0), [j])
                T.buffer_store(m2, f64(0.0), [j])
                before = 0
                for thread, count in enumerate(self.shares):
                    if not count:
                        continue
                    at = thread * self.channels + vector.base + j
                    weight = count / (before + count)
                    delta = self.mean[at] - mean[j]
                    T.buffer_store(m2, m2[j] + self.m2[at] + delta * delta * f64(before * weight), [j])
                    T.buffer_store(mean, mean[j] + (self.mean[at] - mean[j]) * f64(weight), [j])
                    before += count
                self.finish(vector.base + j, mean[j], m2[j] / f64(float(before)))


@dataclasses.dataclass(frozen=True)
class Shares:
    """How the pixels are dealt to the threads: thread t has the tiles bounds(t) .. bounds(t + 1)."""

    pixels: int
    threads: int

    @property
    def tile(self) -> int:
        """Count the pixels of a tile: 16, or fewer where a thread has fewer."""
        return min(TILE, -(-self.pixels // self.threads))

    @property
    def tiles(self) -> int:
        """Count the tiles of all threads."""
        return -(-self.pixels // self.tile)

    def bound(self, thread: Any) -> Any:
        """Give the first tile of a thread: an int of an int, an expression of an expression."""
        return thread * self.tiles // self.threads

    @property
    def counts(self) -> list[int]:
        """Count the pixels of each thread."""
        ends = [min(self.bound(t) * self.tile, self.pixels) for t in range(self.threads + 1)]
        return [end - start for start, end in itertools.pairwise(ends)]


Visit = Callable[[Expr, Vector, Expr], None]  # (pixel, vector, whether the pixel is the first of its tile)


def sweep(
    pixels: int,
    channels: int,
    target: CpuTarget,
    visit: Visit,
    reductions: Sequence[Reduction] = (),
    lanes: int | None = None,
) -> None:
    """Emit the loops of the module's docstring."""
    lanes = lanes or target.lanes

    def each_vector(pixel: Expr, is_first: Expr) -> None:
        for vector in vectors(channels, lanes):
            visit(pixel, vector, is_first)

    sweep_pixels(pixels, channels, target, each_vector, reductions, lanes)


def sweep_pixels(
    pixels: int,
    channels: int,
    target: CpuTarget,
    visit: Callable[[Expr, Expr], None],
    reductions: Sequence[Reduction] = (),
    lanes: int | None = None,
) -> None:
    """Emit the same loops with `visit(pixel, is_first)`, which walks along the channels of a pixel itself."""
    lanes = lanes or target.lanes
    shares = Shares(pixels, target.threads)
    for reduction in reductions:
        reduction.before_threads(shares.counts, channels, lanes)
    with T.parallel(0, target.threads) as thread:
        for reduction in reductions:
            reduction.begin_thread(thread)
        first = T.bind(shares.bound(thread))
        with T.serial(0, shares.bound(thread + 1) - first) as number:
            start = T.bind((first + number) * shares.tile)
            count = T.bind(tirx.Min(tirx.const(shares.tile, "int32"), pixels - start))
            for reduction in reductions:
                reduction.begin_tile()
            with T.serial(0, count) as i:
                visit(start + i, i == 0)
            tile = Tile(start, f64(count), f64(number * shares.tile))
            for reduction in reductions:
                reduction.end_tile(tile)
    for reduction in reductions:
        reduction.after_threads()
