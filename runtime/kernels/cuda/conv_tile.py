"""The matrix product inside a convolution: a tile of destination pixels by output channels, on the tensor cores.

    for each step, a chunk of channels (of a tap):
        source pixels:   global -> prologue -> shared (operand.py)      `ahead` steps are on their way meanwhile
        packed weights:  global -> shared, in the background
        shared -> tensor cores, accumulators in registers
    accumulators -> shared -> epilogue: a vector of channels of a pixel at a time

Three ways to read the source. A *gathering* tile takes one tap at a time: any stride, size and padding. A *halo* tile
holds a run of pixels of the flattened map, or of wide maps a patch of an image, and those around it that taps reach, so
that the prologue is applied once and all taps read from shared memory; it needs source and destination of the same
size. A tap outside of the image reads a row of zeros. A *flat* tile, for maps of a few channels such as images where
these cannot be read by lines (conv_lines.py), takes a row of taps with their channels as one axis.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.conv_places import Places
from bnfuse.runtime.kernels.cuda.conv_sizes import Tile
from bnfuse.runtime.kernels.cuda.correlation import FlatView
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
    vector_width,
)
from bnfuse.runtime.kernels.cuda.vector import ForwardEpilogue, epilogue_of
from bnfuse.runtime.kernels.kernel import Problem

FAR = -(1 << 20)  # a coordinate outside of every map
PASSES = 4  # pixels whose epilogue's operands a thread has on their way at a time: chosen by hand


class Emitter:
    """The stage under construction: where this block and thread are, and the registers they hold."""

    def __init__(self, block: Block, tile: Tile, operand: Operand) -> None:
        c, plan = tile.correlation, tile.plan
        self.block, self.tile, self.plan, self.c = block, tile, plan, c
        self.fragments = plan.pixels // plan.warps[0] // 16, plan.outputs // plan.warps[1] // 8
        self.shared = d.shared_memory(tile.shared, tile.align)
        self.store = self.shared.view("uint32")
        # output tiles of the same pixels are neighbours in the grid: they share the source through the cache
        inner = tile.output_tiles * c.groups
        self.output_tile = T.bind(block.x % tile.output_tiles)
        self.group = T.bind(block.x // tile.output_tiles % c.groups) if c.groups > 1 else 0
        self.row = T.bind(block.x // inner)  # of the partials
        self.where = Places.of(tile, self.row)
        self.first_output = self.output_tile * plan.outputs
        self.chunk_lanes = chunks_of(plan.row_bytes)
        self.source_lane, self.source_row = block.tid % self.chunk_lanes, block.tid // self.chunk_lanes
        self.stride = plan.threads // self.chunk_lanes  # rows that one pass of all threads brings
        self.passes = tile.passes
        self.loader = Loader.make(operand, block, tile.precision, self.passes, self.shared if tile.ring else None)
        self.flat = FlatView.of(c, operand.maps.values())
        self.acc = d.registers(self.fragments[0] * self.fragments[1] * 4)
        self.warp_pixel = T.bind(block.warp // plan.warps[1])
        self.warp_output = T.bind(block.warp % plan.warps[1])

    def run(self, problem: Problem) -> None:
        """Emit the loop over the steps, then the epilogue of `problem`."""
        with T.serial(0, self.fragments[0] * self.fragments[1] * 4, unroll=True) as i:
            d.put(self.acc, i, T.float32(0))
        steps: Expr = self.tile.steps
        if self.plan.halo:
            self.prepare_halo()
        else:
            self.prepare_gather()
        if self.plan.read == "gather":
            taps = self.where.phase_value(self.c.vertical, self.c.horizontal, lambda v, h: v.count * h.count)
            steps = taps * self.tile.chunks
        self.steps(steps)
        d.wait(0)
        d.sync()
        self.close(problem)

    def steps(self, steps: Expr) -> None:
        """Emit the loop over so many steps."""
        self.fill_ahead(steps)
        with T.serial(0, steps) as step:
            side = T.bind(step % self.tile.buffers)
            d.wait(self.tile.ahead - 1)
            self.finish(step, side)
            d.sync()
            d.when(step + self.tile.ahead < steps, lambda: self.fill(step + self.tile.ahead))
            d.commit()
            self.multiply(side)

    def fill_ahead(self, steps: Expr) -> None:
        """Start what is on its way before the first step."""
        certain = self.plan.read != "gather" or self.where.every_phase_has_taps
        for step in range(self.tile.ahead):
            known = (step == 0 and certain) or (isinstance(steps, int) and step < steps)
            d.when(True if known else step < steps, lambda step=step: self.fill(step))  # type: ignore[misc]
            d.commit()

    # -- shared memory ---------------------------------------------------------------------------------------------

    def source_at(self, side: Expr) -> Expr:
        """Give the byte offset of the source in buffer `side` of shared memory."""
        return self.tile.sources_at + side * self.tile.source_bytes

    def weight_at(self, side: Expr) -> Expr:
        """Give the byte offset of the weights in buffer `side` of shared memory."""
        return self.tile.weights_at + side * self.tile.weight_bytes

    def chunk_at(self, row: Expr, chunk: Expr) -> Expr:
        """Give the byte offset of a 16-byte chunk of a row, counted from the first row."""
        return row * self.plan.row_bytes + swizzled(row, chunk, self.chunk_lanes) * d.VECTOR_BYTES

    # -- filling ---------------------------------------------------------------------------------------------------

    def prepare_halo(self) -> None:
        """Zero the row of zeros; find out which taps of this thread's rows lie in the image."""
        self.block.each(self.plan.row_bytes // 4, lambda i: d.put(self.store, self.tile.zeros_at // 4 + i, T.uint32(0)))
        v, h = self.c.vertical, self.c.horizontal
        self.inside = d.registers(self.fragments[0], "uint32")

        def rows(i: Expr) -> None:
            row = T.bind(self.where.pixel(self.fragment_row(i)))
            y, x = T.bind(row // h.destination % v.destination), T.bind(row % h.destination)
            mask: Expr = T.uint32(0)
            for tap in range(self.tile.taps):
                dy, dx = self.where.tap_distance(tap)
                ok = tirx.And(d.within(y + dy, v.source), d.within(x + dx, h.source))
                mask = tirx.bitwise_or(mask, tirx.Select(ok, T.uint32(1 << tap), T.uint32(0)))
            d.put(self.inside, i, mask)

        d.unrolled(self.fragments[0], rows)

    def prepare_gather(self) -> None:
        """Keep for each pass the image's first source pixel, and the source row and column of the first tap."""
        if self.c.is_pointwise:
            return
        v, h = self.c.vertical, self.c.horizontal
        self.images, self.ys, self.xs = (d.registers(self.passes, "int32") for _ in range(3))
        base_y = self.where.phase_value(v, h, lambda p, _: p.base)
        base_x = self.where.phase_value(v, h, lambda _, p: p.base)

        def one(i: Expr) -> None:
            image, y, x, valid = self.where.destination(T.bind(self.where.first + self.source_row + i * self.stride))
            d.put(self.images, i, image * (v.source * h.source))
            start = y * v.mult + base_y
            d.put(self.ys, i, start if valid is True else tirx.Select(valid, start, T.int32(FAR)))
            d.put(self.xs, i, x * h.mult + base_x)

        d.unrolled(self.passes, one)

    def fill(self, step: Expr) -> None:
        """Start bringing the source and the weights of a step."""
        side = step % self.tile.buffers
        if self.plan.halo:
            self.fill_weights(step, 0, self.weight_at(side))
            self.fetch(step, step, lambda i: self.halo_pixel(i))
            return
        if self.plan.read == "flat":
            self.fill_weights(step, 0, self.weight_at(side))
            d.unrolled(self.passes, lambda i: self.loader.fetch_flat(i, self.flat_elements(step, i)))
            return
        tap, chunk = step // self.tile.chunks, step % self.tile.chunks
        v, h = self.c.vertical, self.c.horizontal
        across = self.where.phase_value(v, h, lambda _, p: max(p.count, 1))
        down, right = T.bind(tap // across), T.bind(tap % across)
        first = self.where.phase_value(v, h, lambda p, q: p.tap * h.window + q.tap)
        window_tap = first + down * (v.tap_step * h.window) + right * h.tap_step
        self.fill_weights(chunk, window_tap, self.weight_at(side))
        self.fetch(step, chunk, lambda i: self.gathered_pixel(i, down * v.step, right * h.step))

    def halo_pixel(self, i: Expr) -> tuple[Expr, Expr]:
        """Find the source pixel of pass `i` of a halo tile, and whether map and tile have it."""
        row = self.source_row + i * self.stride
        pixel, inside = self.where.source_pixel(row)
        return pixel, d.all_of(inside, d.below(row, self.tile.source_rows, self.tile.source_rows % self.stride == 0))

    def gathered_pixel(self, i: Expr, down: Expr, right: Expr) -> tuple[Expr, Expr]:
        """Find the source pixel of pass `i` and a tap, and whether map and tile have it.

        The tap is `down` rows and `right` columns from the first one.
        """
        v, h = self.c.vertical, self.c.horizontal
        row = self.source_row + i * self.stride
        own = d.below(row, self.plan.pixels, self.plan.pixels % self.stride == 0)
        if self.c.is_pointwise:
            pixel = self.where.first + row
            return pixel, d.all_of(own, d.below(pixel, self.c.rows, self.c.rows % self.plan.pixels == 0))
        y, x = T.bind(self.ys[i] + down), T.bind(self.xs[i] + right)
        return self.images[i] + y * h.source + x, d.all_of(own, d.within(y, v.source), d.within(x, h.source))

    def flat_elements(self, chunk: Expr, i: Expr) -> Callable[[int], tuple[Expr, Expr, Expr]]:
        """Find for each element of a flat vector a pixel, the channel from there, and whether it is in the image."""
        first = T.bind(chunk * self.tile.channels + self.source_lane * self.loader.width)
        row = self.source_row + i * self.stride
        own = d.below(row, self.plan.pixels, self.plan.pixels % self.stride == 0)
        return flat_elements(self.flat, first, self.images[i], self.ys[i], self.xs[i], own, self.group)

    def channel_of(self, chunk: Expr) -> tuple[Expr, Expr | None]:
        """Find the first channel that this thread brings of a chunk, and how many of its group are left (None: enough).

        The channel is counted in the whole map.
        """
        inner = chunk * self.tile.channels + self.source_lane * self.loader.width
        whole = self.c.inputs % self.tile.channels == 0
        return self.group * self.c.inputs + inner, None if whole else self.c.inputs - inner

    def slot(self, step: Expr, i: Expr) -> Slot:
        """Find the places in shared memory that pass `i` of a step goes to."""
        place = self.source_at(step % self.tile.source_buffers) + self.chunk_at(
            self.source_row + i * self.stride, self.source_lane
        )
        tile = self.tile
        base = tile.own_at + step % tile.own_sets * (tile.further * tile.own_bytes)
        return Slot(place, base + (i * self.plan.threads + self.block.tid) * d.VECTOR_BYTES, tile.own_bytes)

    def own_row(self, i: Expr) -> Expr:
        """Tell whether pass `i` has a row of the tile for this thread."""
        row = self.source_row + i * self.stride
        return d.below(row, self.tile.source_rows, self.tile.source_rows % self.stride == 0)

    def fetch(self, step: Expr, chunk: Expr, pixel_of: Callable[[Expr], tuple[Expr, Expr]]) -> None:
        """Start bringing the source of a step; `pixel_of(i)` is the pixel of pass i, and whether it exists."""
        channel, left = self.channel_of(chunk)
        channel = T.bind(channel)
        left = None if left is None else T.bind(left)

        def one(i: Expr) -> None:
            pixel, valid = pixel_of(i)
            if self.tile.ring:
                copy = lambda: self.loader.copy(self.slot(step, i), pixel, channel, valid, left)  # noqa: E731
                d.when(self.own_row(i), copy)
            else:
                self.loader.fetch(i, pixel, channel, valid, left)

        d.unrolled(self.passes, one)

    def fill_weights(self, chunk: Expr, tap: Expr, at: Expr) -> None:
        """Copy [taps][outputs] rows of a chunk from the packed weights [outputs][taps][channels]."""
        c, tile = self.c, self.tile
        size = element_size(tile.precision)
        per_row, vector = self.chunk_lanes, vector_width(tile.precision)
        weight = self.block["weight"]
        first = self.group * c.outputs + self.first_output

        def one(i: Expr) -> None:
            lane, row = i % per_row, i // per_row
            whole = tile.weight_taps > 1
            output, own_tap = (row % self.plan.outputs, row // self.plan.outputs) if whole else (row, tap)
            channel = chunk * tile.channels + lane * vector
            valid = d.all_of(
                d.below(self.first_output + output, c.outputs, c.outputs % self.plan.outputs == 0),
                d.below(channel, tile.packed_row, tile.packed_row % tile.channels == 0),
            )
            taps = 1 if self.plan.read == "flat" else c.taps
            index = ((first + output) * taps + own_tap) * tile.packed_row + channel
            place = self.shared.address + tirx.Cast("uint32", at + self.chunk_at(row, lane))
            if valid is not True:
                index = tirx.Select(valid, index, 0)
            d.copy_async(place, weight.ptr_to([index]), valid=valid)

        assert size * vector == d.VECTOR_BYTES
        self.block.each(tile.weight_taps * self.plan.outputs * per_row, one)

    def finish(self, step: Expr, side: Expr, first: Expr = 0, count: int | None = None) -> None:
        """Take what has been fetched through the prologue, into shared memory: all passes, or some of a ring's."""
        if self.plan.read == "flat":
            self.finish_flat(step, side)
            return
        if self.tile.ring and self.loader.is_plain:
            return  # it lies there, and zeros where there is padding
        channel, left = self.channel_of(step if self.plan.halo else step % self.tile.chunks)
        channel, left = T.bind(channel), None if left is None else T.bind(left)
        aligned = (self.c.groups == 1 or self.c.inputs % 4 == 0) and (left is None or self.c.inputs % 4 == 0)
        self.loader.load_coefficients(channel, aligned, left)
        base = T.bind(self.source_at(side) // 4)
        v, h = self.c.vertical, self.c.horizontal
        down: Expr = 0
        right: Expr = 0
        if not self.plan.halo and not self.c.is_pointwise:
            tap = step // self.tile.chunks
            across = self.where.phase_value(v, h, lambda _, p: max(p.count, 1))
            down, right = T.bind(tap // across * v.step), T.bind(tap % across * h.step)

        def read(i: Expr, held: Expr) -> None:
            pixel: Expr = 0
            valid: Expr = True
            if self.loader.needs_pixels:
                pixel, valid = self.halo_pixel(i) if self.plan.halo else self.gathered_pixel(i, down, right)
            self.loader.read(held, self.slot(step, i), pixel, channel, valid, left)

        def use(i: Expr, held: Expr) -> None:
            row = T.bind(self.source_row + i * self.stride)
            made = self.loader.finish(held)
            if not self.plan.halo and not self.c.is_pointwise:  # padding is zero behind the prologue
                _, valid = self.gathered_pixel(i, down, right)
                for word in range(4):
                    d.put(made, word, tirx.Select(valid, made[word], T.uint32(0)))
            self.put_row(made, row, base)

        if not self.tile.ring:
            d.unrolled(self.passes, lambda i: use(i, i))
            return

        def own(i: int) -> Expr:
            return d.all_of(d.below(first + i, self.passes, count is None), self.own_row(first + i))

        number = self.passes if count is None else count
        read_ahead(number, lambda i, held: read(first + i, held), lambda i, held: use(first + i, held), own)

    def finish_flat(self, step: Expr, side: Expr) -> None:
        """Take a flat step through the prologue: elements of a vector differ in channel, and repeat by tap."""
        first = T.bind(step * self.tile.channels + self.source_lane * self.loader.width)
        inputs = self.c.inputs
        self.loader.load_flat_coefficients(lambda j: self.group * inputs + (first % self.c.flat_row + j) % inputs)
        base = T.bind(self.source_at(side) // 4)

        def one(i: Expr) -> None:
            self.put_row(self.loader.finish(i, flat=True), T.bind(self.source_row + i * self.stride), base)

        d.unrolled(self.passes, one)

    def put_row(self, made: Buffer, row: Expr, base: Expr) -> None:
        """Store this thread's chunk of a row of the source."""

        def write() -> None:
            place = base + self.chunk_at(row, self.source_lane) // 4
            T.buffer_store(self.store, made[T.ramp(0, 1, 4)], [T.ramp(place, 1, 4)])

        d.when(d.below(row, self.tile.source_rows, self.tile.source_rows % self.stride == 0), write)

    # -- multiplying -----------------------------------------------------------------------------------------------

    def fragment_row(self, i: Expr) -> Expr:
        """Find the tile's row whose address this lane gives for the i-th 16 rows of its warp."""
        return self.warp_pixel * (self.plan.pixels // self.plan.warps[0]) + i * 16 + self.block.lane % 16

    def multiply(self, side: Expr) -> None:
        """Add the products of buffer `side` to the accumulators, for all its taps and channels."""
        source = T.bind(self.shared.address + tirx.Cast("uint32", self.source_at(side)))
        weight = T.bind(self.shared.address + tirx.Cast("uint32", self.weight_at(side)))
        a = d.registers(self.fragments[0] * 4, "uint32")
        b = d.registers(4, "uint32")
        if not self.plan.halo:

            def plain(k: Expr) -> None:
                self.products(k, weight, lambda i: source + self.address(self.fragment_row(i), k), a, b)

            self.each_step(plain)
            return
        zeros = self.shared.address + T.uint32(self.tile.zeros_at)

        def tap_of(tap: int, bit: int) -> None:
            distance = self.where.source_distance(tap)

            def k_step(k: Expr) -> None:
                def at(i: Expr) -> Expr:
                    inside = tirx.bitwise_and(self.inside[i], T.uint32(1 << bit)) != T.uint32(0)
                    row = self.where.source_row(self.fragment_row(i)) + distance
                    return tirx.Select(inside, source + self.address(row, k), zeros)

                self.products(k, weight + T.uint32(tap * self.plan.outputs * self.plan.row_bytes), at, a, b)

            self.each_step(k_step)

        for tap in range(self.tile.taps):
            tap_of(tap, tap)

    def each_step(self, products: Callable[[Expr], None]) -> None:
        """Emit the products of all steps of 32 bytes along the channels, one after the other.

        At fp32 a step is long, and has no registers left for what the next one could do beside it.
        """
        steps = self.plan.row_bytes // d.STEP_BYTES
        if self.tile.precision == "fp32":
            with T.serial(0, steps) as k:
                products(k)
        else:
            d.unrolled(steps, products)

    def address(self, row: Expr, k: Expr) -> Expr:
        """Give the byte offset (uint32) of the chunk that this lane gives to ldmatrix for a row of the source."""
        return tirx.Cast("uint32", self.chunk_at(row, k * 2 + self.block.lane // 16))

    def products(self, k: Expr, weight: Expr, source: Callable[[Expr], Expr], a: Buffer, b: Buffer) -> None:
        """Multiply one step of 32 bytes along the channels: all fragments of this warp."""
        lane = self.block.lane
        d.unrolled(self.fragments[0], lambda i: d.ldmatrix(a, i * 4, source(i)))
        precision = self.tile.precision
        columns = self.plan.outputs // self.plan.warps[1]
        if precision == "fp32":
            low_a = d.registers(self.fragments[0] * 4, "uint32")
            low_b = d.registers(4, "uint32")
            d.unrolled(self.fragments[0] * 4, lambda i: split_in_place(a, low_a, i))

        def pair(j: Expr) -> None:
            row = self.warp_output * columns + j * 16 + lane // 16 * 8 + lane % 8
            d.ldmatrix(b, 0, weight + tirx.Cast("uint32", self.chunk_at(row, k * 2 + lane // 8 % 2)))
            if precision == "fp32":
                for i in range(4):
                    split_in_place(b, low_b, i)

            def fragment(i: Expr) -> None:
                for half in range(2):
                    at = (i * self.fragments[1] + j * 2 + half) * 4
                    if precision == "fp32":
                        add_products(self.acc, at, (a, low_a), i * 4, (b, low_b), half * 2)
                    else:
                        d.mma(precision, self.acc, at, a, i * 4, b, half * 2)

            d.unrolled(self.fragments[0], fragment)

        d.unrolled(self.fragments[1] // 2, pair)

    # -- results ---------------------------------------------------------------------------------------------------

    def close(self, problem: Problem) -> None:
        """Put the accumulators into shared memory, then take vectors of channels through the epilogue."""
        plan, lane, leading, team = self.plan, self.block.lane, self.tile.leading, self.tile.team
        floats = self.shared.view("float32")

        def fragment(i: Expr) -> None:
            def column(j: Expr) -> None:
                for half in range(2):
                    row = self.warp_pixel * (plan.pixels // plan.warps[0]) + i * 16 + half * 8 + lane // 4
                    at = self.warp_output * (plan.outputs // plan.warps[1]) + j * 8 + lane % 4 * 2
                    source = (i * self.fragments[1] + j) * 4 + half * 2
                    T.buffer_store(floats, self.acc[T.ramp(source, 1, 2)], [T.ramp(row * leading + at, 1, 2)])

            d.unrolled(self.fragments[1], column)

        d.unrolled(self.fragments[0], fragment)
        d.sync()
        rounds = plan.pixels // team.down
        passes = next(n for n in (PASSES, 2, 1) if rounds % n == 0)
        epilogue = epilogue_of(problem)(self.block, problem, team, floats, passes)
        vector, first_row = team.vector(self.block.tid), team.lane(self.block.tid)
        inner = T.bind(self.first_output + vector * team.width)
        left = None if self.c.outputs % plan.outputs == 0 else T.bind(self.c.outputs - inner)
        epilogue.open(T.bind(self.group * self.c.outputs + inner), left, self.c.outputs % 4 == 0)
        values = d.registers(team.width)
        if isinstance(epilogue, ForwardEpilogue) and not epilogue.reductions.counted:  # the tile's first pixel exists
            shift, first = d.registers(team.width), vector * team.width
            for start in range(0, team.width, 4):
                T.buffer_store(shift, floats[T.ramp(first + start, 1, 4)], [T.ramp(start, 1, 4)])
            epilogue.steps(shift)  # a value of y, bias and all
            epilogue.share(shift, self.where.count())
        with T.serial(0, rounds // passes) as turn:
            rows = [T.bind(first_row + (turn * passes + i) * team.down) for i in range(passes)]
            places = [self.where.destination_pixel(T.bind(self.where.pixel(row))) for row in rows]
            for i, (pixel, valid) in enumerate(places):
                epilogue.fetch(i, pixel, valid)
            for i, (pixel, valid) in enumerate(places):
                for start in range(0, team.width, 4):
                    index = rows[i] * leading + vector * team.width + start
                    T.buffer_store(values, floats[T.ramp(index, 1, 4)], [T.ramp(start, 1, 4)])
                epilogue.finish(i, values, pixel, valid)
        d.sync()
        epilogue.close(self.row)
