"""Forward convolution: NHWC implicit GEMM with the prologue in the packing and statistics in the epilogue.

    pack the weights: [group][cout/NR][cin block][r][s][cin][NR], NR = vectors*lanes         workspace
    parallel over threads, for the thread's tiles (images x rows x all columns of output):
        for a block of input channels:
            pack the activated input of the tile, with its zero border                          second-level cache
            for NR output channels, for a micro tile of pixels:                                 registers
                for r, s, input channel: accumulators += pixel * weights
                last block: + bias; sum and squared deviations to the thread's float64 partials; store y
    add up the threads' partials: mean and variance

Takes every convolution; depthwise ones go to depthwise_forward.py. A 1x1 convolution of stride 1 sees one column of
n*h*w pixels. Where the input has fewer channels than a vector has lanes, a row of the window is one reduction over
columns and channels. The statistics of a micro tile are taken about its own mean, in float32; the partials are sums in
float64, in which the cancellation of sum(y^2) - m*mean^2 costs 1e-10 of the variance at |mean|/std = 1e3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu.entry import Entry
from bnfuse.runtime.kernels.cpu.partials import Partials
from bnfuse.runtime.kernels.cpu.tiles import ConvShape, Tiles, choose_tiles, conv_shape, flatten
from bnfuse.runtime.kernels.cpu.tir import (
    Arguments,
    Buffer,
    Expr,
    at_most,
    forward_params,
    function,
    registers,
    share,
    span,
    splat,
    store,
    vectors,
    workspace,
    zero,
)
from bnfuse.runtime.kernels.kernel import Kernel, Problem, Target


def conv_forward(problem: Problem, target: Target) -> Kernel:
    """The kernel of a forward operator with core Conv: any prologue, Bias, StoreInput, Statistics."""
    shape = conv_shape(problem)
    name = f"{problem.op}_{hashlib.sha256(repr((problem, target)).encode()).hexdigest()[:12]}"
    params = forward_params(problem)

    def build() -> Any:
        with function(name, params) as arguments:
            flat = flatten(shape)
            ConvNest(problem, target, arguments, flat, choose_tiles(flat, target)).emit()
        return arguments.result

    return Kernel(name, problem, target, params, build)


@dataclasses.dataclass(frozen=True)
class Window:
    """A stretch of one dimension: where it starts (within the tile) and its static length."""

    start: Expr
    size: int


@dataclasses.dataclass(frozen=True)
class MicroTile:
    """The output pixels of one set of accumulators, within a tile."""

    image: Window
    row: Window
    column: Window

    @property
    def pixels(self) -> int:
        return self.image.size * self.row.size * self.column.size

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Image, row and column of each pixel, from the first pixel on."""
        return itertools.product(range(self.image.size), range(self.row.size), range(self.column.size))


@dataclasses.dataclass(frozen=True)
class Part:
    """Which weights: a group, a block of its output channels, a block of input channels."""

    group: Expr
    block: Expr
    in_block: Expr


@dataclasses.dataclass(frozen=True)
class Place:
    """A tile: its first image and output row, how many of them it has, and which thread works on it."""

    thread: Expr
    image: Expr
    images: Expr
    last_image: Expr  # whether no later tile has later images; a bool where that is static
    row: Expr
    rows: Expr
    last_row: Expr


