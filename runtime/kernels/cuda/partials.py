"""Reductions over pixels in two stages, in an order that never changes: no atomics, every run gives the same bits.

    a tile's block:   each thread keeps float32 sums of its channel vector over its pixels
                      threads of equal channel vector join in shared memory, halving their number each time
                      one row of `partials`, [tiles][quantities][channels] float32, is written
    merge stage:      a block has 8 channels (a sector of memory) by up to 128 row lanes; float64 from here on

Statistics travel as mean and M2 (the sum of squared deviations from that mean) and join by Chan's formula, so a mean
that is large beside the deviation costs nothing. The variance is never negative, and that of a constant is 0.

Where rows stand for different numbers of pixels (strips that end where the map ends, the phases of a transposed
convolution) a row says of how many it is: [tiles][count, mean, M2][channels].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.coefficients import Member
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.coefficients import emit_tail, turns_of_tail
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, Stage
from bnfuse.runtime.kernels.kernel import Param

COLUMNS = 8  # channels of a block that merges: 32 bytes of a row
MOST_LANES = 128  # threads of one of its columns, at most, and
SIDE_BY_SIDE = 4  # rows whose loads are on their way at a time: both chosen by hand

COUNTED_LANES = 32  # rows with a count that a merging block reads side by side: chosen by hand

# -- joining the threads of a tile ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Team:
    """A block of `down` times `across` threads. Thread lane*across + vector has the channels of that vector."""

    across: int
    down: int
    width: int  # channels of a vector

    @property
    def threads(self) -> int:
        """Count the threads of the block."""
        return self.across * self.down

    def vector(self, tid: Expr) -> Expr:
        """Find the vector of channels of a thread."""
        return tid % self.across if self.across < self.threads else tid

    def lane(self, tid: Expr) -> Expr:
        """Find the lane of a thread: which of the `down` that share its vector it is."""
        return tid // self.across if self.down > 1 else 0

    def shared_bytes(self, floats: int) -> int:
        """Count the bytes of shared memory in which threads with `floats` values each can join."""
        return (self.down + 1) // 2 * self.across * floats * 4

    def sums_bytes(self, quantities: int) -> int:
        """Count the bytes of shared memory that `join_sums` needs."""
        return self.shared_bytes(quantities * self.width)

    @property
    def statistics_bytes(self) -> int:
        """Count the bytes of shared memory that `Moments.join` needs: 3 floats a channel, and a count."""
        return self.shared_bytes(3 * self.width + 1)


Combine = Callable[[Callable[[int], Expr]], None]  # takes the partner's values by number into one's own


def join_lanes(team: Team, tid: Expr, shared: Buffer, own: Sequence[Expr], combine: Combine) -> None:
    """Bring lane 0 what all lanes have. `own` are a thread's values; shared memory is free before and after."""
    lane, vector = team.lane(tid), team.vector(tid)
    active = team.down
    while active > 1:
        half = (active + 1) // 2
        place = lambda k, lane, size=half * team.across: k * size + lane * team.across + vector  # noqa: E731

        def write(half: int = half, place: Any = place) -> None:
            for k, value in enumerate(own):
                d.put(shared, place(k, lane - half), value)

        def take(place: Any = place) -> None:
            combine(lambda k: shared[place(k, lane)])

        d.when(tirx.And(lane >= half, lane < active), write)
        d.sync()
        d.when(lane < active - half, take)
        d.sync()
        active = half


def join_sums(team: Team, tid: Expr, shared: Buffer, sums: Buffer, quantities: int) -> None:
    """Bring lane 0 the sums over the lanes of `sums`, float32 registers [quantities][width].

    `shared` is a float32 view of at least `team.sums_bytes(quantities)`. All threads of the block take part.
    """
    count = quantities * team.width

    def combine(partner: Callable[[int], Expr]) -> None:
        for k in range(count):
            d.put(sums, k, sums[k] + partner(k))

    join_lanes(team, tid, shared, [sums[k] for k in range(count)], combine)


