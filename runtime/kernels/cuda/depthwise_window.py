"""Windows that slide: rows of a map after its prologue, in registers, for a strip of neighbouring pixels.

    prefetch(row)        raw vectors of the rows that the next slide brings, on their way from memory
    slide(row)           what stays moves up, what was prefetched comes in, after the prologue; zeros outside of the map

A thread holds E channels of `extent` rows by `width` columns of float32. Every source is read once and its prologue is
computed once in a strip, however many taps there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.depthwise_shape import Line, Plan, Work
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, Lanes
from bnfuse.runtime.kernels.cuda.operand import Operand, load_vector, words_of
from bnfuse.runtime.kernels.kernel import MapType

Visit = Callable[["Tile", Expr], None]
Ask = Callable[["Tile", Expr, Expr], None]


@dataclasses.dataclass(frozen=True)
class Channels:
    """The channels of a thread: the first, how many, and `left`, how many of the map's there are from there on.

    `left` is None where none of them lacks, once a thread has any; `guard` is None where every thread has all.
    """

    first: Expr
    count: int
    left: Expr | None
    guard: Expr | None = None

    @staticmethod
    def of(block: Block, plan: Plan, channels: int) -> Channels:
        """Deal the channels of a map out to the threads of a plan."""
        first = T.bind((block.y * plan.vectors + block.tid % plan.vectors) * plan.lanes)
        left = T.bind(channels - first)
        whole = channels % (plan.vectors * plan.lanes) == 0
        return Channels(first, plan.lanes, left if channels % plan.lanes else None, None if whole else left)

    def is_any(self, plan: Plan, channels: int) -> Expr:
        """Tell whether the thread has any channel."""
        return d.below(self.first, channels, channels % (plan.vectors * plan.lanes) == 0)

    def each(self, body: Callable[[Expr], None]) -> None:
        """Emit `body(j)` for the thread's channels, unrolled."""
        d.unrolled(self.count, body)

    def vector(self, source: Buffer) -> Buffer:
        """Load the thread's elements of a per-channel vector, into float32 registers."""
        held = d.registers(self.count)
        aligned = self.count % 4 == 0
        load_vector(source, self.first, self.count, held, aligned, self.left)
        return held


@dataclasses.dataclass(frozen=True)
class Tile:
    """Units [row, row + rows) by [column, column + strip) of an image; all of them exist for some tiles only."""

    image: Expr
    row: Expr
    column: Expr


