"""The multiplications of the backward Winograd convolution, and the way from their products to dx."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.images import ImagePlan
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import (
    CACHE_LINE,
    Buffer,
    Expr,
    Sums,
    chunks,
    write_epilogue,
)
from bnfuse.runtime.kernels.cpu.conv_backward_micro import Place, opaque
from bnfuse.runtime.kernels.cpu.conv_backward_nest import when
from bnfuse.runtime.kernels.cpu.images import RowSums
from bnfuse.runtime.kernels.cpu.tir import WRITE, prefetch, registers, span, store
from bnfuse.runtime.kernels.cpu.winograd import OUT, PATCH, PLACES, load_block, output_transform
from bnfuse.runtime.kernels.cpu.winograd_backward_nest import WinogradNest

# The gradient of the weights


def weight_products(
    nest: WinogradNest,
    inputs: Buffer,
    outputs: Buffer,
    partial: Buffer,
    thread: Expr,
    first_block: Expr,
    tiles: Expr,
    is_first: Expr | None,
) -> None:
    """Add inputs^T * outputs to the thread's partial, place by place; the first chunk of a thread stores, and so does
    the only one (`is_first` is None)."""
    sizes, width = nest.tiles, nest.tiles.out_block
    with (
        T.serial(0, PLACES) as place,
        T.serial(0, nest.present(first_block)) as slot,
        T.serial(0, nest.out_padded // width) as out,
        T.serial(0, sizes.block // sizes.taps) as taps,
    ):
        source = T.bind(place * nest.inputs_place + slot * (nest.count * sizes.block) + taps * sizes.taps)
        dy = T.bind(place * nest.outputs_place + out * width)
        channel = nest.held(first_block + slot) * sizes.block + taps * sizes.taps
        target = thread * nest.partial_size + place * nest.partial_place + channel * nest.out_padded + out * width
        acc = registers(sizes.taps * width)
        for i in range(sizes.taps):
            store(acc, span(i * width, width), tir.splat(0, width))
        with T.serial(0, tiles) as tile:
            row = T.bind(outputs[span(dy + tile * nest.out_padded, width)])
            for i in range(sizes.taps):
                cell = span(i * width, width)
                value = T.Broadcast(inputs[source + tile * sizes.block + i], width)
                store(acc, cell, acc[cell] + value * row)
        _add_to_partial(nest, partial, T.bind(target), acc, is_first)


def _add_to_partial(nest: WinogradNest, partial: Buffer, target: Expr, acc: Buffer, is_first: Expr | None) -> None:
    width = nest.tiles.out_block
    cells = [(span(i * width, width), span(target + i * nest.out_padded, width)) for i in range(nest.tiles.taps)]

    def put() -> None:
        for cell, index in cells:
            store(partial, index, acc[cell])

    if is_first is None:
        put()
        return
    with T.If(is_first):
        with T.Then():
            put()
        with T.Else():
            for cell, index in cells:
                store(partial, index, partial[index] + acc[cell])


# The gradient of the input


def input_gradient(
    nest: WinogradNest,
    windows: Buffer,
    weights: Buffer,
    products: Buffer,
    sums: Buffer | None,
    place: Place,
    first_block: Expr,
    tiles: Expr,
) -> None:
    """Write dx of the chunk for the blocks of input channels from `first_block` on: some micro-tiles at a time."""
    micro, together = nest.tiles.micro, nest.tiles.together
    present = nest.present(first_block)
    micros = (tiles + micro - 1) // micro
    with T.serial(0, (micros + together - 1) // together) as turn:
        first = T.bind(turn * together)
        groups = T.bind(tirx.Min(together, micros - first)) if together > 1 else 1
        with T.serial(0, PLACES) as f, T.serial(0, present) as slot, T.serial(0, groups) as group:
            if nest.tiles.micro <= PLACES:
                with when(f < micro):
                    _prefetch_tile(nest, place, first_block + slot, (first + group) * micro + f)
            _multiply(nest, windows, weights, products, f, first_block + slot, slot, first + group, group)
        with T.serial(0, present) as slot, T.serial(0, groups) as group:
            start = T.bind((first + group) * micro)
            count = T.bind(tirx.Min(micro, tiles - start))
            _finish_tiles(nest, products, sums, place, first_block + slot, slot, start, group, count)


def _pixel(nest: WinogradNest, place: Place, tile: Expr) -> tuple[Expr, Expr, Expr]:
    """Write the number of a tile's first pixel in the map of x, its row and its column."""
    rows, columns = nest.shape.rows, nest.shape.columns
    image, row, column = nest.place_of(tile)
    row, column = T.bind(place.unit + row * OUT), T.bind(column * OUT)
    return T.bind(((place.image + image) * rows.size + row) * columns.size + column), row, column


def _prefetch_tile(nest: WinogradNest, place: Place, block: Expr, tile: Expr) -> None:
    """Ask for the lines of dx that the epilogue will write."""
    pixel, _, _ = _pixel(nest, place, tile)
    corner = T.bind(nest.index(nest.result, pixel, block * nest.tiles.block))
    for i in range(OUT):
        for j in range(OUT):
            at = corner + (i * nest.shape.columns.size + j) * nest.problem.map(nest.result).stride
            for v in range(0, nest.tiles.block, CACHE_LINE):
                prefetch(nest.arguments[nest.result], at + v, WRITE)