class Moments:
    """Mean and M2 of a vector of channels over a thread's pixels.

    A thread sums e = value - shift and e*e, where shift is its first value. M2 = sum e*e - (sum e)^2/n loses at most a
    factor n + 1 of float32 precision, whatever the mean: sum e*e = M2 + n*(mean - shift)^2 and (mean - shift)^2 <= M2.
    """

    def __init__(self, team: Team) -> None:
        self.team, self.width = team, team.width
        self.shift, self.first, self.second = (d.registers(team.width) for _ in range(3))
        self.count = d.registers(1)

    def clear(self) -> None:
        """Begin without pixels."""
        d.put(self.count, 0, T.float32(0))
        for held in (self.shift, self.first, self.second):
            for j in range(self.width):
                d.put(held, j, T.float32(0))

    def add(self, values: Buffer) -> None:
        """Take in one pixel: `values` are `width` float32 registers."""
        for j in range(self.width):
            d.put(self.shift, j, tirx.Select(self.count[0] == T.float32(0), values[j], self.shift[j]))
        for j in range(self.width):
            e = T.bind(values[j] - self.shift[j])
            d.put(self.first, j, self.first[j] + e)
            d.put(self.second, j, d.fma(e, e, self.second[j]))
        d.put(self.count, 0, self.count[0] + T.float32(1))

    def join(self, tid: Expr, shared: Buffer) -> Buffer:
        """Bring lane 0, in registers [2][width], mean and M2 of all lanes' pixels.

        `shared` is a float32 view of at least `team.statistics_bytes`. All threads of the block take part.
        """
        width, count = self.width, self.count
        # the mean is shift + rest: rounded to one number it would spoil the gaps between lanes where it is large
        rest, m2 = d.registers(width), d.registers(width)
        n = T.bind(tirx.Select(count[0] > T.float32(0), count[0], T.float32(1)))
        for j in range(width):
            d.put(rest, j, self.first[j] / n)
            d.put(m2, j, _not_negative(d.fma(T.float32(0) - self.first[j], rest[j], self.second[j])))

        def combine(partner: Callable[[int], Expr]) -> None:
            other = T.bind(partner(3 * width))
            total = T.bind(count[0] + other)
            share = T.bind(tirx.Select(total > T.float32(0), other / total, T.float32(0)))
            weight = T.bind(count[0] * share)
            for j in range(width):
                gap = T.bind((partner(j) - self.shift[j]) + (partner(width + j) - rest[j]))
                d.put(m2, j, d.fma(gap * weight, gap, m2[j] + partner(2 * width + j)))
                d.put(rest, j, d.fma(gap, share, rest[j]))
            d.put(count, 0, total)

        own = [held[j] for held in (self.shift, rest, m2) for j in range(width)]
        join_lanes(self.team, tid, shared, [*own, count[0]], combine)
        made = d.registers(2 * width)
        for j in range(width):
            d.put(made, j, self.shift[j] + rest[j])
            d.put(made, width + j, m2[j])
        return made


class SharedMoments:
    """Mean and M2 where all threads of equal channel vector have one shift: a value of the tile, the same for all.

    Then only sums of e and e*e have to be joined, and neither counts nor gaps between lanes. `count` is the number of
    the tile's pixels. M2 = sum e*e - (sum e)^2/n loses at most a factor n + 1, as in `Moments`, now of the tile's n.
    """

    def __init__(self, team: Team, shift: Buffer, count: Expr) -> None:
        self.team, self.width, self.shift, self.count = team, team.width, shift, count
        self.sums = d.registers(2 * team.width)

    def clear(self) -> None:
        """Begin without pixels."""
        for k in range(2 * self.width):
            d.put(self.sums, k, T.float32(0))

    def add(self, values: Buffer) -> None:
        """Take in one pixel: `values` are `width` float32 registers."""
        for j in range(self.width):
            e = T.bind(values[j] - self.shift[j])
            d.put(self.sums, j, self.sums[j] + e)
            d.put(self.sums, self.width + j, d.fma(e, e, self.sums[self.width + j]))

    def join(self, tid: Expr, shared: Buffer) -> Buffer:
        """Bring lane 0 mean and M2, as `Moments.join`."""
        join_sums(self.team, tid, shared, self.sums, 2)
        n = T.bind(tirx.Cast("float32", self.count))
        made = d.registers(2 * self.width)
        for j in range(self.width):
            first = self.sums[j]
            rest = T.bind(first / n)
            d.put(made, j, self.shift[j] + rest)
            d.put(made, self.width + j, _not_negative(d.fma(T.float32(0) - first, rest, self.sums[self.width + j])))
        return made


