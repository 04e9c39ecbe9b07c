"""Forward convolution of 3x3 windows by Winograd's F(2x2, 3x3) (winograd.py): 16 multiplications for every 36.

    transform the weights: U [cout/NR][place 16][cin][NR], NR = vectors*lanes                   workspace
    parallel over threads, for the thread's tiles (images x rows x all columns of output):
        pack the activated input of the tile, with its zero border                          second-level cache
        for a block of its 2x2 outputs ("squares", counted over images, rows and columns):
            transform their 4x4 patches: V [place 16][squares][cin]                         second-level cache
            for NR output channels:
                for place, for a micro tile of squares: M [place 16][squares][NR] = V * U   registers, U in first-level
                for squares: transform M; + bias; float64 sums of y and its squared deviations; store y

Where weights are far more than maps threads share the blocks of output channels instead, over all squares, and each
transforms the weights of a block where it multiplies (`by_block`): what is transformed stays in the second-level cache.

Takes windows of 3x3, stride 1, dilation 1, one group; any padding. Where a size is odd the last squares hang over:
their inputs are zeros of the packed tile, and what lies outside of y is neither stored nor counted.

Milliseconds of two threads of an AVX-512 server core, batch 16, with prologue and statistics, beside the direct kernel:

    layer                 winograd  direct         layer                 winograd  direct
    128 to 32 at 56           6.12    9.33         64 to 64 at 56            5.56    9.95
    128 to 32 at 28           1.49    2.36         128 to 128 at 28          5.09    9.34
    128 to 32 at 14           0.40    0.60         256 to 256 at 14          6.16    9.53
    128 to 32 at 7            0.14    0.16         512 to 512 at 14         26.4    39.1

512 to 512 at 7 takes 13.5 beside 10.6 of the direct kernel (8.7 where nothing else runs in between: its 16 MiB of
transformed weights come from afar), so the rule leaves it to the direct one. Without packing, 128 to 32 at 56 takes
20 % less, without the input's transform 17 %; products alone run at 228 GFLOP/s on one thread. Asking for the next
tile's input between the products gained nothing.

The error against float64 is 0.4 to 0.8 times that of the direct kernel and of torch (64 to 512 channels; inputs normal,
rectified, or 1000 from zero): each sum has a ninth of the terms.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu.forward_nest import ForwardNest, Write
from bnfuse.runtime.kernels.cpu.nest import PackedTile, Place, cut, loop, places
from bnfuse.runtime.kernels.cpu.partials import moments
from bnfuse.runtime.kernels.cpu.tiles import ConvShape
from bnfuse.runtime.kernels.cpu.tir import (
    WRITE,
    Arguments,
    Buffer,
    Expr,
    prefetch,
    registers,
    share,
    span,
    splat,
    store,
    vectors,
    workspace,
    zero,
)
from bnfuse.runtime.kernels.cpu.winograd import (
    OUT,
    PATCH,
    PLACES,
    Block,
    input_transform,
    load_block,
    output_transform,
    store_places,
    weight_transform,
)
from bnfuse.runtime.kernels.cpu.winograd_forward_shape import WinogradTiles, whole_squares
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.target import CpuTarget

LINE = 16  # floats of a cache line

Leave = Callable[[Sequence[Expr], Sequence[Expr]], None]  # (pixels of y, their values)


def odd_lines(elements: int) -> int:
    """Round up to an odd number of cache lines, in elements: 16 such strides meet 16 sets of a cache."""
    return (math.ceil(elements / LINE) | 1) * LINE


class WinogradNest(ForwardNest):
    """The loop nest of the module's docstring."""

    def __init__(
        self, problem: Problem, target: CpuTarget, arguments: Arguments, shape: ConvShape, tiles: WinogradTiles
    ) -> None:
        super().__init__(problem, target, arguments, shape)
        self.tiles, self.even = tiles, whole_squares(shape)
        self.width = tiles.vectors * target.lanes
        self.out_blocks = math.ceil(shape.cout / self.width)
        self.weight_stride = odd_lines(shape.cin * self.width)  # from place to place
        self.patch_stride = odd_lines(tiles.block * tiles.pitch)
        self.product_stride = odd_lines(tiles.block * self.width)
        if tiles.by_block:
            self.stores_in_passing = False  # all threads pass

    # Weights

    @property
    def packed_weights(self) -> int:
        """Count the floats of the transformed weights."""
        return 0 if self.tiles.by_block else self.out_blocks * PLACES * self.weight_stride

    def pack_weights(self, thread: Expr) -> None:
        """Transform a thread's share of the weights, some (output block, input channel)s."""
        shape = self.shape
        first, count = share(self.out_blocks * shape.cin, self.target.threads, thread)
        with T.serial(0, count) as i:
            self.pack_windows(T.bind((first + i) // shape.cin), T.bind((first + i) % shape.cin))

    def pack_windows(self, block: Expr, channel: Expr) -> None:
        """Transform the windows between an output block and an input channel."""
        source = T.bind((block * self.width * self.shape.cin + channel) * 9)
        target = T.bind(self.weight_place(block, 0) + channel * self.width)
        self.with_output_width(block, functools.partial(self.pack_weight, source, target))

    def weight_place(self, block: Expr, number: Expr) -> Expr:
        """Write where the transformed weights of an output block and a place begin."""
        return ((0 if self.tiles.by_block else block * PLACES) + number) * self.weight_stride

    def pack_weight(self, source: Expr, target: Expr, width: int) -> None:
        """Transform the windows of `self.width` output channels, of which `width` exist."""
        weight, stride = self.arguments["weight"], self.shape.cin * 9
        for start, part in cut(width, self.lanes):
            first = source + start * stride
            window = load_block(weight, 3, lambda i, j: first + 3 * i + j, part, stride)  # noqa: B023
            store_places(self.weights, weight_transform(window, T.bind), target + start, self.weight_stride, part)
        for place in range(PLACES):
            zero(self.weights, target + place * self.weight_stride + width, self.width - width, self.lanes)

    # Tiles

    def work(self, thread: Expr) -> None:
        """Write all tiles of a thread."""
        tiles, even = self.tiles, self.even
        self.tile = PackedTile(even, tiles.images, tiles.rows, tiles.pitch, self.lanes)
        self.patches = workspace(PLACES * self.patch_stride)
        self.products = workspace(PLACES * self.product_stride)
        if tiles.by_block:
            self.work_by_block(thread)
            return
        for place in places(even, tiles.images, tiles.rows, self.target.threads, thread):
            self.tile.pack(place, self.stores_in_passing, self.pack_pixel)
            squares = place.images * (place.rows // OUT) * (even.ow // OUT)
            with loop(math.ceil(tiles.images * tiles.rows * even.ow // OUT**2 / tiles.block)) as block:
                first = T.bind(block * tiles.block)
                count = T.bind(tirx.Max(tirx.Min(tiles.block, squares - first), 0))
                self.transform_input(place, first, count)
                with loop(self.out_blocks) as out_block:
                    self.multiply(place, first, count, out_block)
                    self.finish(place, first, count, out_block)

    def work_by_block(self, thread: Expr) -> None:
        """Write all output blocks of a thread, over all squares."""
        squares = self.tiles.squares(self.even)
        place = Place(thread, 0, self.even.n, True, 0, self.even.oh, True)
        self.weights = workspace(PLACES * self.weight_stride)
        self.tile.pack(place, self.stores_in_passing, self.pack_pixel)
        self.transform_input(place, 0, squares)
        first, count = share(self.out_blocks, self.target.threads, thread)
        with T.serial(0, count) as i:
            block = T.bind(first + i)
            with T.serial(0, self.shape.cin) as channel:
                self.pack_windows(block, channel)
            self.multiply(place, 0, squares, block)
            self.finish(place, 0, squares, block)

    def pack_pixel(self, index: Expr, pixel: Expr, stored: bool) -> None:
        """Pack all channels of one pixel."""

        def pack(channel: Expr, width: int) -> None:
            self.entry.pack(self.tile.buffer, index + channel, pixel, channel, width, stored)

        vectors(self.shape.cin, self.lanes, pack)

    def square(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Write the image of a square of the tile, and row and column of its first output."""
        columns = self.even.ow // OUT
        each = self.tiles.rows // OUT * columns
        if self.tiles.images == 1:
            image, inside = 0, number
        else:
            image, inside = T.bind(number // each), T.bind(number % each)
        return image, T.bind(inside // columns * OUT), T.bind(inside % columns * OUT)

    def transform_input(self, place: Place, first: Expr, count: Expr) -> None:
        """Transform the patches of `count` squares in whole vectors: past the last channel is what nothing reads."""
        tile, pitch = self.tile, self.tiles.pitch
        with T.serial(0, count) as i:
            corner = T.bind(tile.at(*self.square(first + i)))
            with T.serial(0, math.ceil(self.shape.cin / self.lanes)) as v:
                source, target = T.bind(corner + v * self.lanes), T.bind(i * pitch + v * self.lanes)
                patch = load_block(tile.buffer, PATCH, lambda r, s: source + tile.tap(r, s), self.lanes)
                store_places(self.patches, input_transform(patch, T.bind), target, self.patch_stride, self.lanes)

    # Products

    def multiply(self, place: Place, first: Expr, count: Expr, block: Expr) -> None:
        """Write M = V * U for a block of squares and a block of output channels."""
        micro = self.tiles.micro
        with T.serial(0, PLACES) as number, T.serial(0, (count + (micro - 1)) // micro) as m:
            self.prefetch_output(place, first + m * micro, number, block)
            accumulators = registers(micro * self.width)
            for index, _ in self.accumulators():
                store(accumulators, index, splat(0, self.lanes))
            self.micro_tile(number, m, block, accumulators)
            target = T.bind(number * self.product_stride + m * (micro * self.width))
            for index, offset in self.accumulators():
                store(self.products, span(target + offset, self.lanes), accumulators[index])

    def accumulators(self) -> list[tuple[Expr, int]]:
        """List the vectors of the accumulators, and where each begins."""
        starts = range(0, self.tiles.micro * self.width, self.lanes)
        return [(span(start, self.lanes), start) for start in starts]

    def micro_tile(self, number: Expr, m: Expr, block: Expr, accumulators: Buffer) -> None:
        """Add patches * weights to the accumulators, over the input channels."""
        pitch = self.tiles.pitch
        patches = T.bind(number * self.patch_stride + m * (self.tiles.micro * pitch))
        weights = T.bind(self.weight_place(block, number))
        with T.serial(0, self.shape.cin) as k:
            for p, v in itertools.product(range(self.tiles.micro), range(self.tiles.vectors)):
                index = span(p * self.width + v * self.lanes, self.lanes)
                row = self.weights[span(weights + k * self.width + v * self.lanes, self.lanes)]
                store(accumulators, index, accumulators[index] + self.patches[patches + k + p * pitch] * row)

    def prefetch_output(self, place: Place, first: Expr, number: Expr, block: Expr) -> None:
        """Ask for the lines of y that a square of the micro tile will be written to: at each place, another square."""
        with T.If(number < self.tiles.micro), T.Then():
            corner = T.bind(self.output_pixel(place, *self.square(first + number)))
            for i, j in itertools.product(range(OUT), repeat=2):
                for start in range(0, self.width, self.lanes):
                    channel = block * self.width + start
                    prefetch(self.y.buffer, self.y.at(corner + i * self.shape.ow + j, channel), WRITE)

    # Outputs

    def output_pixel(self, place: Place, image: Expr, row: Expr, column: Expr) -> Expr:
        """Write the first pixel of a square, as the output map counts them."""
        return ((place.image + image) * self.shape.oh + place.row + row) * self.shape.ow + column

    def finish(self, place: Place, first: Expr, count: Expr, block: Expr) -> None:
        """Write the inverse transform, bias, activation, statistics, y."""

        def body(width: int) -> None:
            for start, lanes in cut(width, self.lanes):
                channel = T.bind(block * self.width + start)
                if self.is_gradient:
                    self.finish_gradient(place, first, count, start, channel, lanes)
                    continue
                for image, begin, stop in self.stretches(place, first, count):
                    self.leave_squares(place, first, (image, begin, stop), start, channel, lanes)

        self.with_output_width(block, body)

    def leave_squares(
        self, place: Place, first: Expr, stretch: tuple[Expr, Expr, Expr], start: int, channel: Expr, lanes: int
    ) -> None:
        """Write the outputs of some squares of the block, and their sums: of the thread, or of the stretch's image."""
        image, begin, stop = stretch
        summed = "Statistics" in self.epilogue or self.images is not None
        sums = registers(2 * self.lanes, "float64")
        cells = [span(moment * self.lanes, lanes) for moment in range(2)]
        for cell in cells:
            store(sums, cell, splat(0, lanes, "float64"))

        def leave(pixels: Sequence[Expr], values: Sequence[Expr]) -> None:
            for pixel, value in zip(pixels, values, strict=True):
                store(self.y.buffer, span(self.y.at(pixel, channel), lanes), value)
            if summed:
                for cell, moment in zip(cells, moments(values, lanes), strict=True):
                    store(sums, cell, sums[cell] + moment)

        with T.serial(0, stop - begin) as j:
            i = begin + j
            outputs = self.outputs(i * self.width + start, channel, lanes)
            self.with_existing(place, self.square(first + i), outputs, leave)
        made = [sums[cell] for cell in cells]
        if self.images is not None:
            self.images.add(image, place.thread, channel, made, lanes)
        elif summed:
            self.partials.add_sums(place.thread, channel, made, lanes)

    def stretches(self, place: Place, first: Expr, count: Expr) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Cut a block of squares where images end: image, first and behind the last square of each stretch.

        Without sums over images the block is one stretch.
        """
        if self.images is None or self.tiles.images == 1:
            yield place.image, 0, count
            return
        each = self.tiles.rows // OUT * (self.even.ow // OUT)
        image = T.bind(first // each)
        touched = T.bind(tirx.Select(count > 0, (first + count - 1) // each - image + 1, 0))
        with T.serial(0, touched) as k:
            begin = T.bind((image + k) * each - first)
            yield place.image + image + k, T.bind(tirx.Max(begin, 0)), T.bind(tirx.Min(count, begin + each))

    @property
    def items(self) -> int:
        """Count the tiles that the threads share."""
        return math.ceil(self.even.n / self.tiles.images) * math.ceil(self.even.oh / self.tiles.rows)

    def images_of(self, first: int, last: int) -> tuple[int, int]:
        """Give the first and the last image of the tiles from `first` to `last`."""
        rows, images = math.ceil(self.even.oh / self.tiles.rows), self.tiles.images
        return first // rows * images, min((last // rows + 1) * images, self.even.n) - 1

    def finish_gradient(self, place: Place, first: Expr, count: Expr, start: int, channel: Expr, lanes: int) -> None:
        """Write the inverse transform and the epilogue of a gradient, pixel by pixel."""
        cell = registers(self.lanes)

        def each(write: Write) -> None:
            def leave(pixels: Sequence[Expr], values: Sequence[Expr]) -> None:
                for pixel, value in zip(pixels, values, strict=True):
                    store(cell, span(0, lanes), value)
                    write(0, pixel)

            with T.serial(0, count) as i:
                outputs = self.outputs(i * self.width + start, channel, lanes)
                self.with_existing(place, self.square(first + i), outputs, leave)

        self.leave(cell, self.lanes, place.thread, channel, lanes, each)

    def outputs(self, source: Expr, channel: Expr, lanes: int) -> Block:
        """Write the two by two outputs of a square: vectors of channels."""
        at = T.bind(source)
        products = load_block(self.products, PATCH, lambda i, j: at + (i * PATCH + j) * self.product_stride, lanes)
        outputs = output_transform(products, T.bind)
        finished = self.finished([value for row in outputs for value in row], channel, lanes)
        return [finished[i : i + OUT] for i in range(0, len(finished), OUT)]

    def with_existing(self, place: Place, square: tuple[Expr, Expr, Expr], outputs: Block, leave: Leave) -> None:
        """Call `leave(pixels, values)` with the outputs of a square that lie inside of y."""
        _, row, column = square
        first = T.bind(self.output_pixel(place, *square))

        def part(rows: int, columns: int) -> None:
            inside = list(itertools.product(range(rows), range(columns)))
            leave([first + i * self.shape.ow + j for i, j in inside], [outputs[i][j] for i, j in inside])

        last_row = place.row + row + 1 == self.shape.oh
        last_column = column + 1 == self.shape.ow
        either(
            self.shape.oh % OUT,
            last_row,
            lambda rows: either(self.shape.ow % OUT, last_column, lambda columns: part(rows, columns)),
        )


def either(odd: int, last: Expr, body: Callable[[int], None]) -> None:
    """Call `body` with the rows (columns) of a square that exist: both but where the size is odd and it is the last."""
    if not odd:
        body(OUT)
        return
    with T.If(last):
        with T.Then():
            body(1)
        with T.Else():
            body(OUT)
