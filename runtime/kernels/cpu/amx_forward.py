"""Forward convolution in bfloat16 by AMX's tiles (amx.py): NHWC implicit GEMM over a flat list of positions.

    pack the weights: [cout/32][r][s][cin/2][32][2], cin rounded up to 32                   workspace, bfloat16
    parallel over threads, for the thread's tiles (images x rows x all columns of output):
        pack the activated input, with its zero border, in bfloat16 (Panel)                 second-level cache
        for 32 output channels and 32 positions of an image (amx.sweep):                    4 tiles of sums
            for r, s, 32 input channels: sums += positions * weights                        2 + 2 tiles
            to a scratch, float32 [32][32]                                                  first-level cache
            for the pixels among the positions: epilogue, sums, store

A position is a place of the panel, whether or not it is a pixel of y: so 32 of them are a constant stride apart, for
any window, over rows. What the places between two rows come to is not looked at: `s - 1` of a row of `ow + s - 1`.

Strides cut the panel into phases, one for each remainder of row and column, in which neighbours are those of the
output. Takes one group of any number of channels; the rule (`takes`) leaves out what would be mostly zeros, and sums
over images.

Few channels, as of images, lie without gaps: then a row of the window is one depth, [s][cin], which a tile loads from a
position on, rows of tiles overlapping, and columns are in no phases. What it loads behind the window meets weights of
zero: what is no number there, or infinite, makes the pixel beside it none, too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.images import ImagePlan
from bnfuse.runtime.kernels.common.sides import sides
from bnfuse.runtime.kernels.cpu import amx
from bnfuse.runtime.kernels.cpu.forward_nest import ForwardNest, Write
from bnfuse.runtime.kernels.cpu.nest import PackedTile, Place, cut, loop, places
from bnfuse.runtime.kernels.cpu.tiles import ConvShape
from bnfuse.runtime.kernels.cpu.tir import (
    HALF,
    WRITE,
    Arguments,
    Buffer,
    Expr,
    prefetch,
    share,
    span,
    splat,
    store,
    vectors,
    workspace,
    zero,
)
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.target import CpuTarget

LEAST_CHANNELS = 16  # of input: half of a product's depth is zeros then
LEAST_ROW = 8  # channels of a row of the window, where these are the depth
# The cost rule, chosen by hand
PANEL_BYTES = 640 << 10  # of 2 MiB of second-level cache, beside weights and maps
POSITIONS = 1024  # of a tile, at most
PRODUCT = 64  # cycles of a block's product
PACK = 8  # cycles to pack a vector of 16 channels
FINISH = 8  # cycles to finish one
WEIGHT_RATE = 16  # bytes of weights that a cycle brings to a tile
VECTOR = 16


def takes(problem: Problem, shape: ConvShape, target: CpuTarget) -> bool:
    """Tell whether a convolution is done by tiles: of maps in 16 bits, of one group, of channels enough."""
    return (
        target.amx
        and problem.map(sides(problem.spec)[0]).dtype == HALF
        and shape.groups == 1
        and (shape.cin >= LEAST_CHANNELS or (is_dense(shape) and shape.s * shape.cin >= LEAST_ROW))
        and ImagePlan.of(problem) is None
    )


def is_dense(shape: ConvShape) -> bool:
    """Tell whether all columns of a row of the window are one depth: few channels, which lie side by side."""
    return shape.cin < LEAST_CHANNELS and shape.s > 1 and shape.dilation_w == 1


def taps_of(shape: ConvShape) -> tuple[int, int]:
    """Count the rows and columns of the window that have a depth of their own."""
    return shape.r, 1 if is_dense(shape) else shape.s


def depth_of(shape: ConvShape) -> int:
    """Count the input channels of a tap, in whole depths of products."""
    return amx.deep(shape.cin * shape.s if is_dense(shape) else shape.cin)


def pitch_of(shape: ConvShape) -> int:
    """Count the elements from column to column of the panel."""
    return shape.cin if is_dense(shape) else amx.pitch(shape.cin)


@dataclasses.dataclass(frozen=True)
class AmxTiles:
    """Sizes of a thread's tile: rows of output of so many images."""

    images: int
    rows: int