def counted_row(moments: Moments, tid: Expr, shared: Buffer) -> Buffer:
    """Join [count, mean, M2][width] of all lanes into lane 0 of the block, and give it."""
    width = moments.width
    made, row = moments.join(tid, shared), d.registers(3 * width)
    for j in range(width):
        d.put(row, j, moments.count[0])
        d.put(row, width + j, made[j])
        d.put(row, 2 * width + j, made[width + j])
    return row


def _not_negative(value: Expr) -> Expr:
    """Emit max(value, 0), but NaN stays."""
    value = T.bind(value)
    return tirx.Select(value < tirx.const(0, value.ty.dtype), tirx.const(0, value.ty.dtype), value)


def write_row(
    partials: Buffer,
    row: Expr,
    quantities: int,
    channels: int,
    channel: Expr,
    width: int,
    values: Buffer,
    left: Expr | None,
    aligned: bool,
) -> None:
    """Write registers [quantities][width] as the channels from `channel` on of a row of [tiles][quantities][channels].

    `left` of them exist (None: all); the others are not written. `aligned`: channel and channels are multiples of 4.
    """
    step = 4 if aligned else 1
    for q in range(quantities):
        base = T.bind((row * quantities + q) * channels + channel)
        for first in range(0, width, step):

            def store(q: int = q, base: Expr = base, first: int = first) -> None:
                span = (lambda i: i) if step == 1 else (lambda i: T.ramp(i, 1, step))
                T.buffer_store(partials, values[span(q * width + first)], [span(base + first)])

            d.when(True if left is None else first < left, store)


# -- merging the rows of all tiles ---------------------------------------------------------------------------------


def partials_param(tiles: int, quantities: int, channels: int, access: str = "out", name: str = "partials") -> Param:
    """Describe the scratch buffer [tiles][quantities][channels] float32 between the stages.

    Its access is "out" for the first, "in" for the second.
    """
    return Param(name, access, tiles * quantities * channels)  # type: ignore[arg-type]


def sums_stage(
    name: str,
    params: Sequence[Param],
    *,
    tiles: int,
    channels: int,
    results: Sequence[str | Sequence[str]],
    held: str = "partials",
    count: int = 1,
    quantities: int | None = None,
    finish: Callable[[Sequence[Expr]], Sequence[Expr]] = lambda sums: sums,
    tail: Sequence[Member] = (),
) -> Stage:
    """Merge the buffer `held`, [tiles][len(results)][channels], sums, into the results: [channels] float32 each.

    A quantity that is the result of several names is given as a sequence of them. Sums are divided by `count`.
    Where results are no sums, there are `quantities` of these, and `finish` makes the results of them, in float64.
    """
    quantities = quantities or len(results)

    def emit(block: Block, columns: Columns) -> None:
        sums = d.registers(quantities, "float64")
        for q in range(quantities):
            d.put(sums, q, tirx.const(0, "float64"))

        def add(tile: Expr, values: Callable[[int], Expr]) -> None:
            for q in range(quantities):
                d.put(sums, q, sums[q] + values(q))

        turns = turns_of_tail(block, tail, columns.held_channel)
        columns.sweep(block[held], quantities, add)
        columns.join(sums, quantities)

        def store() -> None:
            means = [
                sums[q] if count == 1 else sums[q] / tirx.const(float(count), "float64") for q in range(quantities)
            ]
            for names, value in zip(results, finish(means), strict=True):
                for result in (names,) if isinstance(names, str) else names:
                    d.put(block[result], columns.channel, tirx.Cast("float32", value))
            emit_tail(block, tail, columns.channel, turns)

        columns.first_lane(store)

    return merge_stage(name, params, tiles, channels, quantities, emit, may_alias=bool(tail))


