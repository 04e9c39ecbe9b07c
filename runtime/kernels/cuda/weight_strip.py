"""The weight gradient of a few input channels, such as an image's: an output row at a time, of which x is few lines.

    dweight[o, r, s, c] = sum over pixels of  dy[pixel, o] * x[pixel(r, s), c]

A block has a tile of output channels, the whole window, and a share of the output rows of all images:

    for each output row:
        dy:  global -> prologue -> shared, pixel by pixel (operand.py)     `ahead` rows are on their way meanwhile
        x:   the lines under the window's rows -> shared, between zeros that stay there
        shared -> tensor cores: dy read across, by x whose columns, s and c as one axis, lie side by side from a pixel's
            first tap on, so that neighbours overlap: each element is brought once, and read in place for all taps
    accumulators -> a row of `weight_partials` of its share

A warp has a row of the window, or, of small ones, every `ways`-th run of 16 pixels of it: a share of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr
from bnfuse.runtime.kernels.cuda.operand import Operand, Slot, chunks_of, swizzled
from bnfuse.runtime.kernels.cuda.weight_sizes import StripTile
from bnfuse.runtime.kernels.cuda.weight_tile import PixelOf, Rows, place_of

DEEP = 16  # pixels of a product


class StripEmitter:
    """The stage under construction."""

    def __init__(self, block: Block, tile: StripTile, gradient: Operand, source: Operand) -> None:
        self.block, self.tile, self.plan, self.c = block, tile, tile.plan, tile.correlation
        plan = self.plan
        self.shared = d.shared_memory(tile.shared)
        self.store = self.shared.view("uint32")
        outputs, _ = tile.tiles
        self.first_output = T.bind(block.x % outputs * plan.outputs)
        self.split = T.bind(block.x // outputs)
        self.first = T.bind(self.split * tile.share)
        self.gradient = Rows(block, gradient, tile.precision, plan.threads, tile.gradient_row, tile.rows, self.shared)
        self.source = block.map(source.plan.source, source.kind)
        self.down, self.way = T.bind(block.warp % plan.rows), T.bind(block.warp // plan.rows)
        self.fragments = plan.outputs // 16, self.c.flat_row // 8
        self.acc = d.registers(self.fragments[0] * self.fragments[1] * 4)

    def run(self) -> None:
        """Emit the loop over the rows of the block's share, then the store of its partials."""
        tile, ahead = self.tile, self.tile.ahead
        with T.serial(0, self.fragments[0] * self.fragments[1] * 4, unroll=True) as i:
            d.put(self.acc, i, T.float32(0))
        self.block.each(tile.lines_bytes // 4, lambda i: d.put(self.store, tile.lines_at // 4 + i, T.uint32(0)))
        d.sync()
        for i in range(ahead):
            self.fill(i)
            d.commit()
        with T.serial(0, tile.share) as i:
            d.wait(ahead - 1)
            place = place_of(self.first_output, self.gradient, 0, self.c.outputs, self.plan.outputs)
            slots, pixels = self.slots(i), self.pixels(i)
            keeps = self.gradient.loader.operand.plan.keeps_zero
            inside = None if keeps else lambda row: pixels(row)[1]
            self.gradient.finish(self.store, slots, pixels, self.c.outputs, *place, inside)
            d.sync()
            d.when(i + ahead < tile.share, lambda: self.fill(i + ahead))
            d.commit()
            self.multiply(i)
        self.close()

    # -- filling ---------------------------------------------------------------------------------------------------

    def fill(self, step: Expr) -> None:
        """Start bringing an output row of dy, and the lines of x under it."""
        place = place_of(self.first_output, self.gradient, 0, self.c.outputs, self.plan.outputs)
        self.gradient.fetch(self.slots(step), self.pixels(step), *place)
        tile, number = self.tile, T.bind(self.first + step)
        to = self.shared.address + tirx.Cast("uint32", tile.lines_at + step % tile.buffers * tile.lines.bytes)
        tile.lines.bring(self.block, self.source, T.bind(to), number, number < tile.steps)

    def pixels(self, step: Expr) -> PixelOf:
        """Make the function that finds the pixel of a row of dy, and whether it exists."""
        number = T.bind(self.first + step)
        whole = self.tile.steps == self.tile.share * self.plan.splits
        exists = d.below(number, self.tile.steps, whole)
        count = self.plan.pixels
        return lambda row: (number * count + row, d.all_of(exists, d.below(row, count, count == self.tile.rows)))

    def slots(self, step: Expr) -> Callable[[Expr], Slot]:
        """Make the function that finds the places of the passes of dy."""
        tile, rows = self.tile, self.gradient
        base = T.bind(step % tile.buffers * tile.gradient_bytes)
        own = T.bind(tile.own_at + step % tile.ahead * (tile.further * tile.own_bytes))

        def slot(i: Expr) -> Slot:
            mine = own + (i * self.plan.threads + self.block.tid) * d.VECTOR_BYTES
            return Slot(base + self.place(rows.row(i), rows.lane), mine, tile.own_bytes)

        return slot

    def place(self, row: Expr, chunk: Expr) -> Expr:
        """Give the byte offset of a chunk of a row of dy."""
        row_bytes = self.tile.gradient_row
        return row * row_bytes + swizzled(row, chunk, chunks_of(row_bytes)) * d.VECTOR_BYTES

    # -- multiplying -----------------------------------------------------------------------------------------------

    def multiply(self, step: Expr) -> None:
        """Add the products of an output row to the accumulators."""
        tile, lane, plan = self.tile, self.block.lane, self.plan
        gradient = T.bind(step % tile.buffers * tile.gradient_bytes)
        lines = T.bind(tile.lines_at + step % tile.buffers * tile.lines.bytes)
        halves, apart = self.shared.view("uint16"), tile.lines.apart
        # this lane's first pixel and column, in elements
        start = (lines + self.down * tile.lines.line_bytes) // 2 + tile.lines.first
        start = T.bind(start + lane % 4 * (2 * apart) + lane // 4)
        a, b = d.registers(self.fragments[0] * 4, "uint32"), d.registers(2, "uint32")
        runs = tile.rows // DEEP
        with T.serial(0, -(-runs // plan.ways)) as turn:
            run = T.bind(turn * plan.ways + self.way)

            def products() -> None:
                row = run * DEEP + lane // 16 * 8 + lane % 8
                for i in range(self.fragments[0]):
                    at = gradient + self.place(row, i * 2 + lane // 8 % 2)
                    d.ldmatrix(a, i * 4, self.shared.address + tirx.Cast("uint32", at), transposed=True)
                first = T.bind(start + run * (DEEP * apart))
                for j in range(self.fragments[1]):
                    for half in range(2):
                        self.read_pair(halves, first + (half * 8 * apart + j * 8), apart, b, half)
                    for i in range(self.fragments[0]):
                        d.mma(tile.precision, self.acc, (i * self.fragments[1] + j) * 4, a, i * 4, b, 0)

            d.when(d.below(run, runs, runs % plan.ways == 0), products)

    def read_pair(self, halves: Buffer, at: Expr, apart: int, into: Buffer, word: int) -> None:
        """Read a column of two neighbouring pixels."""
        low, high = (tirx.Cast("uint32", halves[at + pixel * apart]) for pixel in range(2))
        d.put(into, word, tirx.bitwise_or(low, high << T.uint32(16)))

    # -- results ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the accumulators to partials [share][output][flat]."""
        c, plan, lane, row = self.c, self.plan, self.block.lane, self.c.flat_row
        partials = self.block["weight_partials"]
        share = T.bind(self.split * plan.ways + self.way)
        for i in range(self.fragments[0]):
            for half in range(2):
                output = T.bind(self.first_output + i * 16 + half * 8 + lane // 4)

                def columns(output: Expr = output, i: int = i, half: int = half) -> None:
                    at = T.bind((share * c.outputs + output) * self.tile.depth + self.down * row + lane % 4 * 2)
                    for j in range(self.fragments[1]):
                        for k in range(2):
                            value = self.acc[(i * self.fragments[1] + j) * 4 + half * 2 + k]
                            d.put(partials, at + j * 8 + k, value)

                d.when(d.below(output, c.outputs, c.outputs % plan.outputs == 0), columns)