class ConvNest:
    """The loop nest of the module's docstring."""

    def __init__(self, problem: Problem, target: Target, arguments: Arguments, shape: ConvShape, tiles: Tiles) -> None:
        self.target, self.arguments, self.shape, self.tiles = target, arguments, shape, tiles
        self.epilogue = problem.spec.epilogue
        self.entry = Entry(problem, arguments)
        self.y = self.entry.map("y")
        self.lanes = target.lanes
        self.width = tiles.vectors * target.lanes
        self.out_blocks = math.ceil(shape.group_cout / self.width)
        self.grouped = shape.groups > 1
        self.in_blocks = 1 if self.grouped else math.ceil(shape.cin / tiles.channels)
        self.taps = shape.r * shape.s
        self.packed_rows = shape.packed_rows(tiles.rows)
        self.packed_columns = shape.packed_columns
        self.image_tiles = math.ceil(shape.n / tiles.images)
        self.row_tiles = math.ceil(shape.oh / tiles.rows)
        self.stores_in_passing = "StoreInput" in self.epilogue and covers_input(shape)

    def emit(self) -> None:
        shape, threads = self.shape, self.target.threads
        self.weights = workspace(shape.groups * self.out_blocks * shape.group_cin * self.taps * self.width)
        statistics = "Statistics" in self.epilogue
        if statistics:
            self.partials = Partials.allocate(shape.cout, threads, self.lanes)
        with T.parallel(0, threads) as thread:
            self.pack_weights(thread)
            if "StoreInput" in self.epilogue and not self.stores_in_passing:
                self.store_input(thread)
        with T.parallel(0, threads) as thread:
            if statistics:
                self.partials.clear(thread)
            self.work(thread)
        if statistics:
            count = shape.n * shape.oh * shape.ow
            self.partials.finish(count, self.arguments["mean"], self.arguments["variance"])

    # Before the tiles

    def weight_block(self, group: Expr, block: Expr, in_block: Expr) -> Expr:
        """Where the packed weights of a group, an output block and an input block start."""
        size = self.shape.group_cin * self.taps * self.width
        return (group * self.out_blocks + block) * size + in_block * (self.tiles.channels * self.taps * self.width)

    def block_channels(self, in_block: Expr) -> Expr:
        """Input channels of a block that one output reads."""
        if self.in_blocks == 1:
            return self.shape.group_cin
        return at_most(self.tiles.channels, self.shape.cin - in_block * self.tiles.channels)

    def pack_weights(self, thread: Expr) -> None:
        """OIHW to the layout of the module's docstring; a thread takes some (group, output block, input channel)s."""
        shape, channels = self.shape, self.shape.group_cin
        first, count = share(shape.groups * self.out_blocks * channels, self.target.threads, thread)
        with T.serial(0, count) as i:
            item = T.bind(first + i)
            group = T.bind(item // (channels * self.out_blocks))
            block = T.bind(item // channels % self.out_blocks)
            channel = T.bind(item % channels)
            in_block = 0 if self.in_blocks == 1 else T.bind(channel // self.tiles.channels)
            inside = channel - in_block * self.tiles.channels if self.in_blocks > 1 else channel
            source = ((group * shape.group_cout + block * self.width) * channels + channel) * self.taps
            with T.serial(0, self.taps) as tap:
                row = tap * self.block_channels(in_block) + inside
                target = self.weight_block(group, block, in_block) + row * self.width
                self.with_output_width(block, functools.partial(self.pack_weight_row, source + tap, target))

    def pack_weight_row(self, source: Expr, target: Expr, width: int) -> None:
        """One row of `self.width` output channels, of which `width` exist."""
        weight, stride = self.arguments["weight"], self.shape.group_cin * self.taps
        for start, part in cut(width, self.lanes):
            values = weight[span(source + start * stride, part, stride)]
            store(self.weights, span(target + start, part), values)
        zero(self.weights, target + width, self.width - width, self.lanes)

    def with_output_width(self, block: Expr, body: Callable[[int], None]) -> None:
        """Call `body` with the channels of output block `block`, which are fewer in the last."""
        tail = self.shape.group_cout % self.width
        if tail == 0:
            body(self.width)
        elif self.out_blocks == 1:
            body(tail)
        else:
            with T.If(block < self.out_blocks - 1):
                with T.Then():
                    body(self.width)
                with T.Else():
                    body(tail)

    def store_input(self, thread: Expr) -> None:
        """The map `stored` in its own sweep: for convolutions that do not read every input pixel once."""
        shape = self.shape
        first, count = share(shape.n * shape.h * shape.w, self.target.threads, thread)
        with T.serial(0, count) as i:
            vectors(shape.cin, self.lanes, lambda c, width: self.entry.store(first + i, c, width))

    # Tiles

    def work(self, thread: Expr) -> None:
        """All tiles of a thread."""
        tiles = self.tiles
        pixels = tiles.images * self.packed_rows * self.packed_columns
        self.tile = workspace(pixels * tiles.row_stride)
        if self.in_blocks > 1:
            self.sums = workspace(self.out_blocks * tiles.images * tiles.rows * self.shape.ow * self.width)
        self.clear_border()
        first, count = share(self.image_tiles * self.row_tiles, self.target.threads, thread)
        with T.serial(0, count) as i:
            item = T.bind(first + i)
            image_tile, row_tile = T.bind(item // self.row_tiles), T.bind(item % self.row_tiles)
            place = Place(
                thread,
                *stretch(image_tile, tiles.images, self.shape.n),
                *stretch(row_tile, tiles.rows, self.shape.oh),
            )
            if self.in_blocks == 1:
                self.sweep(place, 0)
            else:
                with T.serial(0, self.in_blocks) as in_block:
                    self.sweep(place, in_block)

    def sweep(self, place: Place, in_block: Expr) -> None:
        """One block of input channels of a tile: pack it, then multiply it with every block of weights."""
        self.pack_tile(place, in_block)
        shape, tiles = self.shape, self.tiles
        with T.serial(0, shape.groups) as group, T.serial(0, self.out_blocks) as block:
            part = Part(group, block, in_block)
            for image in windows(place.images, shape.n, tiles.micro_images, place.last_image):
                for row in windows(place.rows, shape.oh, tiles.micro_rows, place.last_row):
                    for column in windows(shape.ow, shape.ow, tiles.micro_columns, True):
                        self.micro_tile(place, part, MicroTile(image, row, column))

    def pack_tile(self, place: Place, in_block: Expr) -> None:
        """The activated input under a tile; rows outside of the image are zeros, columns outside were zeroed before."""
        shape = self.shape
        rows = (place.rows - 1) * shape.step_h + (shape.r - 1) * shape.dilation_h + 1
        with T.serial(0, place.images) as image, T.serial(0, rows) as row:
            source = T.bind(place.row * shape.stride_h + row * shape.pack_step_h - shape.top)
            target = T.bind((image * self.packed_rows + row) * self.packed_columns * self.tiles.row_stride)
            pixel = ((place.image + image) * shape.h + source) * shape.w
            with T.If(tirx.And(source >= 0, source < shape.h)):
                with T.Then():
                    self.pack_row(place, row, target, pixel, in_block)
                with T.Else():
                    first, stop = self.columns
                    stride = self.tiles.row_stride
                    zero(self.tile, target + first * stride, (stop - first) * stride, self.lanes)

    def pack_row(self, place: Place, row: Expr, target: Expr, pixel: Expr, in_block: Expr) -> None:
        """One row of the image, which starts at `pixel`, and its part of the map `stored`."""
        pack = functools.partial(self.pack_pixels, target, pixel, in_block)
        if not self.stores_in_passing:
            pack(stored=False)
            return
        top, own = self.shape.top, place.rows * self.shape.stride_h
        with T.If(tirx.And(row >= top, tirx.Or(row < top + own, place.last_row))):
            with T.Then():
                pack(stored=True)
            with T.Else():
                pack(stored=False)

    def pack_pixels(self, target: Expr, pixel: Expr, in_block: Expr, stored: bool) -> None:
        shape, tiles = self.shape, self.tiles
        first, stop = self.columns
        with T.serial(0, stop - first) as j:
            source = T.bind(pixel + (first + j) * shape.pack_step_w - shape.left)
            index = T.bind(target + (first + j) * tiles.row_stride)

            def pack(channel: Expr, width: int) -> None:
                absolute = channel + in_block * tiles.channels if self.in_blocks > 1 else channel
                self.entry.pack(self.tile, index + channel, source, absolute, width, stored)

            if self.in_blocks == 1:
                vectors(shape.cin, self.lanes, pack)
                return
            with T.serial(0, self.block_channels(in_block) // self.lanes) as i:
                pack(i * self.lanes, self.lanes)
            if tail := shape.cin % self.lanes:
                with T.If(in_block == self.in_blocks - 1), T.Then():
                    pack(shape.cin - (self.in_blocks - 1) * tiles.channels - tail, tail)

    @property
    def columns(self) -> tuple[int, int]:
        """First and last + 1 of the packed columns that lie inside of the image."""
        step, left = self.shape.pack_step_w, self.shape.left
        first = math.ceil(left / step)
        return first, max(first, min((self.shape.w - 1 + left) // step + 1, self.packed_columns))

    def clear_border(self) -> None:
        """Zero the packed columns that lie outside of the image: no tile writes them."""
        first, stop = self.columns
        stride = self.tiles.row_stride
        if first == 0 and stop == self.packed_columns:
            return
        with T.serial(0, self.tiles.images * self.packed_rows) as row:
            start = row * self.packed_columns * stride
            zero(self.tile, start, min(first, self.packed_columns) * stride, self.lanes)
            zero(self.tile, start + stop * stride, (self.packed_columns - stop) * stride, self.lanes)

    # Micro tiles

    def micro_tile(self, place: Place, part: Part, micro: MicroTile) -> None:
        accumulators = registers(micro.pixels * self.width)
        self.start(place, part, micro, accumulators)
        self.multiply(part, micro, accumulators)
        if self.in_blocks == 1:
            self.finish(place, part, micro, accumulators)
            return
        with T.If(part.in_block == self.in_blocks - 1):
            with T.Then():
                self.finish(place, part, micro, accumulators)
            with T.Else():
                for index, spilled in self.spilled(part, micro):
                    store(self.sums, spilled, accumulators[index])

    def start(self, place: Place, part: Part, micro: MicroTile, accumulators: Buffer) -> None:
        """Zero, or what the input blocks before this one left."""

        def clear() -> None:
            for index, _ in self.spilled(part, micro):
                store(accumulators, index, splat(0, self.lanes))

        if self.in_blocks == 1:
            clear()
            return
        with T.If(part.in_block == 0):
            with T.Then():
                clear()
            with T.Else():
                for index, spilled in self.spilled(part, micro):
                    store(accumulators, index, self.sums[spilled])

    def spilled(self, part: Part, micro: MicroTile) -> Iterator[tuple[Expr, Expr]]:
        """The vectors of the accumulators, and where each waits between two blocks of input channels."""
        rows, columns = self.tiles.rows, self.shape.ow
        first = (micro.image.start * rows + micro.row.start) * columns + micro.column.start
        first = part.block * (self.tiles.images * rows * columns) + first
        for p, (i, h, w) in enumerate(micro.places()):
            for v in range(self.tiles.vectors):
                index = first * self.width + (((i * rows + h) * columns + w) * self.width + v * self.lanes)
                yield span(p * self.width + v * self.lanes, self.lanes), span(index, self.lanes)

    def multiply(self, part: Part, micro: MicroTile, accumulators: Buffer) -> None:
        """accumulators += pixels * weights, over the window and a block of input channels."""
        shape, stride, columns = self.shape, self.tiles.row_stride, self.packed_columns
        offsets = [((i * self.packed_rows + h * shape.step_h) * columns + w * shape.step_w) * stride
                   for i, h, w in micro.places()]  # fmt: skip
        corner = (micro.image.start * self.packed_rows + micro.row.start * shape.step_h) * columns
        corner = (corner + micro.column.start * shape.step_w) * stride
        corner = T.bind(corner + (part.group * shape.group_cin if self.grouped else 0))
        weights = T.bind(self.weight_block(part.group, part.block, part.in_block))
        channels = self.block_channels(part.in_block)
        whole_rows = not self.grouped and stride == shape.cin and shape.dilation_w == 1
        steps_w, depth = (1, shape.s * shape.cin) if whole_rows else (shape.s, channels)
        with loop(shape.r) as r, loop(steps_w) as s, T.serial(0, depth) as k:
            pixel = corner + (r * shape.dilation_h * columns + s * shape.dilation_w) * stride + k
            row = weights + ((r * steps_w + s) * depth + k) * self.width
            for p, offset in enumerate(offsets):
                for v in range(self.tiles.vectors):
                    index = span(p * self.width + v * self.lanes, self.lanes)
                    product = self.tile[pixel + offset] * self.weights[span(row + v * self.lanes, self.lanes)]
                    store(accumulators, index, accumulators[index] + product)

    def finish(self, place: Place, part: Part, micro: MicroTile, accumulators: Buffer) -> None:
        """Bias, statistics, y."""
        shape = self.shape
        image, row = place.image + micro.image.start, place.row + micro.row.start
        first = (image * shape.oh + row) * shape.ow + micro.column.start
        pixels = [first + ((i * shape.oh + h) * shape.ow + w) for i, h, w in micro.places()]

        def body(width: int) -> None:
            for start, lanes in cut(width, self.lanes):
                channel = part.group * shape.group_cout + part.block * self.width + start
                values = [accumulators[span(p * self.width + start, lanes)] for p in range(micro.pixels)]
                if "Bias" in self.epilogue:
                    bias = T.bind(self.arguments["bias"][span(channel, lanes)])
                    values = [T.bind(value + bias) for value in values]
                for pixel, value in zip(pixels, values, strict=True):
                    store(self.y.buffer, span(self.y.at(pixel, channel), lanes), value)
                if "Statistics" in self.epilogue:
                    self.partials.add(place.thread, channel, values, lanes)

        self.with_output_width(part.block, body)


@contextlib.contextmanager
def loop(extent: int) -> Iterator[Expr]:
    """A serial loop, or none where it would run once."""
    if extent == 1:
        yield 0
    else:
        with T.serial(0, extent) as i:
            yield i


def windows(length: Expr, total: int, size: int, last: Expr) -> Iterator[Window]:
    """Loops over windows of `size` in a stretch of `length` of a tile; the tile that is `last` has the tail of `total`.

    A tile is a whole number of windows, unless it is the only one.
    """
    count = length // size
    if isinstance(count, int) and count == 1:
        yield Window(0, size)
    else:
        with T.serial(0, count) as i:
            yield Window(i * size, size)
    tail = total % size
    if tail and last is True:
        yield Window(length - tail, tail)
    elif tail:
        with T.If(last), T.Then():
            yield Window(length - tail, tail)


def covers_input(shape: ConvShape) -> bool:
    """Whether the tiles, one below the other, pack every input pixel, each in rows that one tile can call its own."""
    reach_h, reach_w = (shape.r - 1) * shape.dilation_h + 1, (shape.s - 1) * shape.dilation_w + 1
    rows = (shape.oh - 1) * shape.stride_h + reach_h - shape.top
    columns = (shape.ow - 1) * shape.stride_w + reach_w - shape.left
    dense = shape.pack_step_h == shape.pack_step_w == 1
    return dense and rows >= shape.h and columns >= shape.w and shape.top + shape.stride_h <= reach_h


def stretch(index: Expr, size: int, total: int) -> tuple[Expr, Expr, Expr]:
    """Start and length of piece `index` when `total` is cut into pieces of `size`, and whether it is the last."""
    if size >= total:
        return 0, total, True
    start = index * size
    return start, size if total % size == 0 else tirx.Min(size, total - start), start + size >= total


def cut(width: int, lanes: int) -> Iterator[tuple[int, int]]:
    """Start and width of the vectors that make up `width` channels."""
    for start in range(0, width, lanes):
        yield start, min(lanes, width - start)