def statistics_stage(
    name: str,
    params: Sequence[Param],
    *,
    tiles: int,
    rows: int,
    total: int,
    channels: int,
    fewer: int = 0,
    tail: Sequence[Member] = (),
) -> Stage:
    """Merge `partials` [tiles][2][channels], mean and M2 of each tile, into "mean" and "variance" (biased), [channels].

    Every tile has `rows` pixels but the last ones, which have `fewer`: as many as make `total` of it. Without `fewer`
    it is the last alone, which has the rest, at least 1.
    """
    whole = (total - tiles * fewer) // (rows - fewer) if fewer else tiles - 1
    fewer = fewer or total - rows * whole
    assert 0 < fewer <= rows and whole * rows + (tiles - whole) * fewer == total, (tiles, rows, total)

    def emit(block: Block, columns: Columns) -> None:
        partials = block["partials"]
        sums = d.registers(3, "float64")  # n*e, n*e*e, M2 where e is a tile's mean less the first tile's
        for k in range(3):
            d.put(sums, k, tirx.const(0, "float64"))
        shift = T.bind(tirx.Cast("float64", partials[columns.held_channel]))

        def add(tile: Expr, values: Callable[[int], Expr]) -> None:
            n: Expr = tirx.const(float(rows), "float64")
            if fewer != rows:
                n = tirx.Select(tile >= whole, tirx.const(float(fewer), "float64"), n)
            e = T.bind(values(0) - shift)
            weighted = T.bind(n * e)
            d.put(sums, 0, sums[0] + weighted)
            d.put(sums, 1, sums[1] + weighted * e)
            d.put(sums, 2, sums[2] + values(1))

        turns = turns_of_tail(block, tail, columns.held_channel)
        columns.sweep(partials, 2, add)
        columns.join(sums, 3)

        def store() -> None:
            count = tirx.const(float(total), "float64")
            gap = T.bind(sums[0] / count)
            m2 = _not_negative(sums[2] + (sums[1] - sums[0] * gap))
            d.put(block["mean"], columns.channel, tirx.Cast("float32", shift + gap))
            d.put(block["variance"], columns.channel, tirx.Cast("float32", m2 / count))
            emit_tail(block, tail, columns.channel, turns)

        columns.first_lane(store)

    return merge_stage(name, params, tiles, channels, 3, emit, may_alias=bool(tail))