def each_tile(block: Block, plan: Plan, work: Work, body: Callable[[Tile], None]) -> None:
    """Emit `body(tile)` for the tiles of a thread; neighbouring threads take neighbouring strips."""
    total, strips, tiles = plan.total(work), plan.strips(work), plan.tiles(work)

    def one(number: Expr) -> None:
        index = T.bind((number * plan.blocks + block.x) * plan.items + block.tid // plan.vectors)

        def inside() -> None:
            column = T.bind(index % strips * plan.strip)
            rest = T.bind(index // strips)
            body(Tile(T.bind(rest // tiles), T.bind(rest % tiles * plan.rows), column))

        d.when(d.below(index, total, plan.rounds(work) * plan.blocks * plan.items == total), inside)

    if plan.rounds(work) == 1:
        one(0)
    else:
        with T.serial(0, plan.rounds(work)) as number:
            one(number)


@dataclasses.dataclass
class Vectors:
    """Raw vectors of channels of several maps, loaded ahead: `count` pixels."""

    block: Block
    maps: dict[str, MapType]
    channels: Channels
    raw: dict[str, Buffer]
    lanes: dict[str, Lanes]

    @staticmethod
    def make(block: Block, maps: dict[str, MapType], channels: Channels, count: int) -> Vectors:
        """Allocate registers for `count` pixels of the maps."""
        width = channels.count
        raw = {name: d.registers(count * words_of(kind, width), "uint32") for name, kind in maps.items()}
        return Vectors(block, maps, channels, raw, {name: Lanes.of(width, kind) for name, kind in maps.items()})

    def load(self, index: Expr, pixel: Expr, valid: Expr) -> None:
        """Start loading a pixel of each map as number `index`; zeros where not `valid`."""

        def load() -> None:
            for name, kind in self.maps.items():
                source = self.block.map(name, kind)
                at = index * words_of(kind, self.channels.count)
                place = source.at(pixel, self.channels.first)
                d.fetch(source, place, self.lanes[name], self.raw[name], at, self.channels.left)

        def clear() -> None:
            for name, kind in self.maps.items():
                count = words_of(kind, self.channels.count)
                d.zeros(self.raw[name], index * count, count)

        d.when(valid, load, clear)

    def unpack(self, index: Expr, into: dict[str, Buffer]) -> None:
        """Unpack number `index` to float32."""
        for name, kind in self.maps.items():
            unpack(self.raw[name], index, kind, self.channels.count, into[name])


def unpack(raw: Buffer, index: Expr, kind: MapType, width: int, into: Buffer) -> None:
    """Unpack `width` channels, stored as words from index*words on, to float32."""
    count = words_of(kind, width)
    if count * 4 > width * d.size_of(kind.dtype):  # one channel of 16 bits: the word's high half is nothing
        pair = d.registers(2)
        d.unpack(raw[index], kind.dtype, pair, 0)
        d.put(into, 0, pair[0])
        return
    for i in range(count):
        d.unpack(raw[index * count + i], kind.dtype, into, i * width // count)


@dataclasses.dataclass
class Window:
    """The registers of the module's docstring: values[row][column][channel]."""

    operand: Operand
    rows: Line
    columns: Line
    plan: Plan
    channels: Channels
    ahead: Vectors
    unpacked: dict[str, Buffer]
    coefficients: dict[str, Buffer]
    values: Buffer

    @staticmethod
    def make(block: Block, operand: Operand, lines: tuple[Line, Line], plan: Plan, channels: Channels) -> Window:
        """Allocate a window that is all zeros, and load the per-channel vectors of its prologue."""
        rows, columns = lines
        width, count = columns.width(plan.strip), channels.count
        values = d.registers(rows.extent * width * count)
        d.unrolled(rows.extent * width * count, lambda i: d.put(values, i, T.float32(0)))
        return Window(
            operand,
            rows,
            columns,
            plan,
            channels,
            Vectors.make(block, operand.maps, channels, rows.fresh * width),
            {name: d.registers(count) for name in operand.maps},
            {name: channels.vector(block[name]) for name in operand.vectors},
            values,
        )

    @property
    def width(self) -> int:
        """Count the columns of the window."""
        return self.columns.width(self.plan.strip)

    def at(self, row: Expr, column: Expr) -> Expr:
        """Find where the channels of a source begin in `values`."""
        return (row * self.width + column) * self.channels.count

    def _first_row(self, tile: Tile, number: Expr) -> Expr:
        """Find the first source row that slide `number` of a tile brings."""
        rows = self.rows
        return (tile.row + number - rows.lead) * rows.step + (rows.first + rows.extent - rows.fresh)

    def _is_column(self, tile: Tile, column: int) -> Expr:
        """Tell whether a column of the window is in the map."""
        line, strips = self.columns, -(-self.columns.units // self.plan.strip)
        low = line.first + column
        high = (strips - 1) * self.plan.strip * line.step + low
        if low >= 0 and high < line.source:
            return True
        return d.within(tile.column * line.step + low, line.source)

    def sweep(self, tile: Tile, units: int, visit: Visit, ask: Ask | None = None) -> None:
        """Emit `visit(tile, row)` for the rows of units of a tile, with the window in place.

        `ask(tile, row, wanted)` may start loads for a visit: it is called before the slide that leads to it.
        """
        lead = self.rows.lead
        count = T.bind(tirx.Min(units - tile.row, tirx.const(self.plan.rows, "int32")) + lead)
        self.prefetch(tile, T.int32(0))
        if ask is not None and not lead:
            ask(tile, tile.row, True)
        with T.serial(0, count) as number:
            self.slide(tile, number)
            self.prefetch(tile, number + 1, number + 1 < count)
            d.when(number >= lead if lead else True, lambda: visit(tile, T.bind(tile.row + number - lead)))
            if ask is not None:
                wanted = d.all_of(number + 1 >= lead if lead > 1 else True, number + 1 < count)
                ask(tile, T.bind(tile.row + number + (1 - lead)), wanted)

    def prefetch(self, tile: Tile, number: Expr, wanted: Expr = True) -> None:
        """Ask for what slide `number` brings."""
        rows, columns = self.rows, self.columns
        first = T.bind(self._first_row(tile, number))
        for r in range(rows.fresh):
            is_row = d.all_of(d.within(first + r, rows.source), wanted)
            line = T.bind((tile.image * rows.source + first + r) * columns.source + tile.column * columns.step)
            for c in range(self.width):
                valid = d.all_of(is_row, self._is_column(tile, c))
                self.ahead.load(r * self.width + c, line + (columns.first + c), valid)

    def slide(self, tile: Tile, number: Expr) -> None:
        """Move the window and fill in what `prefetch` asked for."""
        rows, row = self.rows, self.width * self.channels.count
        kept = (rows.extent - rows.fresh) * row
        if kept:
            d.unrolled(kept, lambda i: d.put(self.values, i, self.values[i + rows.fresh * row]))
        first = T.bind(self._first_row(tile, number))
        for r in range(rows.fresh):
            d.when(
                True if self._is_plain else d.within(first + r, rows.source),
                lambda r=r: self._fill(tile, r, kept + r * row),  # type: ignore[misc]
                lambda r=r: d.unrolled(row, lambda i: d.put(self.values, kept + r * row + i, T.float32(0))),  # type: ignore[misc]
            )

    @property
    def _is_plain(self) -> bool:
        """Tell whether the prologue leaves zeros as they are."""
        if self.operand.gradient:
            return "BatchNormGrad" not in self.operand.problem.spec.prologue
        return not {*self.operand.problem.spec.prologue} - {"Relu", "Add", "BatchNormGrad"}

    def _fill(self, tile: Tile, r: int, base: int) -> None:
        for c in range(self.width):
            self.ahead.unpack(r * self.width + c, self.unpacked)
            valid = True if self._is_plain else self._is_column(tile, c)
            if valid is not True:
                valid = T.bind(valid)

            def store(j: Expr, c: int = c, valid: Expr = valid) -> None:
                value = self.operand.value(self._loader(j))
                if valid is not True:
                    value = tirx.Select(valid, value, T.float32(0))
                d.put(self.values, base + c * self.channels.count + j, value)

            self.channels.each(store)

    def _loader(self, j: Expr) -> steps.Load:
        return lambda name, is_vector: (self.coefficients if is_vector else self.unpacked)[name][j]


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a thread's channels: registers [tap][channel], or shared memory [tap][channel of the block]."""

    buffer: Buffer
    row: int
    start: Expr

    @staticmethod
    def in_registers(block: Block, plan: Plan, channels: Channels, taps: int, total: int) -> Weights:
        """Load the thread's weights from OIHW, here [channel][tap], of `total` channels."""
        held = d.registers(taps * plan.lanes)
        for j in range(plan.lanes):

            def one(tap: Expr, j: int = j) -> None:
                at = (channels.first + j) * taps + tap
                d.put(held, tap * plan.lanes + j, _inside(block["weight"], at, channels.first + j, total, plan))

            d.unrolled(taps, one)
        return Weights(held, plan.lanes, 0)

    @staticmethod
    def in_shared(block: Block, plan: Plan, taps: int, total: int, memory: Buffer) -> Weights:
        """Load the block's weights from OIHW into shared memory (`memory`, float32); ends with a barrier."""
        row = plan.vectors * plan.lanes
        first = T.bind(block.y * row)

        def fill(i: Expr) -> None:
            value = _inside(block["weight"], first * taps + i, first + i // taps, total, plan)
            d.put(memory, i % taps * row + i // taps, value)

        block.each(taps * row, fill)
        d.sync()
        return Weights(memory, row, T.bind(block.tid % plan.vectors * plan.lanes))

    def of(self, tap: Expr, j: Expr) -> Expr:
        """Read the weight of a tap and of channel `j` of the thread."""
        return self.buffer[tap * self.row + self.start + j]


def _inside(source: Buffer, at: Expr, channel: Expr, total: int, plan: Plan) -> Expr:
    """Read source[at], or 0 where the channel does not exist."""
    if total % (plan.vectors * plan.lanes) == 0:
        return source[at]
    return tirx.if_then_else(channel < total, source[at], T.float32(0))


@dataclasses.dataclass
class Source:
    """Elements of a map after its prologue, straight from memory."""

    operand: Operand
    ahead: Vectors
    unpacked: dict[str, Buffer]
    coefficients: dict[str, Buffer]

    @staticmethod
    def make(block: Block, operand: Operand, channels: Channels) -> Source:
        """Allocate registers for one pixel, and load the per-channel vectors of the prologue."""
        return Source(
            operand,
            Vectors.make(block, operand.maps, channels, 1),
            {name: d.registers(channels.count) for name in operand.maps},
            {name: channels.vector(block[name]) for name in operand.vectors},
        )

    def values(self, pixel: Expr) -> Buffer:
        """Load a pixel and give its channels, behind the prologue, in registers."""
        made = d.registers(self.ahead.channels.count)
        self.ahead.load(0, T.bind(pixel), True)
        self.ahead.unpack(0, self.unpacked)
        self.ahead.channels.each(lambda j: d.put(made, j, self.operand.value(self._loader(j))))
        return made

    def value(self, pixel: Expr) -> Expr:
        """Load a pixel of a single channel and give its value."""
        return self.values(pixel)[0]

    def _loader(self, j: Expr) -> steps.Load:
        return lambda name, is_vector: (self.coefficients if is_vector else self.unpacked)[name][j]


def is_depthwise(weight: tuple[int, ...], group: int, channels: int) -> bool:
    """Tell whether every output channel of a convolution reads one input channel."""
    return len(weight) == 4 and weight[1] == 1 and group == channels and weight[0] % channels == 0
