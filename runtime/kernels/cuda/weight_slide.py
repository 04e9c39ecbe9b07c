"""The matrix product inside the weight gradient of windows of stride 1, such as 3x3: a tile slides over the pixels.

    dweight[o, tap, c] = sum over pixels of  dy[pixel, o] * x[pixel + distance(tap), c]

A block has 64 output by 64 input channels, all taps, and a share of the pixels, a run of them:

    for each step, a chunk of its pixels:
        dy, x:  global -> prologues -> shared, pixel by pixel (operand.py)     `ahead` steps are on their way meanwhile
        dy of 16 pixels: shared -> registers, read across, zeros where a tap is beyond the image; for each tap
            times x, straight from shared memory, from the row that lies the tap's distance away (wgmma.py)
    accumulators -> a row of `weight_partials` of its share

x lies in a ring of chunks, which is ahead of dy by what taps reach. So each pixel is brought, and goes through the
prologues, once a block, whatever the number of taps; and from shared memory tensor cores read 64 channels of x for each
64 by 64 products of a tap. The first 16 rows of the ring lie behind its last, too, where a product's 16 pixels would
run over the end.

A group of four warps has a row of the window; products of a step run while the next one goes through the prologues.
What dy is multiplied by beyond the image, a row of another image, is finite unless x is not: then so is dweight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda import wgmma
from bnfuse.runtime.kernels.cuda.device import Block, Expr
from bnfuse.runtime.kernels.cuda.operand import Loader, Operand, Slot, chunks_of, swizzled
from bnfuse.runtime.kernels.cuda.weight_sizes import SlideTile
from bnfuse.runtime.kernels.cuda.weight_tile import PixelOf, Rows, columns_before, place_of, put_pair

SIGNS = (0x9988, 0xBBAA)  # for prmt: the signs of bytes 0 and 1, and of 2 and 3, each over 16 bits
WORDS = 4  # of A
TILE = 64  # channels of either side


class SlideEmitter:
    """The stage under construction."""

    def __init__(self, block: Block, tile: SlideTile, gradient: Operand, source: Operand) -> None:
        self.block, self.tile, self.plan, self.c = block, tile, tile.plan, tile.correlation
        plan, c = self.plan, self.c
        outputs, inputs = tile.tiles
        self.shared = d.shared_memory(tile.shared, wgmma.ALIGN)
        self.store = self.shared.view("uint32")
        rest: Expr = block.x
        self.group: Expr
        self.first_input, rest = T.bind(rest % inputs * plan.inputs), rest // inputs
        self.first_output, rest = T.bind(rest % outputs * plan.outputs), rest // outputs
        self.group, rest = (T.bind(rest % c.groups), rest // c.groups) if c.groups > 1 else (0, rest)
        self.split = T.bind(rest)
        self.first = T.bind(self.split * tile.share)
        rows = partial(Rows, block, precision=tile.precision, threads=plan.threads, row_bytes=tile.row_bytes)
        self.gradient = rows(operand=gradient, rows=plan.pixels, ring=self.shared)
        self.source = rows(operand=source, rows=plan.pixels, ring=self.shared)
        self.taken = tuple(Halves(*of) for of in zip((self.gradient, self.source), tile.coefficients_at, strict=True))
        self.down = T.bind(d.of_warp(block.tid // wgmma.GROUP))  # the row of the window
        self.across = c.horizontal.window
        self.acc = d.registers(self.across * plan.inputs // 2)
        self.left = d.registers(2 * self.across * WORDS, "uint32")
        self.words, self.bits = d.registers(2 * WORDS, "uint32"), d.registers(2, "uint32")  # of two products
        self.address, self.masks = d.registers(1, "uint32"), d.registers(1, "int32")

    def run(self) -> None:
        """Emit the loop over the chunks of the block's share, then the store of its partials."""
        # the last share has all of its steps, too, of zeros: where a loop may be run no time at all, ptxas lets each
        # product wait for the one before
        steps, ahead, lead = self.tile.share, self.tile.ahead, self.tile.lead
        with T.serial(0, self.across * self.plan.inputs // 2, unroll=True) as i:
            d.put(self.acc, i, T.float32(0))
        for chunk in range(lead):
            self.fill_source(chunk)
        d.commit()
        self.keep_coefficients()
        for i in range(ahead):
            self.fill(i)
            d.commit()
        self.arrive(ahead)
        d.sync()
        for chunk in range(lead):
            self.finish_source(chunk)
        with T.serial(0, steps) as i:
            self.write_masks(i)
            self.arrive(ahead - 1)
            if not all(rows.loader.is_plain for rows in self.taken):
                wgmma.wait(1)  # the registers of dy that they hold are free then
            self.finish_gradient(i)
            self.finish_source(i + lead)
            wgmma.publish()
            d.sync()
            self.find(i)
            # not between products: branches there have the same effect
            d.when(i + ahead < steps, lambda: self.fill(i + ahead))
            d.commit()
            self.multiply(i)
        wgmma.wait()
        self.close()

    # -- filling ---------------------------------------------------------------------------------------------------

    def arrive(self, pending: int) -> None:
        """Wait for copies, but the latest `pending`, of all threads of the warp."""
        d.wait(pending)
        T.evaluate(T.cuda.warp_sync())

    def keep_coefficients(self) -> None:
        """Bring the coefficients of the tile's channels to shared memory, where they need neither pointers nor, from
        one step to the next, registers; zeros beyond the last channel."""
        store = self.shared.view("float32")
        sides = ((self.first_output, self.c.outputs), (self.first_input, self.c.inputs))
        for rows, (first, count) in zip(self.taken, sides, strict=True):
            for n, name in enumerate(rows.loader.coefficients):

                def bring(
                    i: Expr, at: int = rows.at // 4 + n * TILE, name: str = name, side: Any = (first, count)
                ) -> None:
                    channel = T.bind(side[0] + i)
                    source = self.block[name]
                    value = tirx.if_then_else(channel < side[1], source[self.group * side[1] + channel], T.float32(0))
                    d.put(store, at + i, value)

                self.block.each(TILE, bring)

    def fill(self, step: Expr) -> None:
        """Start bringing dy of the block's step, and the last chunk of x that it reads."""
        place = self.gradient_place(self.gradient)
        self.gradient.fetch(self.gradient_slots(self.gradient, step), self.gradient_pixels(step), *place)
        self.fill_source(step + self.tile.lead)

    def fill_source(self, chunk: Expr) -> None:
        """Start bringing the block's chunk of x."""
        place = self.source_place(self.source)
        self.source.fetch(self.source_slots(self.source, chunk), self.source_pixels(chunk), *place)

    def finish_gradient(self, step: Expr) -> None:
        """Take dy of a step through its prologue. Rows beyond the last pixel need not be zeros: masks see to them."""
        rows, pixels = self.taken[0], self.gradient_pixels(step)
        slots, place = self.gradient_slots(rows, step), self.gradient_place(rows)
        rows.finish(self.store, slots, pixels, self.c.outputs, *place, None)

    def finish_source(self, chunk: Expr) -> None:
        """Take a chunk of x through its prologue."""
        rows, pixels = self.taken[1], self.source_pixels(chunk)
        slots, place = self.source_slots(rows, chunk), self.source_place(rows)
        rows.finish(self.store, slots, pixels, self.c.inputs, *place, None)

    def gradient_place(self, rows: Rows) -> tuple[Expr, Expr | None]:
        """Find the first channel of dy that this thread has, and how many of its group are left."""
        return place_of(self.first_output, rows, self.group, self.c.outputs, self.plan.outputs)

    def source_place(self, rows: Rows) -> tuple[Expr, Expr | None]:
        """Find the first channel of x that this thread has, and how many of its group are left."""
        return place_of(self.first_input, rows, self.group, self.c.inputs, self.plan.inputs)

    def gradient_pixels(self, step: Expr) -> PixelOf:
        """Make the function that finds the pixel of a row of dy, and whether it exists."""
        first = T.bind((self.first + step) * self.plan.pixels)
        exact = self.c.rows == self.tile.shares * self.tile.share * self.plan.pixels
        return lambda row: (first + row, d.below(first + row, self.c.rows, exact))

    def source_pixels(self, chunk: Expr) -> PixelOf:
        """Make the function that finds the pixel of a row of x, and whether it exists."""
        first = T.bind((self.first + chunk) * self.plan.pixels - self.c.halo)

        def pixel(row: Expr) -> tuple[Expr, Expr]:
            index = T.bind(first + row)
            return index, d.within(index, self.c.rows)

        return pixel

    def gradient_slots(self, rows: Rows, step: Expr) -> Callable[[Expr], Slot]:
        """Make the function that finds the places of the passes of dy."""
        base = T.bind(self.tile.gradient_at + step % self.tile.buffers * self.tile.chunk_bytes)
        return self.slots(rows, base, 0, step % self.tile.ahead, False)

    def source_slots(self, rows: Rows, chunk: Expr) -> Callable[[Expr], Slot]:
        """Make the function that finds the places of the passes of x."""
        place = T.bind(chunk % self.tile.ring)
        turn = chunk % (self.tile.ahead + self.tile.lead)
        return self.slots(rows, T.bind(place * self.tile.chunk_bytes), 1, turn, place == 0)

    def slots(self, rows: Rows, base: Expr, which: int, turn: Expr, first: Expr) -> Callable[[Expr], Slot]:
        """Make the function that finds the places of the passes of a chunk at byte `base`.

        Further maps are in the chunks of `turn`; of the `first` chunk of the ring some rows lie behind the last, too.
        """
        tile = self.tile
        own = T.bind(tile.own_at[which] + turn * (tile.further[which] * tile.chunk_bytes))
        column = rows.lane * rows.width * 2  # bytes

        def slot(i: Expr) -> Slot:
            row = rows.row(i)
            twice = False if first is False else d.all_of(first, row < tile.again)
            at = base + place(row, column // d.VECTOR_BYTES) + column % d.VECTOR_BYTES
            return Slot(at, own + row * tile.row_bytes + column, tile.chunk_bytes, twice, tile.ring * tile.chunk_bytes)

        return slot

    # -- masks -----------------------------------------------------------------------------------------------------

    def write_masks(self, step: Expr) -> None:
        """Write which taps of the step's pixels lie in the image; a thread has a pixel and a row of the window."""
        v, h, pixels = self.c.vertical, self.c.horizontal, self.plan.pixels

        def write() -> None:
            row, own = T.bind(self.block.tid // pixels), T.bind(self.block.tid % pixels)
            pixel = T.bind((self.first + step) * pixels + own)
            y = T.bind(pixel // h.destination % v.destination + v.phases[0].base + row * v.step)
            x = T.bind(pixel % h.destination + h.phases[0].base)
            exists = T.bind(d.all_of(d.within(y, v.source), pixel < self.c.rows))
            mask: Expr = T.uint32(0)
            for tap in range(self.across):
                there = d.all_of(exists, d.within(x + tap * h.step, h.source))
                mask = tirx.bitwise_or(mask, tirx.Select(there, T.uint32(0x80 >> tap), T.uint32(0)))
            # a lane of A has two neighbouring pixels of the first eight of a product, and two of the last
            place = own // wgmma.DEPTH * wgmma.DEPTH + own % 8 // 2 * 4 + own % wgmma.DEPTH // 8 * 2 + own % 2
            at = self.masks_of(step) + row * pixels + place
            d.put(self.shared.view("uint8"), at, tirx.Cast("uint8", mask))

        d.when(self.block.tid < v.window * pixels, write)

    def masks_of(self, step: Expr) -> Expr:
        """Give the byte offset of a step's masks."""
        return self.tile.masks_at + step % 2 * self.tile.mask_bytes

    # -- multiplying -----------------------------------------------------------------------------------------------

    def find(self, step: Expr) -> None:
        """Find dy of a step, and its masks, and load those of its first product."""
        lane, tile = self.block.lane, self.tile
        base = tile.gradient_at + step % tile.buffers * tile.chunk_bytes
        row = lane // 16 * 8 + lane % 8
        address = self.shared.address + tirx.Cast("uint32", base + place(row, self.block.warp % 4 * 2 + lane // 8 % 2))
        d.put(self.address, 0, address)
        masks = self.masks_of(step) // 4 + self.down * (self.plan.pixels // 4) + lane % 4
        d.put(self.masks, 0, masks)
        self.load(0)

    def load(self, k: int) -> None:
        """Load dy and the masks of a product: before the one before is waited for, since it takes as long."""
        row = T.uint32(k * wgmma.DEPTH * self.tile.row_bytes)
        d.ldmatrix(self.words, k % 2 * WORDS, self.address[0] + row, transposed=True)
        d.put(self.bits, k % 2, self.store[self.masks[0] + k * wgmma.DEPTH // 4])

    def multiply(self, step: Expr) -> None:
        """Begin the products of a step."""
        tile, v, h = self.tile, self.c.vertical, self.c.horizontal
        ring = tile.ring * self.plan.pixels  # rows
        start = T.bind(
            step % tile.ring * self.plan.pixels
            + self.c.halo
            + (v.phases[0].base + self.down * v.step) * h.source
            + h.phases[0].base
        )
        products = self.plan.pixels // wgmma.DEPTH
        for k in range(products):
            if k + 1 < products:
                self.load(k + 1)
            wgmma.wait(1)  # what was begun from these registers
            for tap in range(self.across):
                for half, signs in enumerate(SIGNS):
                    mask = d.registers(1, "uint32")
                    bits = self.bits[k % 2] << T.uint32(tap)
                    T.evaluate(T.ptx["prmt.b32"](mask[0], bits, T.uint32(0), T.uint32(signs)))
                    for i in (2 * half, 2 * half + 1):
                        word = tirx.bitwise_and(self.words[k % 2 * WORDS + i], mask[0])
                        d.put(self.left, self.words_at(k, tap) + i, word)
            wgmma.fence()
            first = T.bind(start + k * wgmma.DEPTH)
            first = T.bind(tirx.Select(first >= ring, first - ring, first))
            base_of = T.bind(
                wgmma.across_rows(self.shared.address + tirx.Cast("uint32", first * tile.row_bytes), wgmma.ALIGN)
            )
            for tap in range(self.across):
                left = [self.left[self.words_at(k, tap) + i] for i in range(WORDS)]
                right = base_of + T.uint64(tap * h.step * tile.row_bytes >> 4)
                at = tap * self.plan.inputs // 2
                wgmma.multiply(tile.precision, self.acc, at, self.plan.inputs, left, right, across=(False, True))
            wgmma.commit()

    def words_at(self, k: int, tap: int) -> int:
        """Find the registers of dy for a tap: those of two products one behind the other differ."""
        return (k % 2 * self.across + tap) * WORDS

    # -- results ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the accumulators to partials [share][output][tap][input of its group]."""
        c, plan, lane = self.c, self.plan, self.block.lane
        partials = self.block["dweight" if self.tile.is_result else "weight_partials"]
        whole = c.merged == 1 and c.inputs % plan.inputs == 0
        for half in range(2):
            output = T.bind(self.first_output + self.block.warp % 4 * 16 + half * 8 + lane // 4)

            def rows(output: Expr = output, half: int = half) -> None:
                row = (self.split * c.groups + self.group) * c.outputs + output
                row = T.bind(row * c.taps + self.down * self.across)
                first = T.bind(self.first_input - columns_before(c, output))
                for tap in range(self.across):

                    def column(j: Expr, tap: int = tap) -> None:
                        inner = T.bind(first + j * 8 + lane % 4 * 2)
                        at = (tap * (plan.inputs // 8) + j) * 4 + half * 2
                        index = (row + tap) * c.own_inputs + inner
                        put_pair(partials, index, self.acc, at, inner, c.own_inputs, whole)

                    d.unrolled(plan.inputs // 8, column)

            d.when(d.below(output, c.outputs, c.outputs % plan.outputs == 0), rows)


class Halves(Rows):
    """The rows that a warp has copied on their way through the prologue, 8 bytes a thread.

    With half the channels the coefficients of a thread take half the registers, and are loaded half as often: from byte
    `at` of shared memory on.
    """

    def __init__(self, rows: Rows, at: int) -> None:
        loader, block = rows.loader, rows.loader.block
        self.at = at
        self.row_bytes, self.rows, self.ring, self.passes = rows.row_bytes, rows.rows, True, 2 * rows.passes
        self.lane, self.first, self.stride = block.tid % 16, block.warp * 4 + block.lane // 16, rows.stride
        self.loader = Loader.make(loader.operand, block, loader.precision, 1, loader.ring, loader.width // 2)

    def row(self, i: Expr) -> Expr:
        """Find the row that pass `i` takes in this thread."""
        return self.first + i % 2 * 2 + i // 2 * self.stride

    def load_coefficients(self, channel: Expr, aligned: bool, left: Expr | None) -> None:
        """Load the coefficients of the thread's channels."""
        assert self.loader.ring is not None
        store, width = self.loader.ring.view("float32"), self.loader.width
        for n, held in enumerate(self.loader.coefficients.values()):
            first = self.at // 4 + n * TILE + self.lane * width
            T.buffer_store(held, store[T.ramp(first, 1, width)], [T.ramp(0, 1, width)])


def place(row: Expr, chunk: Expr) -> Expr:
    """Give the byte offset of a chunk of a row, as products of warpgroups read it."""
    swizzle = swizzled(row, chunk, chunks_of(wgmma.ROW_BYTES))
    return row * wgmma.ROW_BYTES + swizzle * d.VECTOR_BYTES
