"""Pieces of the loop nests of forward convolutions: stretches of tiles, windows of micro tiles, packing a tile."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu.tiles import ConvShape
from bnfuse.runtime.kernels.cpu.tir import Buffer, Expr, share, vectors, workspace, zero


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
        """Count the output pixels."""
        return self.image.size * self.row.size * self.column.size

    def places(self) -> Iterator[tuple[int, int, int]]:
        """List image, row and column of each pixel, from the first pixel on."""
        return itertools.product(range(self.image.size), range(self.row.size), range(self.column.size))


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

    def output_pixels(self, micro: MicroTile, shape: ConvShape) -> list[Expr]:
        """Write the pixels of a micro tile, as the output map counts them."""
        image, row = self.image + micro.image.start, self.row + micro.row.start
        first = (image * shape.oh + row) * shape.ow + micro.column.start
        return [first + ((i * shape.oh + h) * shape.ow + w) for i, h, w in micro.places()]


@contextlib.contextmanager
def loop(extent: int) -> Iterator[Expr]:
    """Write a serial loop, or none where it would run once."""
    if extent == 1:
        yield 0
    else:
        with T.serial(0, extent) as i:
            yield i


def places(shape: ConvShape, images: int, rows: int, threads: int, thread: Expr) -> Iterator[Place]:
    """Write the loop over the tiles (`images` x `rows`) of a thread's static share."""
    row_tiles = math.ceil(shape.oh / rows)
    first, count = share(math.ceil(shape.n / images) * row_tiles, threads, thread)
    with T.serial(0, count) as i:
        item = T.bind(first + i)
        image_tile, row_tile = T.bind(item // row_tiles), T.bind(item % row_tiles)
        yield Place(thread, *stretch(image_tile, images, shape.n), *stretch(row_tile, rows, shape.oh))


def stretch(index: Expr, size: int, total: int) -> tuple[Expr, Expr, Expr]:
    """Give start and length of piece `index` when `total` is cut into pieces of `size`, and whether it is the last."""
    if size >= total:
        return 0, total, True
    start = index * size
    return start, size if total % size == 0 else tirx.Min(size, total - start), start + size >= total


def micro_tiles(place: Place, shape: ConvShape, sizes: tuple[int, int, int]) -> Iterator[MicroTile]:
    """Write loops over the micro tiles of a tile; whole ones and tails are separate pieces of code, of static size."""
    images, rows, columns = sizes
    for image in windows(place.images, shape.n, images, place.last_image):
        for row in windows(place.rows, shape.oh, rows, place.last_row):
            for column in windows(shape.ow, shape.ow, columns, True):
                yield MicroTile(image, row, column)


def windows(length: Expr, total: int, size: int, last: Expr) -> Iterator[Window]:
    """Write loops over windows of `size` in a stretch of `length` of a tile.

    The tile that is `last` has the tail of `total`. A tile is a whole number of windows, unless it is the only one.
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


def cut(width: int, lanes: int) -> Iterator[tuple[int, int]]:
    """List start and width of the vectors that make up `width` channels."""
    for start in range(0, width, lanes):
        yield start, min(lanes, width - start)


def block_vectors(index: Expr, block: int, total: int, lanes: int, body: Callable[[Expr, int], None]) -> None:
    """Call `body(start, width)` over the channels of block `index` of `total` channels, cut into pieces of `block`.

    `start` counts from the block's beginning; `block` is a whole number of vectors unless it is all.
    """
    if block >= total:
        vectors(total, lanes, body)
        return
    with T.serial(0, tirx.Min(block, total - index * block) // lanes) as i:
        body(i * lanes, lanes)
    if tail := total % lanes:
        with T.If(index == (total - 1) // block), T.Then():
            body((total - 1) % block + 1 - tail, tail)


def covers_input(shape: ConvShape) -> bool:
    """Tell whether the tiles together pack every input pixel, each in rows that one tile can call its own."""
    reach_h, reach_w = (shape.r - 1) * shape.dilation_h + 1, (shape.s - 1) * shape.dilation_w + 1
    rows = (shape.oh - 1) * shape.stride_h + reach_h - shape.top
    columns = (shape.ow - 1) * shape.stride_w + reach_w - shape.left
    dense = shape.pack_step_h == shape.pack_step_w == 1
    return dense and rows >= shape.h and columns >= shape.w and shape.top + shape.stride_h <= reach_h


PackPixel = Callable[[Expr, Expr, bool], None]  # index in the tile, input pixel, whether to store it as well


class PackedTile:
    """A thread's activated input: [images][packed rows][packed columns][row_stride], zeros outside of the image."""

    def __init__(
        self, shape: ConvShape, images: int, rows: int, row_stride: int, lanes: int, dtype: str = "float32"
    ) -> None:
        self.shape, self.images, self.row_stride, self.lanes = shape, images, row_stride, lanes
        self.rows, self.columns = shape.packed_rows(rows), shape.packed_columns
        self.buffer: Buffer = workspace(images * self.rows * self.columns * row_stride, dtype)
        self._clear_border()

    @property
    def first(self) -> int:
        """Give the first packed column inside of the image."""
        return min(math.ceil(self.shape.left / self.shape.pack_step_w), self.columns)

    @property
    def stop(self) -> int:
        """Give the first packed column behind those inside of the image."""
        last = (self.shape.w - 1 + self.shape.left) // self.shape.pack_step_w
        return max(self.first, min(last + 1, self.columns))

    def row_at(self, image: Expr, row: Expr) -> Expr:
        """Write where a packed row starts."""
        return (image * self.rows + row) * self.columns * self.row_stride

    def column_at(self, column: Expr) -> Expr:
        """Count the elements from the start of a packed row to one of its pixels."""
        return column * self.row_stride

    def clear_row(self, start: Expr) -> None:
        """Zero the pixels of a packed row, which lies outside of the image."""
        first, stop = self.first * self.row_stride, self.stop * self.row_stride
        zero(self.buffer, start + first, stop - first, self.lanes)

    def at(self, image: Expr, row: Expr, column: Expr) -> Expr:
        """Write where the packed pixel under an output pixel (the top left of its window) starts."""
        packed = (image * self.rows + row * self.shape.step_h) * self.columns + column * self.shape.step_w
        return packed * self.row_stride

    def corner(self, micro: MicroTile) -> Expr:
        """Write where the packed pixel under the first pixel of a micro tile starts."""
        return self.at(micro.image.start, micro.row.start, micro.column.start)

    def offsets(self, micro: MicroTile) -> list[int]:
        """Count the elements from the first pixel's packed pixel to that of each pixel of a micro tile."""
        return [self.at(*place) for place in micro.places()]

    def tap(self, r: Expr, s: Expr) -> Expr:
        """Count the elements from the top left of a window to its position (r, s)."""
        return (r * self.shape.dilation_h * self.columns + s * self.shape.dilation_w) * self.row_stride

    def pack(self, place: Place, stored: bool, pack_pixel: PackPixel) -> None:
        """Fill the tile, pixel by pixel. With `stored`, each input pixel belongs to one tile and is stored there."""
        shape = self.shape
        rows = (place.rows - 1) * shape.step_h + (shape.r - 1) * shape.dilation_h + 1
        with T.serial(0, place.images) as image, T.serial(0, rows) as row:
            source = T.bind(place.row * shape.stride_h + row * shape.pack_step_h - shape.top)
            target = T.bind(self.row_at(image, row))
            pixel = ((place.image + image) * shape.h + source) * shape.w
            pack_row = functools.partial(self._pack_row, target, pixel, pack_pixel)
            with T.If(tirx.And(source >= 0, source < shape.h)):
                with T.Then():
                    if stored:
                        own = tirx.Or(row < shape.top + place.rows * shape.stride_h, place.last_row)
                        with T.If(tirx.And(row >= shape.top, own)):
                            with T.Then():
                                pack_row(True)
                            with T.Else():
                                pack_row(False)
                    else:
                        pack_row(False)
                with T.Else():
                    self.clear_row(target)

    def _pack_row(self, target: Expr, pixel: Expr, pack_pixel: PackPixel, stored: bool) -> None:
        with T.serial(0, self.stop - self.first) as j:
            source = T.bind(pixel + (self.first + j) * self.shape.pack_step_w - self.shape.left)
            pack_pixel(T.bind(target + self.column_at(self.first + j)), source, stored)

    def _clear_border(self) -> None:
        """Zero the columns that lie outside of the image: no tile writes them."""
        if self.first == 0 and self.stop == self.columns:
            return
        with T.serial(0, self.images * self.rows) as row:
            start = row * self.columns * self.row_stride
            zero(self.buffer, start, self.first * self.row_stride, self.lanes)
            after = start + self.stop * self.row_stride
            zero(self.buffer, after, (self.columns - self.stop) * self.row_stride, self.lanes)
