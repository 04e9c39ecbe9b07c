"""Copies into and out of the layouts that the micro-tiles read (see `conv_backward_nest.py`)."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import Buffer, Expr
from bnfuse.runtime.kernels.cpu.conv_backward_nest import Nest, inside, otherwise
from bnfuse.runtime.kernels.cpu.tir import store, zero

ROWS = 8  # of dweight, written side by side: in a longer column of rows of 12 KB all lines fall into one cache set


def pack_weights(nest: Nest, packed: Buffer) -> None:
    """Pack OIHW to [g][Cin/block][R][S][Cout][block]; the channels that fill up the last block are zeros."""
    shape, block = nest.shape, nest.tiles.block
    weight = nest.arguments["weight"]
    with T.parallel(0, nest.threads) as thread:
        first, count = tir.share(shape.groups * nest.blocks, nest.threads, thread)
        with T.serial(0, count) as i, T.serial(0, shape.cout) as out:
            item = first + i
            group, start = item // nest.blocks, item % nest.blocks * block
            source = ((group * shape.cout + out) * shape.cin + start) * shape.taps
            target = item * nest.packed_block + out * block
            valid = tirx.Min(block, shape.cin - start)
            with T.serial(0, valid) as j, T.serial(0, shape.taps) as tap:
                store(packed, target + tap * (shape.cout * block) + j, weight[source + j * shape.taps + tap])
            if shape.cin % block:
                with T.serial(valid, block) as j, T.serial(0, shape.taps) as tap:
                    store(packed, target + tap * (shape.cout * block) + j, steps.f32(0.0))


def pack_grad(nest: Nest, grad: Buffer, group: Expr, image: Expr, unit: Expr) -> None:
    """Pack dy of a tile whose first image is `image` and first row `unit`, after its prologue.

    Columns of the border are zeros from the start and never written; rows of it are not always the same.
    """
    rows, columns, pitch = nest.shape.rows, nest.shape.columns, nest.out_pitch
    left = -columns.low
    with T.serial(0, nest.tiles.images) as i, T.serial(0, nest.grad_rows) as r:
        row = T.bind(unit + r + rows.low)
        at = T.bind((i * nest.grad_rows + r) * (nest.grad_columns * pitch))
        with T.If(inside(row, rows.out)):
            with T.Then(), T.serial(0, columns.out) as c:
                pixel = T.bind(((image + i) * rows.out + row) * columns.out + c)
                _grad_pixel(nest, grad, at + (left + c) * pitch, pixel, group)
            with otherwise():
                zero(grad, at, nest.grad_columns * pitch, nest.tiles.lanes)


def _grad_pixel(nest: Nest, grad: Buffer, at: Expr, pixel: Expr, group: Expr) -> None:
    cout = nest.shape.cout

    def element(channel: Expr) -> None:
        store(grad, at + channel, nest.gradient(pixel, group * cout + channel))

    over_channels(cout, nest.tiles.lanes, element)


def over_channels(count: int, lanes: int, body: Callable[[Expr], None]) -> None:
    """Call `body(channel)` for every channel, in whole vectors and one short one."""
    tir.vectors(count, lanes, lambda start, width: tir.elementwise(width, lambda j: body(start + j)))


def pack_read(nest: Nest, read: Buffer, group: Expr, image: Expr, unit: Expr) -> None:
    """Pack x of the rows that the tile's outputs read, after its prologue."""
    width = nest.read_width
    whole, rest = divmod(nest.shape.cin, width)

    def pack(at: Expr, pixel: Expr, row: Expr) -> None:
        if whole:
            with T.serial(0, whole) as block:
                _read_row(nest, read, block * nest.read_block + at, pixel, group, block * width, width, row)
        if rest:
            _read_row(nest, read, whole * nest.read_block + at, pixel, group, whole * width, rest, row)

    _each_read_row(nest, image, unit, pack)


def pack_read_block(nest: Nest, read: Buffer, block: Expr) -> None:
    """Pack x of all images, of one block of input channels, which `read` has alone."""
    width = nest.read_width

    def channels(count: int) -> None:
        def pack(at: Expr, pixel: Expr, row: Expr) -> None:
            _read_row(nest, read, at, pixel, 0, block * width, count, row)

        _each_read_row(nest, 0, 0, pack)

    tir.with_width(block, width, nest.shape.cin, channels)


def _each_read_row(nest: Nest, image: Expr, unit: Expr, pack: Callable[[Expr, Expr, Expr], None]) -> None:
    """Call `pack(at, pixel, row)` for the rows of the read tile: where one lies in a block, its first pixel, and its
    number in the image."""
    rows, columns = nest.shape.rows, nest.shape.columns
    with T.serial(0, nest.tiles.images) as i, T.serial(0, nest.read_rows) as r:
        row = T.bind(unit * rows.stride - rows.pad + r * rows.step)
        at = (i * nest.read_rows + r) * (nest.read_columns * nest.read_width)
        pack(at, T.bind(((image + i) * rows.size + row) * columns.size), row)


def _read_row(nest: Nest, read: Buffer, at: Expr, pixel: Expr, group: Expr, start: Expr, count: int, row: Expr) -> None:
    """Pack a row of one block: `count` channels from `start`. The columns of the padding are zeros from the start."""
    columns, width, lanes = nest.shape.columns, nest.read_width, nest.tiles.lanes
    left, middle = columns.present(nest.read_columns)
    with T.If(inside(row, nest.shape.rows.size)):
        with T.Then():
            if middle:
                with T.serial(0, middle) as c:
                    column = (left + c) * columns.step - columns.pad

                    def element(channel: Expr) -> None:
                        value = nest.activated(pixel + column, group * nest.shape.cin + start + channel)
                        store(read, at + (left + c) * width + channel, value)

                    over_channels(count, lanes, element)
        with otherwise():
            zero(read, at, nest.read_columns * width, lanes)


def unpack_weight_gradient(nest: Nest, partial: Buffer) -> None:
    """Write dweight (OIHW), the sum of the threads' partials, 16 input channels at a time, so that lines are reused, of
    8 output channels, so that rows of a large power of two do not crowd a set of the cache."""
    shape, width = nest.shape, nest.read_width
    chunk = min(16, width)  # a cache line of them, chosen by hand
    chunks, rows = -(-shape.cin // chunk), min(ROWS, shape.cout)
    tiles = -(-shape.cout // rows)
    dweight = nest.arguments["dweight"]
    with T.parallel(0, nest.threads) as thread:
        first, count = tir.share(shape.groups * tiles * chunks, nest.threads, thread)
        with T.serial(0, count) as n:
            item = first + n
            group, start = item // (tiles * chunks), item % chunks * chunk
            top = item // chunks % tiles * rows
            with (
                T.serial(0, tirx.Min(rows, shape.cout - top)) as row,
                T.serial(0, tirx.Min(chunk, shape.cin - start)) as i,
            ):
                out, channel = top + row, start + i
                target = ((group * shape.cout + out) * shape.cin + channel) * shape.taps
                with T.serial(0, shape.rows.kernel) as r, T.serial(0, shape.columns.kernel) as s:
                    source = group * nest.partial_group + nest.partial_index(channel, r, s, out)
                    total = partial[source]
                    for other in range(1, nest.threads):
                        total = total + partial[source + other * nest.partial_size]
                    store(dweight, target + r * shape.columns.kernel + s, total)
