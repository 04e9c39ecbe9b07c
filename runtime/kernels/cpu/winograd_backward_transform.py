"""The transforms of the backward Winograd convolution, from and to the layouts of `winograd_backward_nest.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import Buffer, Expr
from bnfuse.runtime.kernels.cpu.tir import span, store
from bnfuse.runtime.kernels.cpu.winograd import (
    OUT,
    PATCH,
    PLACES,
    input_transform,
    load_block,
    output_gradient_transform,
    store_places,
    weight_gradient_transform,
    weight_transform,
)
from bnfuse.runtime.kernels.cpu.winograd_backward_nest import WinogradNest
from bnfuse.runtime.kernels.cpu.winograd_backward_shape import KERNEL

TAPS = KERNEL * KERNEL
# Chosen by hand
GATHERED = 16  # input channels that dweight takes at a time, so that its lines are reused,
SCATTERED = 64  # and output channels, so that the partials are read in runs


# Weights


def transform_weights(nest: WinogradNest, weights: Buffer) -> None:
    """Write G w' G^T of the rotated weights, of all blocks of input channels."""
    with T.parallel(0, nest.threads) as thread:
        first, count = tir.share(nest.blocks * nest.shape.cout, nest.threads, thread)
        with T.serial(0, count) as i:
            item = T.bind(first + i)
            _transform_windows(nest, weights, item // nest.shape.cout, item % nest.shape.cout)


def transform_block(nest: WinogradNest, weights: Buffer, block: Expr) -> None:
    """Write G w' G^T of the rotated weights of one block of input channels, which `weights` has alone."""
    with T.serial(0, nest.shape.cout) as out:
        _transform_windows(nest, weights, block, out)


def _transform_windows(nest: WinogradNest, weights: Buffer, number: Expr, out: Expr) -> None:
    """Transform the windows between a block of input channels and an output channel; what fills up the last block is
    zeros."""
    shape, block, lanes = nest.shape, nest.tiles.block, nest.tiles.lanes
    source = T.bind((out * shape.cin + number * block) * TAPS)
    target = T.bind((nest.held(number) * shape.cout + out) * block)

    def vector(start: Expr, width: int) -> None:
        def rotated(r: int, s: int) -> Expr:
            return source + start * TAPS + (TAPS - 1 - (r * KERNEL + s))

        places = weight_transform(load_block(nest.arguments["weight"], KERNEL, rotated, width, TAPS), T.bind)
        store_places(weights, places, target + start, nest.weights_place, width)

    def channels(count: int) -> None:
        if count < block:
            with T.serial(0, PLACES) as place:
                tir.zero(weights, target + place * nest.weights_place + count, block - count, lanes)
        tir.vectors(count, lanes, vector)

    tir.with_width(number, block, shape.cin, channels)


def unpack_weight_gradient(nest: WinogradNest, partial: Buffer) -> None:
    """Write dweight (OIHW): G^T P G of the sum P of the threads' partials."""
    chunk, width = min(GATHERED, nest.tiles.block), min(SCATTERED, nest.out_padded)
    chunks, stripes = -(-nest.shape.cin // chunk), -(-nest.shape.cout // width)
    with T.parallel(0, nest.threads) as thread:
        first, count = tir.share(chunks * stripes, nest.threads, thread)
        gathered = tir.workspace(chunk * TAPS * width)
        with T.serial(0, count) as i:
            item = T.bind(first + i)
            start, out = T.bind(item // stripes * chunk), T.bind(item % stripes * width)
            places = [start * nest.out_padded + k * nest.partial_size for k in range(nest.threads)]
            _unpack(nest, partial, places, gathered, start, out)


def unpack_block(nest: WinogradNest, partial: Buffer, block: Expr) -> None:
    """Write dweight of one block of input channels, which `partial` has alone."""
    chunk, width = min(GATHERED, nest.tiles.block), min(SCATTERED, nest.out_padded)
    gathered = tir.workspace(chunk * TAPS * width)
    first = T.bind(block * nest.tiles.block)
    present = tirx.Min(nest.tiles.block, nest.shape.cin - first)
    with T.serial(0, (present + (chunk - 1)) // chunk) as i, T.serial(0, -(-nest.shape.cout // width)) as stripe:
        place = i * (chunk * nest.out_padded)
        _unpack(nest, partial, [place], gathered, T.bind(first + i * chunk), T.bind(stripe * width))


def _unpack(
    nest: WinogradNest, partial: Buffer, places: Sequence[Expr], gathered: Buffer, start: Expr, out: Expr
) -> None:
    """Write dweight of some channels from `start` and `out` on, whose partials begin at `places`."""
    shape, lanes = nest.shape, nest.tiles.lanes
    chunk, width = min(GATHERED, nest.tiles.block), min(SCATTERED, nest.out_padded)
    channels = T.bind(tirx.Min(chunk, shape.cin - start))
    present = T.bind(tirx.Min(width, shape.cout - out))
    with T.serial(0, channels) as channel, T.serial(0, (present + lanes - 1) // lanes) as v:
        source = T.bind(channel * nest.out_padded + out + v * lanes)
        for tap, value in enumerate(_weight_gradient(nest, partial, [place + source for place in places])):
            store(gathered, span((channel * TAPS + tap) * width + v * lanes, lanes), value)
    with T.serial(0, present) as lane:
        target = T.bind(((out + lane) * shape.cin + start) * TAPS)
        with T.serial(0, channels * TAPS) as j:
            store(nest.arguments["dweight"], target + j, gathered[j * width + lane])


def _weight_gradient(nest: WinogradNest, partial: Buffer, sources: Sequence[Expr]) -> list[Expr]:
    """Write the 9 taps for one input channel and a vector of output channels, the sum of those at `sources`."""

    def total(row: int, column: int) -> Expr:
        place = (row * PATCH + column) * nest.partial_place
        parts = [partial[span(source + place, nest.tiles.lanes)] for source in sources]
        return T.bind(sum(parts[1:], parts[0]))

    sums = [[total(row, column) for column in range(PATCH)] for row in range(PATCH)]
    return [value for row in weight_gradient_transform(sums, T.bind) for value in row]


# Maps


def each_tile(nest: WinogradNest, rows: Expr, body: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
    """Call `body(image, row, column, tile)` for the tiles of a chunk, which has `rows` rows of them in each image."""
    with (
        T.serial(0, nest.tiles.images) as image,
        T.serial(0, rows) as row,
        T.serial(0, nest.tile_columns) as column,
    ):
        body(image, row, column, (image * nest.chunk_rows + row) * nest.tile_columns + column)


def transform_read(nest: WinogradNest, read: Buffer, inputs: Buffer, block: Expr, slot: Expr, rows: Expr) -> None:
    """Write B^T x B of a block of input channels, into its slot of the `in_blocks` that are taken together."""
    width, apart = nest.read_width, nest.inputs_place

    def tile(image: Expr, row: Expr, column: Expr, number: Expr) -> None:
        corner = ((image * nest.read_rows + row * OUT) * nest.read_columns + column * OUT) * width
        source = T.bind(nest.held(block) * nest.read_block + corner)
        target = T.bind((slot * nest.count + number) * nest.tiles.block)

        def vector(start: Expr, lanes: int) -> None:
            def at(i: int, j: int) -> Expr:
                return source + (i * nest.read_columns + j) * width + start

            places = input_transform(load_block(read, PATCH, at, lanes), T.bind)
            store_places(inputs, places, target + start, apart, lanes)

        tir.vectors(width, nest.tiles.lanes, vector)

    each_tile(nest, rows, tile)


def transform_grad(
    nest: WinogradNest, grad: Buffer, outputs: Buffer | None, windows: Buffer | None, rows: Expr
) -> None:
    """Write A dy A^T of the tiles, and B^T dy B of the windows that their dx reads."""
    lows = nest.shape.rows.low, nest.shape.columns.low
    offsets = nest.shape.rows.pad - PATCH + OUT, nest.shape.columns.pad - PATCH + OUT
    pitch = nest.out_pitch

    def tile(image: Expr, row: Expr, column: Expr, number: Expr) -> None:
        def corner(up: int, left: int) -> Expr:
            line = image * nest.grad_rows + row * OUT + up - lows[0]
            return T.bind((line * nest.grad_columns + column * OUT + left - lows[1]) * pitch)

        own = corner(0, 0) if outputs is not None else None
        seen = corner(*offsets) if windows is not None else None

        def vector(start: Expr, lanes: int) -> None:
            def at(source: Expr) -> Callable[[int, int], Expr]:
                return lambda i, j: source + (i * nest.grad_columns + j) * pitch + start

            if outputs is not None:
                places = output_gradient_transform(load_block(grad, OUT, at(own), lanes), T.bind)
                store_places(outputs, places, number * nest.out_padded + start, nest.outputs_place, lanes)
            if windows is not None:
                places = input_transform(load_block(grad, PATCH, at(seen), lanes), T.bind)
                store_places(windows, places, number * pitch + start, nest.windows_place, lanes)

        tir.vectors(nest.shape.cout, nest.tiles.lanes, vector)

    each_tile(nest, rows, tile)
