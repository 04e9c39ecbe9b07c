"""The matrix product inside a convolution's weight gradient: pixels are what is summed over.

    dweight[o, tap, c] = sum over pixels of  dy[pixel, o] * x[pixel(tap), c]

A block has a tile of output by input channels (of all taps, or of one) and a share of the pixels:

    for each step, a chunk of its pixels:
        dy, x:  global -> prologues -> shared, pixel by pixel (operand.py)     `ahead` steps are on their way meanwhile
        shared -> tensor cores, read across: fragments are transposed on the way
    accumulators -> a row of `weight_partials` of its share

How x is read (gathering, with a halo, flat) is as in conv_tile.py. A second stage adds the shares in a fixed order; a
single one of a pointwise convolution, as of maps of a pixel, is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.correlation import Correlation, FlatView
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr
from bnfuse.runtime.kernels.cuda.exact import add_products, split_in_place
from bnfuse.runtime.kernels.cuda.operand import (
    Loader,
    Operand,
    Slot,
    chunks_of,
    element_size,
    flat_elements,
    read_ahead,
    swizzled,
)
from bnfuse.runtime.kernels.cuda.weight_sizes import WeightTile


class WeightEmitter:
    """The stage under construction."""

    def __init__(self, block: Block, tile: WeightTile, gradient: Operand, source: Operand) -> None:
        self.block, self.tile, self.plan, self.c = block, tile, tile.plan, tile.correlation
        plan, c = self.plan, self.c
        outputs, inputs = tile.tiles
        self.narrow = element_size(tile.precision) == 2  # two-byte elements: ldmatrix can transpose
        self.fragments = plan.outputs // plan.warps[0] // 16, plan.inputs // plan.warps[1] // 8
        self.shared = d.shared_memory(tile.shared)
        self.store = self.shared.view("uint32")
        self.tap: Expr
        self.group: Expr
        rest: Expr = block.x
        self.input_tile, rest = T.bind(rest % inputs), rest // inputs
        self.tap, rest = (T.bind(rest % tile.tap_blocks), rest // tile.tap_blocks) if tile.tap_blocks > 1 else (0, rest)
        self.output_tile, rest = T.bind(rest % outputs), rest // outputs
        self.group, rest = (T.bind(rest % c.groups), rest // c.groups) if c.groups > 1 else (0, rest)
        self.split = T.bind(rest)
        self.first_output = T.bind(self.output_tile * plan.outputs)
        self.first_input = T.bind(self.input_tile * plan.inputs)
        ring = self.shared if tile.ring else None
        self.gradient = Rows(block, gradient, tile.precision, plan.threads, tile.gradient_row, plan.pixels, ring)
        self.source = Rows(block, source, tile.precision, plan.threads, tile.source_row, tile.source_rows, ring)
        self.columns = self.fragments[1] * tile.taps
        self.flat = FlatView.of(c, source.maps.values())
        self.acc = d.registers(self.fragments[0] * self.columns * 4)
        self.warp_output = T.bind(block.warp // plan.warps[1])
        self.warp_input = T.bind(block.warp % plan.warps[1])

    def run(self) -> None:
        """Emit the loop over the chunks of the block's share, then the store of its partials."""
        with T.serial(0, self.fragments[0] * self.columns * 4, unroll=True) as i:
            d.put(self.acc, i, T.float32(0))
        if self.plan.read == "halo":
            zeros = self.tile.zeros_at // 4
            self.block.each(self.tile.source_row // 4, lambda i: d.put(self.store, zeros + i, T.uint32(0)))
        first = T.bind(self.split * self.tile.share)
        steps: Expr = self.tile.share
        if self.tile.steps % self.tile.share:
            steps = T.bind(tirx.Min(T.int32(self.tile.share), self.tile.steps - first))
        ahead = self.tile.ahead
        for i in range(ahead):
            known = i == 0 or isinstance(steps, int)
            d.when(True if known else i < steps, lambda i=i: self.fill(first + i, i))  # type: ignore[misc]
            d.commit()
        with T.serial(0, steps) as i:
            step = T.bind(first + i)
            side = T.bind(i % self.tile.buffers)
            d.wait(ahead - 1)
            self.finish(step, i, side)
            d.sync()
            d.when(i + ahead < steps, lambda: self.fill(step + ahead, i + ahead))
            d.commit()
            self.multiply(step, side)
        self.close()

    # -- filling ---------------------------------------------------------------------------------------------------

    def gradient_place(self) -> tuple[Expr, Expr | None]:
        """Find the first channel of dy that this thread brings, and how many of its group are left."""
        return place_of(self.first_output, self.gradient, self.group, self.c.outputs, self.plan.outputs)

    def source_place(self) -> tuple[Expr, Expr | None]:
        """Find the first channel of x that this thread brings, and how many of its group are left."""
        return place_of(self.first_input, self.source, self.group, self.c.inputs, self.plan.inputs)

    def slots(self, turn: Expr, base: Expr, rows: Rows, before: int) -> Callable[[Expr], Slot]:
        """Make the function that finds the places of the passes of the block's step `turn`.

        They are in the tile at byte `base`; own places lie behind `before` bytes of the step's.
        """
        own = self.tile.own_at + turn % self.tile.ahead * self.tile.own_step + before
        apart = rows.passes * self.plan.threads * d.VECTOR_BYTES

        def slot(i: Expr) -> Slot:
            place = base + self.place(rows.row(i), rows.lane, rows.row_bytes)
            return Slot(place, own + (i * self.plan.threads + self.block.tid) * d.VECTOR_BYTES, apart)

        return slot

    def gradient_slots(self, turn: Expr) -> Callable[[Expr], Slot]:
        """Make the function that finds the places of dy's passes of the block's step `turn`."""
        return self.slots(turn, turn % self.tile.buffers * self.tile.gradient_bytes, self.gradient, 0)

    def source_slots(self, turn: Expr) -> Callable[[Expr], Slot]:
        """Make the function that finds the places of x's passes of the block's step `turn`."""
        base = self.tile.buffers * self.tile.gradient_bytes + turn % self.tile.buffers * self.tile.source_bytes
        return self.slots(turn, base, self.source, self.tile.further[0] * self.tile.own_bytes[0])

    def fill(self, step: Expr, turn: Expr) -> None:
        """Start bringing a step of the pixels, the block's own number `turn`."""
        pixel = T.bind(step * self.plan.pixels)
        slots, source_slots = self.gradient_slots(turn), self.source_slots(turn)
        self.gradient.fetch(slots, self.gradient_pixels(pixel), *self.gradient_place())
        if self.plan.read == "flat":
            self.source.fetch_flat(lambda row, own: self.flat_elements(pixel + row, own))
        else:
            self.source.fetch(source_slots, self.source_pixels(pixel), *self.source_place())

    def gradient_pixels(self, first: Expr) -> PixelOf:
        """Make the function that finds the pixel of a row of dy, of a step whose first is `first`, and whether it
        exists."""
        return lambda row: (first + row, self.exists(first + row))

    def exists(self, row: Expr) -> Expr:
        """Tell whether there is a pixel `row` of dy."""
        return d.below(row, self.c.rows, self.c.rows % self.plan.pixels == 0)

    def source_pixels(self, first: Expr) -> PixelOf:
        """Make the function that finds the pixel of a row of x, of a step whose first pixel of dy is `first`."""

        def around(row: Expr) -> tuple[Expr, Expr]:
            index = T.bind(first - self.tile.halo + row)
            return index, d.within(index, self.c.rows)

        return around if self.plan.read == "halo" else lambda row: self.gathered(first + row)

    def gathered(self, row: Expr) -> tuple[Expr, Expr]:
        """Find the source pixel of pixel `row` of dy and the block's tap, and whether it exists."""
        return gathered(self.c, self.tap, row, self.exists(row))

    def flat_elements(self, row: Expr, own: Expr) -> Callable[[int], tuple[Expr, Expr, Expr]]:
        """Find the elements that this thread brings of the flat row of pixel `row` (operand.py)."""
        image, y, x = coordinates(self.c, row)
        first = T.bind(self.first_input + self.source.lane * self.source.width)
        return flat_elements(self.flat, first, image, y, x, d.all_of(own, self.exists(row)), self.group)

    def finish(self, step: Expr, turn: Expr, side: Expr) -> None:
        """Take what has been fetched through both prologues, into shared memory."""
        pixel = T.bind(step * self.plan.pixels)
        clean = self.c.rows % self.plan.pixels == 0 or self.gradient.loader.operand.plan.keeps_zero
        inside = None if clean else (lambda row: pixel + row < self.c.rows)
        slots = self.gradient_slots(turn)
        own = self.gradient_pixels(pixel)
        self.gradient.finish(self.store, slots, own, self.c.outputs, *self.gradient_place(), inside)
        base = self.tile.buffers * self.tile.gradient_bytes + side * self.tile.source_bytes
        if self.plan.read == "flat":
            first = T.bind((self.first_input + self.source.lane * self.source.width) % self.c.flat_row)
            inputs = self.c.inputs

            def channel_of(j: int) -> Expr:
                return self.group * inputs + (first + j) % inputs

            self.source.finish_flat(self.store, base, self.place, channel_of)
            return
        pads = self.plan.read == "gather" and not self.c.is_pointwise
        inside = (lambda row: self.gathered(pixel + row)[1]) if pads else None
        slots, around = self.source_slots(turn), self.source_pixels(pixel)
        self.source.finish(self.store, slots, around, self.c.inputs, *self.source_place(), inside)

    def place(self, row: Expr, chunk: Expr, row_bytes: int) -> Expr:
        """Give the byte offset of a chunk of a row: so that what a warp reads at once lies in different banks."""
        chunks = chunks_of(row_bytes)
        if self.narrow:
            return row * row_bytes + swizzled(row, chunk, chunks) * d.VECTOR_BYTES
        spread = max(min(chunks // 2, 4), 1)
        return row * row_bytes + tirx.bitwise_xor(chunk, row % spread * 2) * d.VECTOR_BYTES

    # -- multiplying -----------------------------------------------------------------------------------------------

    def multiply(self, step: Expr, side: Expr) -> None:
        """Add the products of the pixels of buffer `side` to the accumulators, for all taps of the block."""
        gradient = T.bind(side * self.tile.gradient_bytes)
        source = T.bind(self.tile.buffers * self.tile.gradient_bytes + side * self.tile.source_bytes)
        deep = 16 if self.narrow else 8  # pixels of one product
        a = d.registers(self.fragments[0] * 4, "uint32")
        b = d.registers(4, "uint32")
        low_a, low_b = d.registers(self.fragments[0] * 4, "uint32"), d.registers(4, "uint32")
        exact = self.tile.precision == "fp32"
        with T.serial(0, self.plan.pixels // deep) as k:
            d.unrolled(self.fragments[0], lambda i: self.read_gradient(a, i, gradient, k * deep))
            if exact:
                d.unrolled(self.fragments[0] * 4, lambda i: split_in_place(a, low_a, i))
            inside = self.masks(step, k * deep)
            for tap in range(self.tile.taps):
                distance = self.distance(tap)

                def pair(j: Expr, tap: int = tap, distance: int = distance) -> None:
                    self.read_source(b, j, source, k * deep, tap, distance, inside)
                    if exact:
                        for i in range(4):
                            split_in_place(b, low_b, i)

                    def fragment(i: Expr) -> None:
                        for half in range(2):
                            at = (i * self.columns + tap * self.fragments[1] + j * 2 + half) * 4
                            if exact:
                                add_products(self.acc, at, (a, low_a), i * 4, (b, low_b), half * 2)
                            else:
                                d.mma(self.tile.precision, self.acc, at, a, i * 4, b, half * 2)

                    d.unrolled(self.fragments[0], fragment)

                d.unrolled(self.fragments[1] // 2, pair)

    def distance(self, tap: int) -> int:
        """Count the rows of x in shared memory from that of a pixel's number to that of a tap; 0 without a halo."""
        if self.plan.read != "halo":
            return 0
        down, right = self.tap_distance(tap)
        return self.tile.halo + down * self.c.horizontal.source + right

    def tap_distance(self, tap: int) -> tuple[int, int]:
        """Count the rows and columns from a pixel of dy to the source pixel of a tap (`same` axes)."""
        v, h = self.c.vertical, self.c.horizontal
        return v.phases[0].base + tap // h.window * v.step, h.phases[0].base + tap % h.window * h.step

    def masks(self, step: Expr, first: Expr) -> list[Buffer]:
        """Find which taps of the pixels that this lane addresses lie in the image: bits, for each of its pixels."""
        if self.plan.read != "halo":
            return []
        v, h = self.c.vertical, self.c.horizontal
        rows = [self.narrow_row(first)] if self.narrow else [first + self.block.lane % 4 + 4 * i for i in range(2)]
        found = []
        for row in rows:
            pixel = T.bind(step * self.plan.pixels + row)
            y, x = T.bind(pixel // h.destination % v.destination), T.bind(pixel % h.destination)
            mask: Expr = T.uint32(0)
            for tap in range(self.tile.taps):
                down, right = self.tap_distance(tap)
                ok = tirx.And(d.within(y + down, v.source), d.within(x + right, h.source))
                mask = tirx.bitwise_or(mask, tirx.Select(ok, T.uint32(1 << tap), T.uint32(0)))
            held = d.registers(1, "uint32")
            d.put(held, 0, mask)
            found.append(held)
        return found

    def narrow_row(self, first: Expr) -> Expr:
        """Find the pixel whose row this lane gives to ldmatrix for x."""
        return first + self.block.lane // 8 % 2 * 8 + self.block.lane % 8

    def read_gradient(self, a: Buffer, i: Expr, base: Expr, first: Expr) -> None:
        """Read a fragment of dy, transposed: 16 output channels by the pixels of one product."""
        lane, row_bytes = self.block.lane, self.tile.gradient_row
        channel = self.warp_output * (self.plan.outputs // self.plan.warps[0]) + i * 16
        if self.narrow:
            row = first + lane // 16 * 8 + lane % 8
            at = base + self.place(row, channel // 8 + lane // 8 % 2, row_bytes)
            d.ldmatrix(a, i * 4, self.shared.address + tirx.Cast("uint32", at), transposed=True)
            return
        for word in range(4):
            own, row = channel + lane // 4 + word % 2 * 8, first + lane % 4 + word // 2 * 4
            d.put(a, i * 4 + word, self.store[(base + self.place(row, own // 4, row_bytes)) // 4 + own % 4])

    def read_source(
        self, b: Buffer, j: Expr, base: Expr, first: Expr, tap: int, distance: int, inside: list[Buffer]
    ) -> None:
        """Read two fragments of x: the pixels of one product, seen through a tap, by 16 input channels."""
        lane, row_bytes = self.block.lane, self.tile.source_row
        channel = self.warp_input * (self.plan.inputs // self.plan.warps[1]) + j * 16
        bit = T.uint32(1 << tap)
        if self.narrow:
            at = base + self.place(self.narrow_row(first) + distance, channel // 8 + lane // 16, row_bytes)
            if inside:
                at = tirx.Select(tirx.bitwise_and(inside[0][0], bit) != T.uint32(0), at, T.int32(self.tile.zeros_at))
            d.ldmatrix(b, 0, self.shared.address + tirx.Cast("uint32", at), transposed=True)
            return
        for word in range(4):
            own, row = channel + lane // 4 + word // 2 * 8, first + lane % 4 + word % 2 * 4 + distance
            at = (base + self.place(row, own // 4, row_bytes)) // 4 + own % 4
            if inside:
                known = tirx.bitwise_and(inside[word % 2][0], bit) != T.uint32(0)
                at = tirx.Select(known, at, T.int32(self.tile.zeros_at // 4))
            d.put(b, word, self.store[at])

    # -- results ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the accumulators to partials [share][output][tap][input of its group], or where they are the result."""
        c, plan, lane = self.c, self.plan, self.block.lane
        partials = self.block["dweight" if self.tile.is_result else "weight_partials"]
        taps, depth = (1, self.tile.depth) if plan.read == "flat" else (c.taps, c.own_inputs)
        whole = c.merged == 1 and self.tile.depth % plan.inputs == 0

        def fragment(i: Expr) -> None:
            for half in range(2):
                output = self.warp_output * (plan.outputs // plan.warps[0]) + i * 16 + half * 8 + lane // 4
                output = T.bind(self.first_output + output)

                def rows(output: Expr = output, half: int = half) -> None:
                    row = T.bind((self.split * c.groups + self.group) * c.outputs + output)
                    before = columns_before(c, output)

                    def column(j: Expr, tap: int) -> None:
                        inner = self.first_input + self.warp_input * (plan.inputs // plan.warps[1]) + j * 8
                        inner = T.bind(inner + lane % 4 * 2 - before)
                        own = self.tap if plan.read == "gather" else tap
                        at = (i * self.columns + tap * self.fragments[1] + j) * 4 + half * 2
                        index = (row * taps + own) * depth + inner
                        put_pair(partials, index, self.acc, at, inner, depth, whole)

                    for tap in range(self.tile.taps):
                        d.unrolled(self.fragments[1], partial(column, tap=tap))

                d.when(d.below(output, c.outputs, c.outputs % plan.outputs == 0), rows)

        d.unrolled(self.fragments[0], fragment)


def coordinates(c: Correlation, row: Expr) -> tuple[Expr, Expr, Expr]:
    """Find the image's first source pixel, and the source row and column of the first tap, of a pixel of dy."""
    v, h = c.vertical, c.horizontal
    image, rest = T.bind(row // (v.rows * h.rows)), T.bind(row % (v.rows * h.rows))
    y, x = rest // h.rows * v.mult + v.phases[0].base, rest % h.rows * h.mult + h.phases[0].base
    return image * (v.source * h.source), y, x


def gathered(c: Correlation, tap: Expr, row: Expr, exists: Expr) -> tuple[Expr, Expr]:
    """Find the source pixel of pixel `row` of dy (if it `exists`) and a tap, and whether there is one."""
    if c.is_pointwise:
        return row, exists
    v, h = c.vertical, c.horizontal
    image, y, x = coordinates(c, row)
    y = T.bind(y + tap // h.window * v.step)
    x = T.bind(x + tap % h.window * h.step)
    return image + y * h.source + x, d.all_of(exists, d.within(y, v.source), d.within(x, h.source))


def columns_before(c: Correlation, output: Expr) -> Expr:
    """Count the columns of a tile's group before those that an output has weights for.

    It is hidden from compilers, which make one store, of acc[a chosen index], of two stores of which one is done: then
    all sums are in local memory.
    """
    return 0 if c.merged == 1 else d.hidden(output // c.own_outputs * c.own_inputs)


def put_pair(partials: Buffer, index: Expr, acc: Buffer, at: Expr, inner: Expr, depth: int, whole: bool) -> None:
    """Store two neighbouring sums, of column `inner` and the next of `depth`: at once where rows have an even number.

    `whole`: there are both.
    """
    if depth % 2 == 0:
        pair = acc[T.ramp(at, 1, 2)]
        d.when(whole or d.within(inner, depth), lambda: T.buffer_store(partials, pair, [T.ramp(index, 1, 2)]))
        return
    for k in range(2):
        d.when(whole or d.within(inner + k, depth), partial(d.put, partials, index + k, acc[at + k]))


def place_of(first: Expr, rows: Rows, group: Expr, total: int, tile: int) -> tuple[Expr, Expr | None]:
    """Find the first channel (of the whole map) that this thread brings, and how many of its group are left."""
    inner = T.bind(first + rows.lane * rows.width)
    return T.bind(group * total + inner), None if total % tile == 0 else T.bind(total - inner)


Inside = Callable[[Expr], Expr]
PixelOf = Callable[[Expr], tuple[Expr, Expr]]  # of a row: its pixel, and whether it exists
Place = Callable[[Expr, Expr, int], Expr]


class Rows:
    """Rows of one operand on their way into shared memory: passes of all threads, a 16-byte chunk each.

    `lane` is which of a row's vectors a thread has.
    """

    def __init__(
        self,
        block: Block,
        operand: Operand,
        precision: str,
        threads: int,
        row_bytes: int,
        rows: int,
        ring: d.Shared | None,
    ) -> None:
        self.row_bytes, self.rows, self.ring = row_bytes, rows, ring is not None
        lanes = chunks_of(row_bytes)
        self.lane, self.first, self.stride = block.tid % lanes, block.tid // lanes, threads // lanes
        self.passes = -(-rows // self.stride)
        self.loader = Loader.make(operand, block, precision, self.passes, ring)

    @property
    def width(self) -> int:
        """Count the channels of a vector."""
        return self.loader.width

    def row(self, i: Expr) -> Expr:
        """Find the row that pass `i` brings in this thread."""
        return self.first + i * self.stride

    def own(self, i: Expr) -> Expr:
        """Tell whether the pass has a row for this thread."""
        return d.below(self.row(i), self.rows, self.rows % self.stride == 0)

    def fetch(
        self,
        slots: Callable[[Expr], Slot],
        pixel_of: PixelOf,
        channel: Expr,
        left: Expr | None,
    ) -> None:
        """Start bringing all rows; `pixel_of(row)` is a row's pixel, and whether it exists."""

        def copy(slot: Slot, pixel: Expr, valid: Expr) -> None:
            self.loader.copy(slot, pixel, channel, valid, left)
            if self.loader.is_plain:  # else it is what the prologue makes of it that goes to both places
                d.when(slot.twice, lambda: self.loader.copy(slot.second, pixel, channel, valid, left))

        def one(i: Expr) -> None:
            pixel, valid = pixel_of(self.row(i))
            if self.ring:
                d.when(self.own(i), lambda: copy(slots(i), pixel, valid))
            else:
                self.loader.fetch(i, pixel, channel, d.all_of(self.own(i), valid), left)

        d.unrolled(self.passes, one)

    def load_coefficients(self, channel: Expr, aligned: bool, left: Expr | None) -> None:
        """Load the per-channel vectors of the thread's channels, from `channel` on, `left` of which exist."""
        self.loader.load_coefficients(channel, aligned, left)

    def fetch_flat(self, elements_of: Callable[[Expr, Expr], Callable[[int], tuple[Expr, Expr, Expr]]]) -> None:
        """Start bringing all rows of a flat source.

        `elements_of(row, own)` gives the elements of the vector that this thread brings of a row.
        """
        d.unrolled(self.passes, lambda i: self.loader.fetch_flat(i, elements_of(self.row(i), self.own(i))))

    def finish(
        self,
        store: Buffer,
        slots: Callable[[Expr], Slot],
        pixel_of: PixelOf,
        total: int,
        channel: Expr,
        left: Expr | None,
        inside: Inside | None,
    ) -> None:
        """Take the rows through the prologue, into the tile; zeros where not `inside`."""
        if self.ring and self.loader.is_plain:
            return  # it lies there, and zeros where there is padding
        self.load_coefficients(channel, total % 4 == 0, left)
        words = self.loader.words

        def read(i: Expr, held: Expr) -> None:
            pixel, exists = pixel_of(self.row(i)) if self.loader.needs_pixels else (0, True)
            self.loader.read(held, slots(i), pixel, channel, exists, left)

        def take(i: Expr, held: Expr) -> None:
            slot, made = slots(i), self.loader.finish(held)
            if inside is not None:
                valid = inside(self.row(i))
                for word in range(words):
                    d.put(made, word, tirx.Select(valid, made[word], T.uint32(0)))

            def keep(slot: Slot) -> None:
                T.buffer_store(store, made[T.ramp(0, 1, words)], [T.ramp(slot.place // 4, 1, words)])

            keep(slot)
            d.when(slot.twice, lambda: keep(slot.second))

        if self.ring:
            read_ahead(self.passes, read, take, self.own)
        else:
            d.unrolled(self.passes, lambda i: d.when(self.own(i), lambda: take(i, i)))

    def finish_flat(self, store: Buffer, base: Expr, place: Place, channel_of: Callable[[int], Expr]) -> None:
        """Take flat rows through the prologue, to byte `base`; element j has the channel `channel_of(j)`."""
        self.loader.load_flat_coefficients(channel_of)

        def write(i: Expr) -> None:
            made = self.loader.finish(i, flat=True)
            at = (base + place(self.row(i), self.lane, self.row_bytes)) // 4
            T.buffer_store(store, made[T.ramp(0, 1, 4)], [T.ramp(at, 1, 4)])

        d.unrolled(self.passes, lambda i: d.when(self.own(i), lambda: write(i)))
