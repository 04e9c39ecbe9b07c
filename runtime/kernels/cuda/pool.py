"""Pooling and its gradient, with the prologue and epilogue steps of bnfuse/opset/spec.py.

    windows forward     thread: a pixel of y and a vector of channels; the taps of its window are fetched, up to nine
                        vectors at a time, then activated and joined
    windows backward    thread: a pixel of x; it gathers from the windows that contain it, so that nothing is written
                        twice, and mask, reductions and accumulation follow in place
    global forward      block: an image and up to 16 vectors of channels; the lanes share its pixels and join
    global backward     thread: a pixel of x; all pixels of an image read one of dy

Windows that overlap read from the caches what their neighbours have read. Reductions are of the same sweep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.common.tails import params_with_tail
from bnfuse.runtime.kernels.common.windows import (
    WindowAxis,
    Windows,
    coordinates,
    source_pixel,
    weight_of,
    windows_of,
)
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.cuda.partials import Team, join_sums
from bnfuse.runtime.kernels.cuda.sweep import Sweep, operator_kernel, operator_sweep
from bnfuse.runtime.kernels.cuda.vector import Epilogue, Reader, Reductions, width_of
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Problem
from bnfuse.runtime.targets.target import CudaTarget

UNROLLED = 25  # taps of a window that are written out one by one: chosen by hand
FETCHED = 9  # vectors on their way at a time: chosen by hand
NO_UNROLL = 9  # maps read at a pixel: a thread takes one pixel at a time

# -- forward -------------------------------------------------------------------------------------------------------


def pool_forward(problem: Problem, target: CudaTarget) -> Kernel:
    """Make the kernel: [prologue] MaxPool|AveragePool|GlobalAveragePool [Bias][Statistics].

    Indices of a MaxPool: position in the window, of the first of equal maxima, a map like y of its window's index type.
    BnfuseError where the input is to be stored.
    """
    if "StoreInput" in problem.spec.epilogue:
        raise BnfuseError(f"{problem.op}: a pool reads its input more than once, so no kernel of it stores the input")
    if problem.spec.core == "GlobalAveragePool":
        return _global_forward(problem, target)
    windows = windows_of(problem, "y")
    return _over_windows(problem, target, windows, windows.y, _Forward)


def _over_windows(
    problem: Problem, target: CudaTarget, windows: Windows, result: MapType, pool_of: type[_Forward] | type[_Backward]
) -> Kernel:
    """Make a pool whose threads visit the pixels of its result one at a time."""
    sweep = operator_sweep(problem, target, result, NO_UNROLL)

    def emit(block: Block, epilogue: Epilogue) -> None:
        pool = pool_of(block, problem, windows, sweep, epilogue)

        def visit(i: int, pixel: Expr, valid: Expr) -> None:
            d.when(valid, lambda: pool.visit(T.bind(pixel)))

        sweep.run(block, pool.left, lambda i, pixel, valid: None, visit)

    params = params_with_tail(problem)
    return operator_kernel(problem, target, sweep, params, emit)


class _Forward:
    """A thread of a forward pool over windows."""

    def __init__(self, block: Block, problem: Problem, windows: Windows, sweep: Sweep, epilogue: Epilogue) -> None:
        self.problem, self.windows, self.epilogue = problem, windows, epilogue
        self.operand, self.width = Operand(problem, gradient=False), sweep.team.width
        self.at_a_time = min(max(1, FETCHED // len(self.operand.maps)), windows.positions)
        passes = self.at_a_time if windows.positions <= UNROLLED else 1
        self.reader = Reader(block, self.operand.maps, self.operand.vectors, self.width, passes)
        self.channel, self.left = sweep.channel(block)
        self.reader.open(self.channel, self.left, sweep.channels % 4 == 0)
        epilogue.open(self.channel, self.left)
        self.is_max = problem.spec.core == "MaxPool"
        self.value, self.place = d.registers(self.width), d.registers(self.width, "int32")
        if self.is_max:
            self.indices = Indices(block, problem.map("indices"), windows, self.width)

    def visit(self, pixel: Expr) -> None:
        """Compute one pixel of y."""
        w = self.windows
        image, row, column = (T.bind(at) for at in coordinates(pixel, w.y))
        start = float("-inf") if self.is_max else 0.0
        for j in range(self.width):
            d.put(self.value, j, T.float32(start))
        if self.is_max:
            first = T.bind(w.rows.inside(row)[0] * w.columns.kernel + w.columns.inside(column)[0])
            for j in range(self.width):
                d.put(self.place, j, first)

        def valid(r: Expr, s: Expr) -> Expr:
            return d.all_of(_reads(w.rows, row, r), _reads(w.columns, column, s))

        def fetch(i: int, r: Expr, s: Expr) -> None:
            self.reader.fetch(i, source_pixel(w, image, row, column, r, s), valid(r, s))

        def take(i: int, r: Expr, s: Expr) -> None:
            d.when(valid(r, s), lambda: self.take(i, r * w.columns.kernel + s))

        _each_pair(w.rows.kernel, w.columns.kernel, self.at_a_time, fetch, take)
        if self.is_max:
            self.indices.store(self.place, pixel, self.channel, self.left)
        else:
            weight = T.bind(weight_of(self.problem, w, row, column))
            for j in range(self.width):
                d.put(self.value, j, self.value[j] * weight)
        self.epilogue.visit(self.value, pixel)

    def take(self, i: int, position: Expr) -> None:
        """Join the tap at `position` of the window, fetched as pass i."""
        self.reader.unpack(i)
        for j in range(self.width):
            read = T.bind(self.operand.value(self.reader.load(j)))
            if not self.is_max:
                d.put(self.value, j, self.value[j] + read)
                continue
            # a NaN is a maximum; of equal values the first stays
            wins = T.bind(tirx.Or(read > self.value[j], tirx.isnan(read)))
            d.put(self.place, j, tirx.Select(wins, position, self.place[j]))
            d.put(self.value, j, tirx.Select(wins, read, self.value[j]))


def _reads(axis: WindowAxis, window: Expr, k: Expr) -> Expr:
    """Tell whether the k-th position of a window lies in x."""
    return True if axis.never_cut else d.within(axis.start(window) + k * axis.dilation, axis.size)


def _each_pair(
    rows: int,
    columns: int,
    at_a_time: int,
    fetch: Callable[[int, Expr, Expr], None],
    take: Callable[[int, Expr, Expr], None],
) -> None:
    """Emit `fetch(i, r, s)` and then `take(i, r, s)` for all pairs, in order.

    `at_a_time` are fetched before they are taken.
    """
    if rows * columns > UNROLLED:
        with T.serial(0, rows) as r, T.serial(0, columns) as s:
            fetch(0, r, s)
            take(0, r, s)
        return
    pairs = [(r, s) for r in range(rows) for s in range(columns)]
    for first in range(0, len(pairs), at_a_time):
        group = pairs[first : first + at_a_time]
        for step in (fetch, take):
            for i, (r, s) in enumerate(group):
                step(i, T.int32(r), T.int32(s))


class Indices:
    """The indices of a MaxPool, read or written a vector of channels at a time."""

    def __init__(self, block: Block, kind: MapType, windows: Windows, width: int, passes: int = 1) -> None:
        kind = dataclasses.replace(kind, dtype=windows.index_dtype)
        self.map, self.width = block.map("indices", kind), width
        self.per_word = 4 // d.size_of(kind.dtype)
        self.whole = kind.align % self.per_word == 0 and kind.align >= self.per_word  # words can be accessed
        self.count = width // self.per_word if self.whole else width
        self.held = d.registers(passes * self.count, "uint32")

    def _each(self, pixel: Expr, channel: Expr, left: Expr | None, move: Callable[[int, Expr], None]) -> None:
        """Emit `move(register, index in elements)` for each register whose channels exist."""
        step = self.per_word if self.whole else 1
        base = T.bind(self.map.at(pixel, channel))
        for k in range(self.count):
            inside = True if left is None else k * step < left
            d.when(inside, lambda k=k: move(k, base + k * step))  # type: ignore[misc]

    def _words(self) -> Buffer:
        return d.words(self.map.buffer, self.map.type.elements, self.map.type.dtype)

    def store(self, places: Buffer, pixel: Expr, channel: Expr, left: Expr | None) -> None:
        """Store the indices of `width` channels of a pixel, int32 registers; none from `left` on."""

        def move(k: int, index: Expr) -> None:
            if not self.whole:
                d.put(self.map.buffer, index, tirx.Cast(self.map.type.dtype, places[k]))
                return
            word = tirx.Cast("uint32", places[k * self.per_word])
            for i in range(1, self.per_word):
                part = tirx.Cast("uint32", places[k * self.per_word + i])
                word = tirx.bitwise_or(word, part << T.uint32(32 // self.per_word * i))
            d.put(self._words(), index // self.per_word, word)

        self._each(pixel, channel, left, move)

    def fetch(self, index: int, pixel: Expr, channel: Expr, left: Expr | None, valid: Expr) -> None:
        """Load the indices of a pixel, for pass `index`. What does not exist is 0."""

        def load() -> None:
            if left is not None:
                d.zeros(self.held, index * self.count, self.count)

            def move(k: int, place: Expr) -> None:
                if self.whole:
                    value = self._words()[place // self.per_word]
                else:
                    value = tirx.Cast("uint32", self.map.buffer[place])
                d.put(self.held, index * self.count + k, value)

            self._each(pixel, channel, left, move)

        d.when(valid, load)

    def value(self, index: int, j: int) -> Expr:
        """Read the index of channel j, fetched as pass `index`, int32."""
        if not self.whole or self.per_word == 1:
            return tirx.Cast("int32", self.held[index * self.count + j])
        word = self.held[index * self.count + j // self.per_word]
        return tirx.Cast("int32", tirx.bitwise_and(word >> T.uint32(8 * (j % self.per_word)), T.uint32(255)))


# -- global forward ------------------------------------------------------------------------------------------------

GLOBAL_THREADS = 256
GLOBAL_ACROSS = 16  # vectors of channels of a block: chosen by hand
GLOBAL_AT_A_TIME = 4  # vectors on their way at a time: chosen by hand


class Images(Sweep):
    """Tiles of one image, whose pixels the lanes share."""

    @property
    def rows(self) -> int:
        """Count the pixels of the result in a tile: one."""
        return 1


def _global_forward(problem: Problem, target: CudaTarget) -> Kernel:
    x, y = problem.map("x"), problem.map("y")
    width = width_of(kind for _, kind in problem.maps)
    vectors = -(-y.c // width)
    columns = -(-vectors // GLOBAL_ACROSS)
    across = -(-vectors // columns)
    down = max(1, min(GLOBAL_THREADS // across, x.h * x.w))
    sweep = Images(y.pixels, y.c, Team(across, down, width), columns, 1, 1)
    reductions = Reductions.of(problem.spec)

    def emit(block: Block, epilogue: Epilogue) -> None:
        assert epilogue.shared is not None
        _emit_global(block, problem, sweep, epilogue)

    shared = max(sweep.team.sums_bytes(1), reductions.shared_bytes(sweep.team) if reductions else 0)
    return operator_kernel(problem, target, sweep, params_with_tail(problem), emit, shared=shared)


def _emit_global(block: Block, problem: Problem, sweep: Sweep, epilogue: Epilogue) -> None:
    operand, team, x = Operand(problem, gradient=False), sweep.team, problem.map("x")
    area = x.h * x.w
    at_a_time = max(1, GLOBAL_AT_A_TIME // len(operand.maps))
    reader = Reader(block, operand.maps, operand.vectors, team.width, at_a_time)
    channel, left = sweep.channel(block)
    reader.open(channel, left, sweep.channels % 4 == 0)
    epilogue.open(channel, left)
    lane = team.lane(block.tid)
    total, part = d.registers(team.width), d.registers(team.width)
    for j in range(team.width):
        d.put(total, j, T.float32(0))

    def group(first: Expr, count: int) -> None:
        """Add the sum of `count` pixels of each lane, from `first` on, to the total."""
        places = [first + i * team.down + lane for i in range(count)]
        valid = [d.below(place, area, area % (count * team.down) == 0) for place in places]
        valid = [v if left is None else d.all_of(v, left > 0) for v in valid]
        for i in range(count):
            reader.fetch(i, block.x * area + places[i], valid[i])
        for j in range(team.width):
            d.put(part, j, T.float32(0))
        for i in range(count):

            def take(i: int = i) -> None:
                reader.unpack(i)
                for j in range(team.width):
                    d.put(part, j, part[j] + operand.value(reader.load(j)))

            d.when(valid[i], take)
        for j in range(team.width):
            d.put(total, j, total[j] + part[j])

    groups = -(-area // (at_a_time * team.down))
    if groups == 1:
        group(0, at_a_time)
    else:
        with T.serial(0, groups) as number:
            group(T.bind(number * (at_a_time * team.down)), at_a_time)
    join_sums(team, block.tid, epilogue.shared, total, 1)
    for j in range(team.width):
        d.put(total, j, total[j] / T.float32(area))
    own = True if team.down == 1 else lane == 0
    epilogue.visit(total, block.x, d.all_of(own, True if left is None else left > 0))


# -- backward ------------------------------------------------------------------------------------------------------


def pool_backward(problem: Problem, target: CudaTarget) -> Kernel:
    """Make the kernel of dx of a pool's input, at the resolution of x.

    [BatchNormGrad][Normalize][act] MaxPoolGrad|AveragePoolGrad|GlobalAveragePoolGrad [AddGradient][mask]
    [Reduce][ReduceOther]*[Scale|Accumulate]. BnfuseError where there is a BiasGrad.
    """
    if "BiasGrad" in problem.spec.epilogue:
        raise BnfuseError(f"{problem.op}: a pool has no bias; sum its dy by a PointwiseGradBiasGrad")
    dx = problem.map("dx")
    if problem.spec.core == "GlobalAveragePoolGrad":
        reads = len(EpiloguePlan(problem).maps)
        sweep = operator_sweep(problem, target, dx, max(1, reads))
        return operator_kernel(
            problem,
            target,
            sweep,
            params_with_tail(problem),
            lambda block, epilogue: _emit_global_backward(block, problem, sweep, epilogue),
        )
    return _over_windows(problem, target, windows_of(problem, "dy"), dx, _Backward)


def _emit_global_backward(block: Block, problem: Problem, sweep: Sweep, epilogue: Epilogue) -> None:
    operand, width, dx = Operand(problem, gradient=True), sweep.team.width, problem.map("dx")
    area = dx.h * dx.w
    inlet = Reader(block, operand.maps, operand.vectors, width, sweep.unroll)
    channel, left = sweep.channel(block)
    inlet.open(channel, left, sweep.channels % 4 == 0)
    epilogue.open(channel, left)
    values = d.registers(width)

    def fetch(i: int, pixel: Expr, valid: Expr) -> None:
        inlet.fetch(i, T.bind(pixel // area), valid)
        epilogue.fetch(i, pixel, valid)

    def finish(i: int, pixel: Expr, valid: Expr) -> None:
        def run() -> None:
            inlet.unpack(i)
            for j in range(width):
                d.put(values, j, operand.value(inlet.load(j)) / T.float32(area))
            epilogue.finish(i, values, pixel)

        d.when(valid, run)

    sweep.run(block, left, fetch, finish)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The windows along an axis that may contain a position: `count` of them, ending with the last that has begun."""

    axis: WindowAxis

    @property
    def count(self) -> int:
        """Count the windows that may contain a position."""
        return min(self.axis.out, -(-(self.axis.dilation * (self.axis.kernel - 1) + 1) // self.axis.stride))

    def window(self, position: Expr, i: Expr) -> Expr:
        """Find the i-th of them, in ascending order."""
        axis = self.axis
        last = tirx.Min(tirx.floordiv(position + axis.pad, axis.stride), tirx.const(axis.out - 1, "int32"))
        return last - (self.count - 1) + i

    def contains(self, position: Expr, window: Expr) -> Expr:
        """Tell whether there is such a window and it has an element at the position."""
        axis = self.axis
        distance = position - axis.start(window)
        near = d.all_of(window >= 0, distance <= axis.dilation * (axis.kernel - 1))
        return near if axis.dilation == 1 else d.all_of(near, tirx.floormod(distance, axis.dilation) == 0)

    def place(self, position: Expr, window: Expr) -> Expr:
        """Find which element of the window that is."""
        return tirx.floordiv(position - self.axis.start(window), self.axis.dilation)


class _Backward:
    """A thread of a backward pool over windows."""

    def __init__(self, block: Block, problem: Problem, windows: Windows, sweep: Sweep, epilogue: Epilogue) -> None:
        self.problem, self.windows, self.epilogue = problem, windows, epilogue
        self.operand, self.width = Operand(problem, gradient=True), sweep.team.width
        self.rows, self.columns = Candidates(windows.rows), Candidates(windows.columns)
        count = self.rows.count * self.columns.count
        self.at_a_time = min(max(1, FETCHED // (len(self.operand.maps) + 1)), count)
        passes = self.at_a_time if count <= UNROLLED else 1
        self.reader = Reader(block, self.operand.maps, self.operand.vectors, self.width, passes)
        self.channel, self.left = sweep.channel(block)
        self.reader.open(self.channel, self.left, sweep.channels % 4 == 0)
        epilogue.open(self.channel, self.left)
        self.total = d.registers(self.width)
        self.is_max = problem.spec.core == "MaxPoolGrad"
        if self.is_max:
            self.indices = Indices(block, problem.map("indices"), windows, self.width, passes)

    def visit(self, pixel: Expr) -> None:
        """Compute one pixel of dx."""
        w, rows, columns = self.windows, self.rows, self.columns
        image, h, x = (T.bind(at) for at in coordinates(pixel, w.x))
        self.epilogue.fetch(0, pixel)
        for j in range(self.width):
            d.put(self.total, j, T.float32(0))

        def at(r: Expr, s: Expr) -> tuple[Expr, Expr, Expr]:
            row, column = rows.window(h, r), columns.window(x, s)
            return row, column, d.all_of(rows.contains(h, row), columns.contains(x, column))

        def fetch(i: int, r: Expr, s: Expr) -> None:
            row, column, valid = at(r, s)
            window = T.bind((image * w.y.h + row) * w.y.w + column)
            self.reader.fetch(i, window, valid)
            if self.is_max:
                self.indices.fetch(i, window, self.channel, self.left, valid)

        def take(i: int, r: Expr, s: Expr) -> None:
            row, column, valid = at(r, s)
            d.when(valid, lambda: self.take(i, h, x, row, column))

        _each_pair(rows.count, columns.count, self.at_a_time, fetch, take)
        self.epilogue.finish(0, self.total, pixel)

    def take(self, i: int, h: Expr, x: Expr, row: Expr, column: Expr) -> None:
        """Add what the window at (row, column), fetched as pass i, gives to the pixel (h, x)."""
        self.reader.unpack(i)
        if self.is_max:
            place = self.rows.place(h, row) * self.windows.columns.kernel + self.columns.place(x, column)
            own = T.bind(place)
        else:
            weight = T.bind(weight_of(self.problem, self.windows, row, column))
        for j in range(self.width):
            dy = T.bind(self.operand.value(self.reader.load(j)))
            if self.is_max:
                share = tirx.Select(self.indices.value(i, j) == own, dy, T.float32(0))
            else:
                share = dy * weight
            d.put(self.total, j, self.total[j] + share)
