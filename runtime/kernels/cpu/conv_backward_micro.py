"""The micro-tiles of the backward convolution and what happens to a gradient before it is stored."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import product

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.geometry import Axis
from bnfuse.runtime.kernels.common.images import ImagePlan
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import (
    CACHE_LINE,
    Buffer,
    Elements,
    Expr,
    Sums,
    chunks,
    write_epilogue,
)
from bnfuse.runtime.kernels.cpu.conv_backward_nest import Nest, when
from bnfuse.runtime.kernels.cpu.images import RowSums, Slots
from bnfuse.runtime.kernels.cpu.tir import READ, WRITE, prefetch, registers, span, store


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tile lies: its group, its first image, its first u, and the thread that works on it."""

    thread: Expr
    group: Expr
    image: Expr
    unit: Expr
    scratch: Buffer  # a micro-tile of dx
    images: Slots | None = None  # the sums over images


def opaque(index: Expr) -> Expr:
    """Give the same index, which TVM will not take apart again: else LLVM may keep many pointers in an inner loop."""
    held = registers(1, "int32")
    store(held, 0, index)
    return held[0]


# The gradient of the weights


def weight_gradient(nest: Nest, read: Buffer, grad: Buffer, partial: Buffer, place: Place) -> None:
    """Add read^T * grad over the tile's outputs to the thread's partial, `taps` x `out_block` at a time."""
    rows, columns, tiles = nest.shape.rows, nest.shape.columns, nest.tiles
    with (
        T.serial(0, nest.blocks) as block,
        T.serial(0, rows.kernel) as r,
        T.serial(0, nest.weight_columns) as s,
        T.serial(0, _tap_groups(nest, block)) as taps,
        T.serial(0, nest.out_padded // tiles.out_block) as out,
    ):
        line = (block * rows.kernel + r) * nest.weight_columns + s
        base = place.thread * nest.partial_size + place.group * nest.partial_group
        target = base + line * nest.partial_row + taps * (tiles.taps * nest.out_padded) + out * tiles.out_block
        source = block * nest.read_block + s * (columns.dilation * nest.read_width) + taps * tiles.taps
        _weight_micro(nest, read, grad, partial, target, source, r, out, place)


def _tap_groups(nest: Nest, block: Expr) -> Expr:
    if nest.blocks == 1:
        return nest.weight_groups
    taps = nest.tiles.taps
    return (tirx.Min(nest.read_width, nest.shape.cin - block * nest.read_width) + (taps - 1)) // taps


def _weight_micro(
    nest: Nest,
    read: Buffer,
    grad: Buffer,
    partial: Buffer,
    target: Expr,
    source: Expr,
    r: Expr,
    out: Expr,
    place: Place,
) -> None:
    rows, columns, tiles = nest.shape.rows, nest.shape.columns, nest.tiles
    width = tiles.out_block  # LLVM parts a vector of a whole block into as many registers as it takes
    acc = registers(tiles.taps * width)
    for i in range(tiles.taps):
        store(acc, span(i * width, width), tir.splat(0, width))
    count = tirx.Min(tiles.rows, rows.out - place.unit) if nest.tile_rows * tiles.rows > rows.out else tiles.rows
    with T.serial(0, tiles.images) as image, T.serial(0, count) as h, T.serial(0, columns.out) as w:
        row = image * nest.read_rows + h * rows.tile_stride + r * rows.dilation
        at = T.bind(source + (row * nest.read_columns + w * columns.tile_stride) * nest.read_width)
        pixel = (image * nest.grad_rows + h - rows.low) * nest.grad_columns + w - columns.low
        dy = T.bind(grad[span(pixel * nest.out_pitch + out * width, width)])
        for i in range(tiles.taps):
            cell = span(i * width, width)
            store(acc, cell, acc[cell] + T.Broadcast(read[at + i], width) * dy)
    for i in range(tiles.taps):
        cell, index = span(i * width, width), span(target + i * nest.out_padded, width)
        store(partial, index, partial[index] + acc[cell])


def bias_gradient(nest: Nest, grad: Buffer, bias: Buffer, place: Place) -> None:
    """Add the sum of dy over the tile's outputs to the thread's bias: a row in float32, rows in float64."""
    if nest.spec.is_transposed:
        input_bias_gradient(nest, bias, place)
        return
    rows, columns, tiles, shape = nest.shape.rows, nest.shape.columns, nest.tiles, nest.shape
    base = (place.thread * shape.groups + place.group) * shape.cout
    with T.serial(0, tiles.images) as image, T.serial(0, tirx.Min(tiles.rows, rows.out - place.unit)) as h:
        start = ((image * nest.grad_rows + h - rows.low) * nest.grad_columns - columns.low) * nest.out_pitch
        total = tir.workspace(nest.out_padded)
        tir.zero(total, 0, nest.out_padded, tiles.lanes)
        with T.serial(0, nest.out_padded // tiles.lanes) as v, T.serial(0, columns.out) as w:
            channels = span(v * tiles.lanes, tiles.lanes)
            dy = grad[span(start + w * nest.out_pitch + v * tiles.lanes, tiles.lanes)]
            store(total, channels, total[channels] + dy)
        with T.serial(0, shape.cout) as c:
            store(bias, base + c, bias[base + c] + tirx.Cast("float64", total[c]))


def input_bias_gradient(nest: Nest, bias: Buffer, place: Place) -> None:
    """Add the sum of the map at the convolution's input, over the rows that are the tile's own: where dy lies there."""
    rows, columns, tiles, cin = nest.shape.rows, nest.shape.columns, nest.tiles, nest.shape.cin
    base = (place.thread * nest.shape.groups + place.group) * cin
    start = place.unit * rows.stride
    own = tirx.Max(0, tirx.Min(tiles.rows * rows.stride, rows.size - start))
    with T.serial(0, tiles.images) as image, T.serial(0, own) as h:
        pixel = T.bind(((place.image + image) * rows.size + start + h) * columns.size)

        def add(channel: Expr, width: int) -> None:
            add_row(nest, bias, base + channel, (pixel, columns.size), place.group * cin + channel, width)

        tir.vectors(cin, tiles.lanes, add)


def add_row(nest: Elements, bias: Buffer, at: Expr, row: tuple[Expr, int], channel: Expr, width: int) -> None:
    """Add what is read at the convolution's input, over a row of (first pixel, pixels), to float64 sums at `at`."""
    total, lanes = registers(width), span(0, width)
    store(total, lanes, tir.splat(0, width))
    with T.serial(0, row[1]) as w, T.vectorized(0, width) as j:
        store(total, j, total[j] + nest.activated(row[0] + w, channel + j))
    index = span(at, width)
    store(bias, index, bias[index] + tir.widen(total[lanes], width))


# The gradient of the input


def input_gradient(nest: Nest, grad: Buffer, packed: Buffer, sums: Buffer | None, place: Place) -> None:
    """Write dx of the tile: residue by residue, block by block, micro-tile by micro-tile."""
    rows, columns, tiles = nest.shape.rows, nest.shape.columns, nest.tiles
    width = -(-columns.size // columns.stride)
    with (
        T.serial(0, nest.blocks) as block,
        T.serial(0, rows.stride) as row_residue,
        T.serial(0, columns.stride) as column_residue,
        T.serial(0, tiles.images // tiles.micro_images) as image,
        T.serial(0, -(-tiles.rows // tiles.micro_rows)) as row,
        T.serial(0, -(-width // tiles.micro_columns)) as column,
    ):
        micro = _Micro(
            nest,
            place,
            block,
            row_residue if rows.stride > 1 else 0,
            column_residue if columns.stride > 1 else 0,
            image * tiles.micro_images,
            row * tiles.micro_rows,
            column * tiles.micro_columns,
        )
        micro.prefetch()
        acc = micro.accumulate(grad, packed)
        micro.finish(acc, sums)


@dataclasses.dataclass(frozen=True)
class _Micro:
    """A micro-tile of the input gradient, from (image, row, column) in the tile; rows and columns are values of u."""

    nest: Nest
    place: Place
    block: Expr
    row_residue: Expr
    column_residue: Expr
    image: Expr
    row: Expr
    column: Expr

    @property
    def cells(self) -> list[tuple[int, int, int]]:
        tiles = self.nest.tiles
        return list(product(range(tiles.micro_images), range(tiles.micro_rows), range(tiles.micro_columns)))

    def cell(self, n: Expr, i: Expr, j: Expr) -> Expr:
        tiles = self.nest.tiles
        return ((n * tiles.micro_rows + i) * tiles.micro_columns + j) * tiles.block

    def pixel(self, n: Expr, i: Expr, j: Expr) -> Expr:
        """Write the number of the input pixel in the map."""
        rows, columns = self.nest.shape.rows, self.nest.shape.columns
        row = (self.place.unit + self.row + i) * rows.stride + self.row_residue
        column = (self.column + j) * columns.stride + self.column_residue
        return ((self.place.image + self.image + n) * rows.size + row) * columns.size + column

    def prefetch(self) -> None:
        """Ask for the lines that the epilogue will meet: dx for writing, and x where no tap has read it."""
        self._prefetch(self.nest.result, WRITE)
        if not self.nest.spec.is_gradient:
            return
        if self.nest.shape.rows.step * self.nest.shape.columns.step > 1 or not self.nest.wants_weight:
            self._prefetch("x", READ)

    def _prefetch(self, name: str, purpose: int) -> None:
        first = self.place.group * self.nest.shape.cin + self.block * self.nest.tiles.block
        rows, columns, stride = self.nest.shape.rows, self.nest.shape.columns, self.nest.problem.map(name).stride
        corner = T.bind(self.nest.index(name, self.pixel(0, 0, 0), first))
        for n, i, j in self.cells:
            pixels = (n * rows.size + i * rows.stride) * columns.size + j * columns.stride
            for v in range(0, self.nest.tiles.block, CACHE_LINE):
                prefetch(self.nest.arguments[name], corner + pixels * stride + v, purpose)

    def accumulate(self, grad: Buffer, packed: Buffer) -> Buffer:
        """Sum over the taps that meet this residue and over the output channels, in registers."""
        nest, rows, columns = self.nest, self.nest.shape.rows, self.nest.shape.columns
        width = nest.tiles.block  # LLVM parts a vector of a whole block into as many registers as it takes
        acc = registers(len(self.cells) * width)
        for cell in range(len(self.cells)):
            store(acc, span(cell * width, width), tir.splat(0, width))

        def taps(r: Expr, s: Expr) -> None:
            line = (self.place.group * nest.blocks + self.block) * nest.packed_block
            line = opaque(line + (r * columns.kernel + s) * (nest.shape.cout * width))
            up = floor_offset(rows, self.row_residue, r) - rows.low
            left = floor_offset(columns, self.column_residue, s) - columns.low
            row = self.image * nest.grad_rows + self.row + up
            at = opaque((row * nest.grad_columns + self.column + left) * nest.out_pitch)
            with T.serial(0, nest.shape.cout) as k:
                weights = T.bind(packed[span(line + k * width, width)])
                for n, i, j in self.cells:
                    pixel = (n * nest.grad_rows + i) * nest.grad_columns + j
                    dy = T.Broadcast(grad[at + pixel * nest.out_pitch + k], width)
                    cell = span(self.cell(n, i, j), width)
                    store(acc, cell, acc[cell] + dy * weights)

        # one loop over all taps: LLVM would unroll two short ones around the loop over k
        with T.serial(0, nest.shape.taps) as tap:
            r, s = tap // columns.kernel, tap % columns.kernel
            met = meets(rows, self.row_residue, r) + meets(columns, self.column_residue, s)
            with when(tirx.all(*met)) if met else contextlib.nullcontext():
                taps(r, s)
        for cell in range(len(self.cells)):
            store(self.place.scratch, span(cell * width, width), acc[span(cell * width, width)])
        return self.place.scratch

    def finish(self, acc: Buffer, sums: Buffer | None) -> None:
        """Write the epilogue, for the rows, columns and channels that exist."""
        nest, finish_channels = self.nest, partial(self._finish_channels, acc, sums)
        tir.with_width(self.block, nest.tiles.block, nest.shape.cin, finish_channels)

    def _finish_channels(self, acc: Buffer, sums: Buffer | None, count: int) -> None:
        """Go pixel by pixel, all `count` channels of one: too much for LLVM to unroll the loop over pixels."""
        rows, columns, tiles = self.nest.shape.rows, self.nest.shape.columns, self.nest.tiles
        widths = {0: count} if count == tiles.block else chunks(count, tiles.lanes)
        first = T.bind(self.place.group * self.nest.shape.cin + self.block * tiles.block)
        part = Sums.zero(self.nest, tiles.block, tiles.block)
        height = remaining(rows, self.row_residue, self.place.unit + self.row)
        height = tirx.Min(tirx.Min(height, tiles.rows - self.row), tiles.micro_rows)
        width = tirx.Min(remaining(columns, self.column_residue, self.column), tiles.micro_columns)
        with T.serial(0, tiles.micro_images) as n, T.serial(0, height) as i:
            for image, start, stop in self._stretches(n, i, width):
                row = self._row_sums(tiles.block)
                with T.serial(0, stop - start) as j:
                    pixel = T.bind(self.pixel(n, i, start + j))
                    for begin, lanes in widths.items():
                        with T.vectorized(0, lanes) as lane:
                            inner = begin + lane
                            index = self.cell(n, i, start + j) + inner
                            write_epilogue(self.nest, acc[index], (acc, index), part, (pixel, first + inner, inner))
                            if row is not None:
                                row.add(acc[index], self.nest.loader(pixel, first + inner), inner)
                if row is not None and self.place.images is not None:
                    row.flush(self.place.images, image, self.place.thread, first, widths)
        part.flush(sums, self.place.thread, first, widths)

    def _stretches(self, n: Expr, i: Expr, width: Expr) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Cut a row of the micro-tile where images end: image, first and behind the last column of each stretch.

        Rows of a pointwise convolution are pixels of a list, and go on from image to image; others have pixels of one.
        Without sums over images the row is one stretch.
        """
        if self.place.images is None:
            yield 0, 0, width
            return
        made = self.nest.problem.map(self.nest.result)
        area, first = made.h * made.w, T.bind(self.pixel(n, i, 0))
        image = T.bind(tirx.floordiv(first, area))
        if not self.nest.shape.is_pointwise:
            yield image, 0, width
            return
        count = tirx.floordiv(first + width - 1, area) - image + 1
        with T.serial(0, T.bind(tirx.Select(width > 0, count, 0))) as k:
            begins = T.bind((image + k) * area - first)
            yield image + k, T.bind(tirx.Max(0, begins)), T.bind(tirx.Min(width, begins + area))

    def _row_sums(self, block: int) -> RowSums | None:
        """Begin the sums over pixels that are all of one image; None where there are none."""
        plan = ImagePlan.of(self.nest.problem)
        return None if plan is None else RowSums.zero(plan, block)


def meets(axis: Axis, residue: Expr, tap: Expr) -> list[Expr]:
    """Write whether a tap meets inputs of this residue, as one condition; none where all do."""
    if axis.stride == 1:
        return []
    return [tirx.floormod(residue + axis.pad - tap * axis.dilation, axis.stride) == 0]


def floor_offset(axis: Axis, residue: Expr, tap: Expr) -> Expr:
    """Write Axis.offset for taps that meet the residue."""
    distance = residue + axis.pad - tap * axis.dilation
    return distance if axis.stride == 1 else tirx.floordiv(distance, axis.stride)


def remaining(axis: Axis, residue: Expr, unit: Expr) -> Expr:
    """Write how many values of u from `unit` on are inputs; may be negative."""
    return tirx.floordiv(axis.size - residue + axis.stride - 1, axis.stride) - unit
