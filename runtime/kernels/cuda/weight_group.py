"""The matrix product inside the weight gradient of 1x1 windows and of gathered taps, by warpgroups.

    dweight[o, tap, c] = sum over pixels of  dy[pixel, o] * x[pixel(tap), c]

A block has a tile of output by input channels of one tap, and a share of the pixels:

    for each step, a chunk of its pixels:
        barrier                                   dy and x of the step are there
        dy of 16 pixels: shared -> registers, read across; times x, straight from shared memory (wgmma.py)
            which runs on while copies of later steps begin
            and the next step's dy and x go through the prologues, in shared memory (operand.py)
    accumulators -> a row of `weight_partials` of its share

dy and x lie as products read them: 64 channels of all pixels, a row of 128 bytes a pixel, then the next 64. A thread
has (here) the same few pixels of every 64 channels, so that it looks for each pixel's place once, and what it does to
one 64 differs by constants from what it does to the next. Coefficients of the channels are in shared memory from the
start.
"""

from __future__ import annotations

import dataclasses
import itertools

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda import wgmma
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr
from bnfuse.runtime.kernels.cuda.operand import Loader, Operand, Slot, chunks_of, read_ahead
from bnfuse.runtime.kernels.cuda.weight_sizes import GroupTile
from bnfuse.runtime.kernels.cuda.weight_slide import place
from bnfuse.runtime.kernels.cuda.weight_tile import columns_before, gathered, put_pair

LANES = chunks_of(wgmma.ROW_BYTES)
COLUMN = wgmma.ROW_BYTES // 2  # channels
WORDS = 4  # of A


@dataclasses.dataclass(frozen=True)
class Side:
    """dy or x, as this thread brings it."""

    loader: Loader
    columns: int  # 64 channels each
    turns: int  # of this thread, from that of its first vector, `lane`, on
    lane: Expr
    row: Expr  # its first pixel of a step, of `rows` that are `stride` apart
    rows: int
    stride: int
    start: Expr  # its first pixel of all
    first: Expr  # channel of the tile, in its group
    channel: Expr  # this thread's first, in the whole map
    left: Expr | None  # how many of the group there are from there on (None: enough)
    total: int  # channels of a group
    at: int  # bytes, here and below
    bytes: int
    own_at: int
    coefficients_at: int
    buffers: int
    further: int

    def left_at(self, column: int) -> Expr | None:
        """Count the channels there are from the thread's first of a column on."""
        return None if self.left is None else self.left - column * COLUMN