def choose_amx_tiles(shape: ConvShape, target: CpuTarget) -> AmxTiles:
    """Choose the tiles that the busiest thread is through with first, by the cost rule."""
    rows, images = (max(1, POSITIONS // pixels) for pixels in (shape.ow, shape.oh * shape.ow))
    options = [AmxTiles(1, count) for count in range(1, min(rows, shape.oh) + 1)]
    options += [AmxTiles(count, shape.oh) for count in range(2, min(images, shape.n) + 1)]
    fitting = [tiles for tiles in options if _fits(shape, tiles)] or options[:1]
    return min(fitting, key=lambda tiles: cost(shape, tiles, target))


def _fits(shape: ConvShape, tiles: AmxTiles) -> bool:
    pixels = tiles.images * shape.packed_rows(tiles.rows) * shape.packed_columns
    return 2 * pixels * pitch_of(shape) <= PANEL_BYTES


def cost(shape: ConvShape, tiles: AmxTiles, target: CpuTarget) -> float:
    """Estimate the busiest thread's cycles: packing, products, epilogues, and the weights that each tile brings."""
    count = math.ceil(shape.n / tiles.images) * math.ceil(shape.oh / tiles.rows)
    depth, blocks = depth_of(shape) * math.prod(taps_of(shape)), math.ceil(shape.cout / amx.BLOCK)
    positions = (tiles.rows - 1) * columns_of(shape) + shape.ow
    products = math.ceil(positions / amx.BLOCK) * blocks * depth / amx.DEPTH * PRODUCT
    packed = shape.packed_rows(tiles.rows) * shape.packed_columns * math.ceil(shape.cin / VECTOR) * PACK
    finished = tiles.rows * shape.ow * shape.cout * FINISH / VECTOR
    weights = 2 * depth * blocks * amx.BLOCK / WEIGHT_RATE
    return math.ceil(count / target.threads) * (tiles.images * (products + packed + finished) + weights)


def columns_of(shape: ConvShape) -> int:
    """Count the positions of a row."""
    return math.ceil(shape.packed_columns / shape.step_w)


class Panel(PackedTile):
    """A tile in phases: [image][row % stride][column % stride][row / stride][column / stride][pitch], bfloat16.

    Channels up to a whole depth are zeros. Behind the last image there is room for what a block of rows overhangs.
    A dense one is [image][row % stride][row / stride][column][cin].
    """

    def __init__(self, shape: ConvShape, images: int, rows: int, lanes: int) -> None:
        self.shape, self.images, self.lanes = shape, images, lanes
        self.pitch, self.phases = pitch_of(shape), 1 if is_dense(shape) else shape.step_w
        self.row_stride = self.pitch * (shape.step_w // self.phases)  # from position to position
        self.rows, self.columns = shape.packed_rows(rows), shape.packed_columns
        self.across = columns_of(shape)
        self.phase = math.ceil(self.rows / shape.step_h) * self.across * self.row_stride
        self.image = shape.step_h * self.phases * self.phase
        size = images * self.image + amx.BLOCK * self.row_stride + (depth_of(shape) if is_dense(shape) else 0)
        self.buffer: Buffer = workspace(size, HALF)
        zero(self.buffer, 0, size, lanes)

    def row_at(self, image: Expr, row: Expr) -> Expr:
        """Write where a packed row's first phase starts."""
        down = self.shape.step_h
        phase = row % down * (self.phases * self.phase)
        return image * self.image + phase + row // down * (self.across * self.row_stride)

    def column_at(self, column: Expr) -> Expr:
        """Count the elements from the start of a packed row to one of its pixels."""
        return column % self.phases * self.phase + column // self.phases * self.pitch

    def clear_row(self, start: Expr) -> None:
        """Zero a packed row, in all of its phases."""
        with loop(self.phases) as phase:
            zero(self.buffer, start + phase * self.phase, self.across * self.row_stride, self.lanes)

    def tap(self, r: Expr, s: Expr) -> Expr:
        """Count the elements from a position to what it reads at place (r, s) of the window."""
        return self.row_at(0, r * self.shape.dilation_h) + self.column_at(s * self.shape.dilation_w)


class AmxNest(ForwardNest):
    """The loop nest of the module's docstring."""

    packed_dtype = HALF

    def __init__(
        self, problem: Problem, target: CpuTarget, arguments: Arguments, shape: ConvShape, tiles: AmxTiles
    ) -> None:
        super().__init__(problem, target, arguments, shape)
        self.tiles = tiles
        self.sides = 2 if shape.cout > amx.SIDE else 1  # tiles of output channels in a block
        self.width = self.sides * amx.SIDE
        self.out_blocks = math.ceil(shape.cout / self.width)
        self.depth, self.window = depth_of(shape), taps_of(shape)
        self.taps = math.prod(self.window)

    # Weights

    @property
    def packed_weights(self) -> int:
        """Count the elements of the packed weights."""
        return self.out_blocks * self.taps * self.depth * self.width

    def pack_weights(self, thread: Expr) -> None:
        """Pack OIHW to the module's layout; a thread takes some (output block, input channel)s."""
        first, count = share(self.out_blocks * self.depth, self.target.threads, thread)
        shape = self.shape
        columns = shape.s // self.window[1]  # that are a tap's depth together
        with T.serial(0, count) as i:
            item = T.bind(first + i)
            block, channel = T.bind(item // self.depth), T.bind(item % self.depth)
            inner = (
                channel % shape.cin * (shape.r * shape.s) + channel // shape.cin
                if columns > 1
                else (channel * (shape.r * shape.s))
            )
            source = block * (self.width * shape.cin * shape.r * shape.s) + inner
            with loop(self.taps) as tap:
                pair = (block * self.taps + tap) * (self.depth // 2) + channel // 2
                row = pair * (2 * self.width) + channel % 2
                with T.If(channel < columns * shape.cin):
                    with T.Then():
                        self.with_output_width(block, functools.partial(self.pack_row, source + tap * columns, row))
                    with T.Else():
                        self.pack_row(0, row, 0)

    def pack_row(self, source: Expr, target: Expr, width: int) -> None:
        """Pack one row of `self.width` output channels, of which `width` exist."""
        stride = self.shape.cin * self.shape.r * self.shape.s
        for start, lanes in cut(width, self.lanes):
            values = self.arguments["weight"][span(source + start * stride, lanes, stride)]
            store(self.weights, span(target + 2 * start, lanes, 2), values)
        for start, lanes in cut(self.width - width, self.lanes):
            store(self.weights, span(target + 2 * (width + start), lanes, 2), splat(0, lanes))

    # Tiles

    @property
    def items(self) -> int:
        """Count the tiles that the threads share."""
        return math.ceil(self.shape.n / self.tiles.images) * math.ceil(self.shape.oh / self.tiles.rows)

    def images_of(self, first: int, last: int) -> tuple[int, int]:
        """Give no images: there are no sums over them."""
        raise NotImplementedError

    def work(self, thread: Expr) -> None:
        """Write all tiles of a thread."""
        tiles = self.tiles
        self.panel = Panel(self.shape, tiles.images, tiles.rows, self.lanes)
        self.scratch = workspace(amx.BLOCK * self.width)
        if "Statistics" in self.epilogue:
            self.totals = self.partials.buffer  # of the same layout
        with amx.tiles():
            for place in places(self.shape, tiles.images, tiles.rows, self.target.threads, thread):
                self.panel.pack(place, self.stores_in_passing, self.pack_pixel)
                positions = (place.rows - 1) * self.panel.across + self.shape.ow
                windows = T.bind((positions + amx.BLOCK - 1) // amx.BLOCK)
                with amx.sweep(self.packed_weights, self.out_blocks, place.images, windows) as (block, image, window):
                    start = T.bind(window * amx.BLOCK)
                    self.multiply(block, image, start)
                    self.finish(place, block, image, start)

    def pack_pixel(self, index: Expr, pixel: Expr, stored: bool) -> None:
        """Pack all channels of one pixel."""

        def pack(channel: Expr, width: int) -> None:
            self.entry.pack(self.panel.buffer, index + channel, pixel, channel, width, stored)

        vectors(self.shape.cin, self.lanes, pack)

    def multiply(self, block: Expr, image: Expr, start: Expr) -> None:
        """Leave the sums of 32 positions from `start` on, for a block of output channels, in the scratch."""
        panel, row = self.panel, 2 * self.width
        amx.clear(self.sides)
        corner = T.bind(image * panel.image + start * panel.row_stride)
        rows, columns = self.window
        with loop(rows) as r, loop(columns) as s:
            pixels = T.bind(corner + panel.tap(r, s))
            weights = T.bind((block * self.taps + r * columns + s) * (self.depth * self.width))
            with loop(self.depth // amx.DEPTH) as k:
                left = panel.buffer, pixels + k * amx.DEPTH, panel.row_stride
                amx.add(self.sides, left, (self.weights, weights + k * (amx.SIDE * row), row))
        amx.leave(self.sides, self.scratch, 0, self.width)

    def finish(self, place: Place, block: Expr, image: Expr, start: Expr) -> None:
        """Write the epilogue of the pixels among the positions of a block."""
        channel = T.bind(block * self.width)

        def body(count: int) -> None:
            def each(write: Write) -> None:
                def also_ask(number: Expr, pixel: Expr) -> None:
                    prefetch(self.y.buffer, self.y.at(pixel, channel + self.width), WRITE)  # for the next block
                    write(number, pixel)

                self.each_position(place, image, start, also_ask if self.out_blocks > 1 else write)

            self.leave(self.scratch, self.width, place.thread, channel, count, each)

        self.with_output_width(block, body)

    def each_position(self, place: Place, image: Expr, start: Expr, write: Write) -> None:
        """Write loops over the pixels among 32 positions; `write` is given their numbers there and in the map."""
        shape, across = self.shape, self.panel.across
        first = T.bind(((place.image + image) * shape.oh + place.row) * shape.ow)
        if across == shape.ow:  # every position is a pixel
            with T.serial(0, tirx.Min(amx.BLOCK, place.rows * shape.ow - start)) as j:
                write(j, first + start + j)
            return
        for row, begins, ends in self.stretches(place, start):
            with T.serial(0, ends - begins) as j:
                write(T.bind(begins + j - start), T.bind(first + row * shape.ow + begins + j - row * across))

    def stretches(self, place: Place, start: Expr) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Write a loop over the rows that 32 positions touch: row, first position and that behind the last one."""
        across = self.panel.across
        top = T.bind(start // across)
        bottom = tirx.Min((start + amx.BLOCK - 1) // across, place.rows - 1)
        with T.serial(0, bottom - top + 1) as i:
            row = T.bind(top + i)
            begins = T.bind(tirx.Max(start, row * across))
            yield row, begins, T.bind(tirx.Max(begins, tirx.Min(start + amx.BLOCK, row * across + self.shape.ow)))