def counted_statistics_stage(
    name: str, params: Sequence[Param], *, tiles: int, total: int, channels: int, tail: Sequence[Member] = ()
) -> Stage:
    """Merge `partials` into "mean" and "variance" (biased), [channels] float32 each, of `total` pixels in all."""
    shared = COUNTED_LANES // 2 * COLUMNS * 3 * 8
    grid = -(-channels // COLUMNS), 1, 1
    launch: dict[str, Any] = {"grid": grid, "threads": COUNTED_LANES * COLUMNS, "may_alias": bool(tail)}
    with d.stage(name, params, **launch, shared=shared) as block:
        columns = Columns(block, tiles, channels, COUNTED_LANES, d.shared_memory(shared).view("float64"))
        sums = d.registers(3, "float64")  # n*e, n*e*e, M2 where e is a row's mean less the first row's
        for k in range(3):
            d.put(sums, k, tirx.const(0, "float64"))
        shift = T.bind(tirx.Cast("float64", block["partials"][channels + columns.held_channel]))

        def add(_: Expr, values: Callable[[int], Expr]) -> None:
            gap = T.bind(values(1) - shift)
            weighted = T.bind(values(0) * gap)
            d.put(sums, 0, sums[0] + weighted)
            d.put(sums, 1, sums[1] + weighted * gap)
            d.put(sums, 2, sums[2] + values(2))

        turns = turns_of_tail(block, tail, columns.held_channel)
        columns.sweep(block["partials"], 3, add)
        columns.join(sums, 3)

        def store() -> None:
            count = tirx.const(float(total), "float64")
            gap = T.bind(sums[0] / count)
            m2 = T.bind(sums[2] + (sums[1] - sums[0] * gap))
            m2 = tirx.Select(m2 < tirx.const(0, "float64"), tirx.const(0, "float64"), m2)
            d.put(block["mean"], columns.channel, tirx.Cast("float32", shift + gap))
            d.put(block["variance"], columns.channel, tirx.Cast("float32", m2 / count))
            emit_tail(block, tail, columns.channel, turns)

        columns.first_lane(store)
    return block.stage


def merge_stage(
    name: str,
    params: Sequence[Param],
    tiles: int,
    channels: int,
    values: int,
    emit: Callable[[Block, Columns], None],
    *,
    may_alias: bool = False,
) -> Stage:
    """Build the stage of merging blocks, whose lanes join `values` float64 each."""
    lanes = MOST_LANES
    while lanes > 4 and lanes * SIDE_BY_SIDE >= 2 * tiles:
        lanes //= 2
    shared = lanes // 2 * COLUMNS * values * 8
    grid = -(-channels // COLUMNS), 1, 1
    with d.stage(name, params, grid=grid, threads=lanes * COLUMNS, shared=shared, may_alias=may_alias) as block:
        emit(block, Columns(block, tiles, channels, lanes, d.shared_memory(shared).view("float64")))
    return block.stage


class Columns:
    """A merging block: COLUMNS channels by `lanes` threads, each of which takes every lanes-th row."""

    def __init__(self, block: Block, tiles: int, channels: int, lanes: int, shared: Buffer) -> None:
        self.tiles, self.channels, self.lanes, self.shared = tiles, channels, lanes, shared
        self.column, self.lane = block.tid % COLUMNS, block.tid // COLUMNS
        self.channel = T.bind(block.x * COLUMNS + self.column)
        # threads beyond the last channel read it too, and write nothing
        self.held_channel = self.channel
        if channels % COLUMNS:
            self.held_channel = T.bind(tirx.Min(self.channel, tirx.const(channels - 1, "int32")))

    def sweep(self, partials: Buffer, quantities: int, add: Callable[[Expr, Callable[[int], Expr]], None]) -> None:
        """Emit `add(tile, values)` for each of this thread's rows; `values(q)` is float64."""
        held = d.registers(SIDE_BY_SIDE * quantities)

        def visit(first: Expr, count: int) -> None:
            rows = [first + (i * self.lanes + self.lane) for i in range(count)]
            for i, tile in enumerate(rows):
                for q in range(quantities):
                    index = (tile * quantities + q) * self.channels + self.held_channel
                    d.put(held, i * quantities + q, partials[index])
            for i, tile in enumerate(rows):
                first_held = i * quantities
                add(tile, lambda q, at=first_held: tirx.Cast("float64", held[at + q]))  # type: ignore[misc]

        rounds, rest = divmod(self.tiles, self.lanes)
        groups, single = divmod(rounds, SIDE_BY_SIDE)
        if groups:
            with T.serial(0, groups) as group:
                visit(T.bind(group * (SIDE_BY_SIDE * self.lanes)), SIDE_BY_SIDE)
        if single:
            visit(groups * SIDE_BY_SIDE * self.lanes, single)
        if rest:
            d.when(self.lane < rest, lambda: visit(rounds * self.lanes, 1))

    def join(self, sums: Buffer, count: int) -> None:
        """Bring lane 0 the sums over the lanes of `count` float64 registers."""

        def combine(partner: Callable[[int], Expr]) -> None:
            for k in range(count):
                d.put(sums, k, sums[k] + partner(k))

        self.join_by([sums[k] for k in range(count)], combine)

    def join_by(self, own: Sequence[Expr], combine: Combine) -> None:
        """Bring lane 0 what all lanes have: `own` are a thread's float64 registers, `combine` takes another's in."""
        tid = self.lane * COLUMNS + self.column
        join_lanes(Team(COLUMNS, self.lanes, 1), tid, self.shared, own, combine)

    def first_lane(self, store: Callable[[], None]) -> None:
        """Emit `store` for the threads of lane 0 whose channel exists."""
        own = self.lane == 0
        d.when(own if self.channels % COLUMNS == 0 else tirx.And(own, self.channel < self.channels), store)