class GroupEmitter:
    """The stage under construction."""

    # groups of products that may run on behind a step: not its first, whose registers the next step loads
    left_running = 1

    def __init__(self, block: Block, tile: GroupTile, gradient: Operand, source: Operand) -> None:
        self.block, self.tile, self.plan, self.c = block, tile, tile.plan, tile.correlation
        plan, c = self.plan, self.c
        outputs, inputs = tile.tiles
        self.shared = d.shared_memory(tile.shared, wgmma.ALIGN)
        self.store, self.floats = self.shared.view("uint32"), self.shared.view("float32")
        self.tap: Expr
        self.group: Expr
        rest: Expr = block.x
        first_input, rest = T.bind(rest % inputs * plan.inputs), rest // inputs
        self.tap, rest = (T.bind(rest % c.taps), rest // c.taps) if c.taps > 1 else (0, rest)
        first_output, rest = T.bind(rest % outputs * plan.outputs), rest // outputs
        self.group, rest = (T.bind(rest % c.groups), rest // c.groups) if c.groups > 1 else (0, rest)
        self.split = T.bind(rest)
        self.first = T.bind(self.split * (tile.share * plan.pixels))  # pixel of the block
        self.gradient = self.side(0, gradient, first_output, c.outputs, plan.outputs)
        self.source = self.side(1, source, first_input, c.inputs, plan.inputs)
        self.exact = c.rows == tile.shares * tile.share * plan.pixels
        # where a pixel or its tap does not exist one side has to be zeros, whatever the other is: those that were
        # copied, or else those that are put there
        kept = any(side.loader.operand.plan.keeps_zero for side in (self.gradient, self.source))
        self.cleared = (
            None if kept or (self.exact and c.is_pointwise) else min(self.sides, key=lambda side: side.columns)
        )
        self.inside = d.registers(1, "uint32")  # bits: which of the thread's pixels exist, the latest step's last
        warpgroup = d.of_warp(block.tid // wgmma.GROUP)
        self.down, self.across = T.bind(warpgroup // plan.groups[1]), T.bind(warpgroup % plan.groups[1])
        self.width = plan.inputs // plan.groups[1]  # of a product
        self.deep = plan.outputs // (plan.groups[0] * wgmma.ROWS)  # products of a warpgroup, one below the other
        self.acc = d.registers(self.deep * self.width // 2)
        self.left = d.registers(plan.pixels // wgmma.DEPTH * WORDS, "uint32")

    def side(self, which: int, operand: Operand, first: Expr, total: int, width: int) -> Side:
        """Find what this thread brings of dy, 0, or of x, 1: a tile of `width` channels, of `total` of a group."""
        tile = self.tile
        loader = Loader.make(operand, self.block, tile.precision, 1, self.shared)
        columns, lanes = tile.columns[which], self.lanes(which)
        lane, row = self.block.tid % lanes, T.bind(self.block.tid // lanes)
        stride = self.plan.threads // lanes
        rows, start = self.plan.pixels // stride, T.bind(self.first + row)
        inner = T.bind(first + lane * loader.width)
        channel = T.bind(self.group * total + inner)
        left = None if total % width == 0 else T.bind(total - inner)
        sizes = (tile.at, tile.bytes, tile.own_at, tile.coefficients_at, tile.buffers, tile.further)
        mine = (columns * LANES // lanes, lane, row, rows, stride, start)
        return Side(loader, columns, *mine, first, channel, left, total, *(size[which] for size in sizes))

    def lanes(self, which: int) -> int:
        """Count the vectors of dy, 0, or of x, 1, that threads bring side by side: of 64 channels, so that a thread has
        the same pixels of all, and of both sides."""
        return LANES

    @property
    def sides(self) -> tuple[Side, Side]:
        """Give dy and x."""
        return self.gradient, self.source

    def run(self) -> None:
        """Emit the loop over the chunks of the block's share, then the store of its partials."""
        # the last share has all of its steps, too, of zeros: where a loop may be run no time at all, ptxas lets each
        # product wait for the one before
        steps, ahead = self.tile.share, self.tile.ahead
        with T.serial(0, self.deep * self.width // 2, unroll=True) as i:
            d.put(self.acc, i, T.float32(0))
        d.put(self.inside, 0, T.uint32(0))
        self.prepare()
        for step in range(ahead):
            self.make_room()
            self.fill(step)
            d.commit()
        for side in self.sides:
            self.keep_coefficients(side)
        d.wait(ahead - 1)
        d.sync()
        self.finish(0)
        wgmma.publish()
        with T.serial(0, steps) as step:
            d.sync()
            self.begin_products(step)
            self.make_room()
            d.when(step + ahead < steps, lambda: self.fill(step + ahead))
            d.commit()
            self.between(step)
            d.wait(ahead - 1)
            wgmma.wait(self.left_running)
            d.when(step + 1 < steps, lambda: self.finish(step + 1))
            wgmma.publish()
        wgmma.wait()
        self.close()

    def prepare(self) -> None:
        """Start bringing what all steps need: nothing else."""

    def between(self, step: Expr) -> None:
        """Do what is to be done while a step's products run: nothing else."""

    # -- filling ---------------------------------------------------------------------------------------------------

    def keep_coefficients(self, side: Side) -> None:
        """Bring the coefficients of a prologue to shared memory."""
        for n, name in enumerate(side.loader.coefficients):
            self.keep(side, name, side.coefficients_at + n * side.columns * COLUMN * 4)

    def keep(self, side: Side, name: str, at: int) -> None:
        """Bring a per-channel vector of the tile's channels to byte `at` of shared memory, zeros beyond the last.

        Of 64 channels the first four of each eight lie side by side, then the others: threads that load a vector each
        meet no bank twice.
        """

        def bring(i: Expr) -> None:
            channel = T.bind(side.first + i)
            value = self.block[name][self.group * side.total + channel]
            exists = d.below(channel, side.total, side.left is None)
            place = at // 4 + i // COLUMN * COLUMN + i % 8 // 4 * (COLUMN // 2) + i % COLUMN // 8 * 4 + i % 4
            d.put(self.floats, place, value if exists is True else tirx.if_then_else(exists, value, T.float32(0)))

        self.block.each(side.columns * COLUMN, bring)

    def slot(self, side: Side, step: Expr, column: int, row: int) -> Slot:
        """Find the places of this thread's vector of a pixel of the step: that `column` times 64 channels on."""
        moved = column * self.tile.chunk_bytes + row * side.stride * self.tile.row_bytes
        of_lane = side.lane // LANES * self.tile.chunk_bytes + place(side.row, side.lane % LANES)
        at = T.bind(side.at + step % side.buffers * side.bytes + of_lane)
        own = T.bind(
            side.own_at + step % self.tile.ahead * (side.further * side.bytes) + self.block.tid * d.VECTOR_BYTES
        )
        turn = column * side.rows + row
        return Slot(at + moved, own + turn * self.plan.threads * d.VECTOR_BYTES, side.bytes)

    def pixel(self, side: Side, step: Expr, row: int) -> tuple[Expr, Expr]:
        """Find the pixel (of dy) of one of this thread's rows of a side, and whether it exists."""
        pixel = T.bind(side.start + step * self.plan.pixels + row * side.stride)
        return pixel, d.below(pixel, self.c.rows, self.exact)

    def make_room(self) -> None:
        """Move the bits of the steps before."""
        if self.cleared is not None:
            d.put(self.inside, 0, self.inside[0] << T.uint32(self.gradient.rows))

    def fill(self, step: Expr) -> None:
        """Start bringing dy and x of a step."""
        for row in range(self.gradient.rows):
            pixel, exists = self.pixel(self.gradient, step, row)
            found, valid = gathered(self.c, self.tap, pixel, exists)
            held = d.registers(1, "int32")
            d.put(held, 0, found)
            if self.cleared is not None:
                bit = tirx.Select(valid, T.uint32(1 << row), T.uint32(0))
                d.put(self.inside, 0, tirx.bitwise_or(self.inside[0], bit))
                valid = self.is_inside(row)
            self.copy(self.gradient, step, row, pixel, valid)
            self.copy(self.source, step, row, held[0], valid)

    def copy(self, side: Side, step: Expr, row: int, pixel: Expr, valid: Expr) -> None:
        """Start bringing all this thread has of a pixel."""
        for column in range(side.turns):
            slot, channel = self.slot(side, step, column, row), side.channel + column * COLUMN
            side.loader.copy(slot, pixel, channel, valid, side.left_at(column))

    def is_inside(self, bit: int) -> Expr:
        """Tell whether a pixel exists, and its tap."""
        return tirx.bitwise_and(self.inside[0], T.uint32(1 << bit)) != T.uint32(0)

    def is_kept(self, step: Expr, row: int) -> Expr:
        """Tell of the step that is taken through the prologues whether a pixel exists, and its tap."""
        filled_since = (self.tile.ahead - 1) * self.gradient.rows  # bits
        return self.is_inside(filled_since + row)

    def finish(self, step: Expr) -> None:
        """Take dy and x of a step through the prologues."""
        for side in self.sides:
            self.finish_side(side, step)

    def finish_side(self, side: Side, step: Expr) -> None:
        """Take one of them through its prologue."""
        loader = side.loader
        if loader.is_plain:
            return
        for column in range(side.turns):
            self.load_coefficients(side, column)

            def read(row: int, held: int, column: int = column) -> None:
                pixel, exists = self.pixel(side, step, row) if loader.needs_pixels else (0, True)
                if loader.needs_pixels and side is self.source:
                    pixel, exists = gathered(self.c, self.tap, pixel, exists)
                slot, channel = self.slot(side, step, column, row), side.channel + column * COLUMN
                loader.read(held, slot, pixel, channel, exists, side.left_at(column))

            def use(row: int, held: int, column: int = column) -> None:
                made = loader.finish(held)
                if side is self.cleared:
                    valid = self.is_kept(step, row)
                    for word in range(loader.words):
                        d.put(made, word, tirx.Select(valid, made[word], T.uint32(0)))
                first = self.slot(side, step, column, row).place // 4
                T.buffer_store(self.store, made[T.ramp(0, 1, loader.words)], [T.ramp(first, 1, loader.words)])

            read_ahead(side.rows, read, use)

    def load_coefficients(self, side: Side, column: int) -> None:
        """Load the coefficients of the thread's channels."""
        for n, held in enumerate(side.loader.coefficients.values()):
            self.load_kept(held, side.coefficients_at + n * side.columns * COLUMN * 4, side.lane + column * LANES)

    def load_kept(self, held: Buffer, at: int, vector: Expr) -> None:
        """Load the coefficients of a vector of channels from where `keep` brought them."""
        first = at // 4 + vector // LANES * COLUMN + vector % LANES * 4
        for half in range(2):
            place = first + half * (COLUMN // 2)
            T.buffer_store(held, self.floats[T.ramp(place, 1, 4)], [T.ramp(half * 4, 1, 4)])

    # -- multiplying -----------------------------------------------------------------------------------------------

    def begin_products(self, step: Expr) -> None:
        """Begin the products of a step."""
        tile, lane = self.tile, self.block.lane
        gradient = self.gradient.at + step % self.gradient.buffers * self.gradient.bytes + self.down * tile.chunk_bytes
        chunk = self.block.warp % 4 * 2 + lane // 8 % 2
        row = lane // 16 * 8 + lane % 8
        address = T.bind(self.shared.address + tirx.Cast("uint32", gradient + place(row, chunk)))
        right = self.source_across(step)
        deep = wgmma.DEPTH * tile.row_bytes  # bytes of a product's pixels
        products = range(self.plan.pixels // wgmma.DEPTH)
        first, second = products[:1], products[1:]
        # the second part's dy is loaded while the first is multiplied; what is done between two steps hides behind it
        for part in (first, second):
            for k in part:
                d.ldmatrix(self.left, k * WORDS, address + T.uint32(k * deep), transposed=True)
            wgmma.fence()
            for k in part:
                left = [self.left[k * WORDS + i] for i in range(WORDS)]
                own = right + T.uint64(k * deep >> 4)
                wgmma.multiply(tile.precision, self.acc, 0, self.width, left, own, across=(False, True))
            wgmma.commit()
            if part is first:
                wgmma.wait(1)  # the step before, whose registers are loaded next

    def source_across(self, step: Expr) -> Expr:
        """Describe x of the step, the warpgroup's channels of it, to be read across its rows."""
        columns, rest = self.across * self.width // COLUMN, self.across * self.width % COLUMN
        at = self.source.at + step % self.source.buffers * self.source.bytes
        at += columns * self.tile.chunk_bytes + rest * 2
        return T.bind(wgmma.across_rows(self.shared.address + tirx.Cast("uint32", at), self.tile.chunk_bytes))

    # -- results ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the accumulators to partials [share][output][tap][input of its group], or where they are the result."""
        c, plan, lane = self.c, self.plan, self.block.lane
        partials = self.block["dweight" if self.tile.is_result else "weight_partials"]
        whole = c.merged == 1 and c.inputs % plan.inputs == 0
        first = T.bind(self.source.first + self.across * self.width + lane % 4 * 2)
        for block, half in itertools.product(range(self.deep), range(2)):
            output = (self.down * self.deep + block) * wgmma.ROWS + self.block.warp % 4 * 16 + half * 8 + lane // 4
            output = T.bind(self.gradient.first + output)

            def row(output: Expr = output, before: int = block * self.width // 2 + half * 2) -> None:
                row = (self.split * c.groups + self.group) * c.outputs + output
                start = T.bind((row * c.taps + self.tap) * c.own_inputs)
                own = T.bind(first - columns_before(c, output))

                def column(j: Expr) -> None:
                    inner, at = own + j * 8, before + j * 4
                    put_pair(partials, start + inner, self.acc, at, inner, c.own_inputs, whole)

                d.unrolled(self.width // 8, column)

            d.when(d.below(output, c.outputs, c.outputs % plan.outputs == 0), row)