def _multiply(
    nest: WinogradNest,
    windows: Buffer,
    weights: Buffer,
    products: Buffer,
    f: Expr,
    block: Expr,
    slot: Expr,
    number: Expr,
    group: Expr,
) -> None:
    """Write windows * weights for one place, block and micro-tile, over the output channels, in registers."""
    sizes, width = nest.tiles, nest.tiles.block
    acc = registers(sizes.micro * width)
    for i in range(sizes.micro):
        store(acc, span(i * width, width), tir.splat(0, width))
    line = opaque(f * nest.weights_place + nest.held(block) * (nest.shape.cout * width))
    at = opaque(f * nest.windows_place + number * (sizes.micro * nest.out_pitch))
    with T.serial(0, nest.shape.cout) as k:
        row = T.bind(weights[span(line + k * width, width)])
        for i in range(sizes.micro):
            cell = span(i * width, width)
            dy = T.Broadcast(windows[at + i * nest.out_pitch + k], width)
            store(acc, cell, acc[cell] + dy * row)
    target = T.bind(f * nest.products_place + (slot * nest.products_tiles + group * sizes.micro) * width)
    for i in range(sizes.micro):
        store(products, span(target + i * width, width), acc[span(i * width, width)])


def _finish_tiles(
    nest: WinogradNest,
    products: Buffer,
    sums: Buffer | None,
    place: Place,
    block: Expr,
    slot: Expr,
    start: Expr,
    group: Expr,
    count: Expr,
) -> None:
    """Write the epilogue of a micro-tile, for the channels that exist."""
    source = T.bind((slot * nest.products_tiles + group * nest.tiles.micro) * nest.tiles.block)

    def channels(width: int) -> None:
        _finish_channels(nest, products, sums, place, block, source, start, count, width)

    tir.with_width(block, nest.tiles.block, nest.shape.cin, channels)


def _finish_channels(
    nest: WinogradNest,
    products: Buffer,
    sums: Buffer | None,
    place: Place,
    block: Expr,
    source: Expr,
    start: Expr,
    count: Expr,
    width: int,
) -> None:
    """Go tile by tile: A^T m A into the scratch, then pixel by pixel out of it."""
    sizes, rows, columns = nest.tiles, nest.shape.rows, nest.shape.columns
    widths = {0: width} if width == sizes.block else chunks(width, sizes.lanes)
    first = T.bind(block * sizes.block)
    part = Sums.zero(nest, sizes.block, sizes.block)
    plan = ImagePlan.of(nest.problem)
    for image, head, stop in _stretches(nest, place, start, count):
        sums_of_image = None if plan is None else RowSums.zero(plan, sizes.block)
        with T.serial(0, stop - head) as number:
            i = head + number
            for vector in range(0, width, sizes.lanes):

                def at(row: int, column: int, vector: int = vector, i: Expr = i) -> Expr:
                    return source + i * sizes.block + (row * PATCH + column) * nest.products_place + vector

                dx = output_transform(load_block(products, PATCH, at, sizes.lanes), T.bind)
                for row in range(OUT):
                    for column in range(OUT):
                        cell = (row * OUT + column) * sizes.block + vector
                        store(place.scratch, span(cell, sizes.lanes), dx[row][column])
            corner, row, column = _pixel(nest, place, start + i)
            height, breadth = tirx.Min(OUT, rows.size - row), tirx.Min(OUT, columns.size - column)
            with T.serial(0, height) as up, T.serial(0, breadth) as left:
                pixel = T.bind(corner + up * columns.size + left)
                for begin, lanes in widths.items():
                    with T.vectorized(0, lanes) as lane:
                        inner = begin + lane
                        index = (up * OUT + left) * sizes.block + inner
                        where = (pixel, first + inner, inner)
                        write_epilogue(nest, place.scratch[index], (place.scratch, index), part, where)
                        if sums_of_image is not None:
                            sums_of_image.add(place.scratch[index], nest.loader(pixel, first + inner), inner)
        if sums_of_image is not None and place.images is not None:
            sums_of_image.flush(place.images, image, place.thread, first, widths)
    part.flush(sums, place.thread, first, widths)


def _stretches(nest: WinogradNest, place: Place, start: Expr, count: Expr) -> Iterator[tuple[Expr, Expr, Expr]]:
    """Cut a micro-tile, from tile `start` of the chunk on, where images end: image, first and behind the last tile.

    Without sums over images it is one stretch.
    """
    if place.images is None or nest.tiles.images == 1:
        yield place.image, 0, count
        return
    each = nest.chunk_rows * nest.tile_columns
    image = T.bind(start // each)
    with T.serial(0, T.bind((start + count - 1) // each - image + 1)) as k:
        begins = T.bind((image + k) * each - start)
        yield place.image + image + k, T.bind(tirx.Max(begins, 0)), T.bind(tirx.Min(count, begins + each))
