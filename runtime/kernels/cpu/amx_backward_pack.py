"""The packings that AMX's tiles read on the way back (amx_backward.py has the layouts)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import Buffer, Expr
from bnfuse.runtime.kernels.cpu.conv_backward_micro import Place
from bnfuse.runtime.kernels.cpu.conv_backward_nest import inside, otherwise
from bnfuse.runtime.kernels.cpu.conv_backward_pack import over_channels
from bnfuse.runtime.kernels.cpu.nest import cut
from bnfuse.runtime.kernels.cpu.tir import span, store, zero

if TYPE_CHECKING:
    from bnfuse.runtime.kernels.cpu.amx_backward import AmxNest

STAGE = 32  # columns that are packed before they are turned


def pack_weights(nest: AmxNest, packed: Buffer) -> None:
    """Pack OIHW to [cin/32][r][s][cout/2][32][2], all threads together."""
    with T.parallel(0, nest.threads) as thread:
        first, count = tir.share(nest.blocks * (nest.out_depth // 2), nest.threads, thread)
        with T.serial(0, count) as i:
            item = T.bind(first + i)
            block, pair = T.bind(item // (nest.out_depth // 2)), T.bind(item % (nest.out_depth // 2))
            _pack_pair(nest, packed, block, pair, block * nest.packed_block)


def pack_block(nest: AmxNest, packed: Buffer, block: Expr) -> None:
    """Pack the weights of one block of input channels, which `packed` has alone."""
    with T.serial(0, nest.out_depth // 2) as pair:
        _pack_pair(nest, packed, block, pair, 0)


def _pack_pair(nest: AmxNest, packed: Buffer, block: Expr, pair: Expr, base: Expr) -> None:
    """Pack the weights of two output channels and a block of input channels; those that there are not are zeros."""
    shape, size = nest.shape, nest.tiles.block
    weight, first = nest.arguments["weight"], T.bind(block * size)
    outs = [(2 * pair + behind < shape.cout, tirx.Min(2 * pair + behind, shape.cout - 1)) for behind in range(2)]

    def channels(count: int) -> None:
        with T.serial(0, shape.taps) as tap:
            row = T.bind(base + (tap * (nest.out_depth // 2) + pair) * size)
            for start, lanes in cut(count, nest.tiles.lanes):

                def bits(is_there: Expr, out: Expr, start: int = start, lanes: int = lanes) -> Expr:
                    place = ((out * shape.cin + first + start) * shape.taps) + tap
                    found = tir.wide_bits(weight[span(place, lanes, shape.taps)])
                    return tirx.Select(is_there, found, tir.splat(0, lanes, "uint32"))

                low, high = (bits(*out) for out in outs)
                store(packed, span(row + start, lanes), tir.paired(low, high))
            for start, lanes in cut(size - count, nest.tiles.lanes):
                store(packed, span(row + count + start, lanes), tir.splat(0, lanes, "uint32"))

    tir.with_width(block, size, shape.cin, channels)


def pairs_of(nest: AmxNest) -> Buffer:
    """Allocate the pairs: two neighbouring positions of a channel in the halves of 32 bits."""
    return tir.zeros(nest.tiles.images * nest.positions // 2 * nest.paired, nest.tiles.lanes, "uint32")


def pack_pairs(nest: AmxNest, grad: Buffer, pairs: Buffer, place: Place) -> None:
    """Put dy of the tile's outputs in pairs; those beside them stay zeros, and rows that there are not become so."""
    rows, columns, padded = nest.shape.rows, nest.shape.columns, nest.out_padded
    with T.serial(0, nest.tiles.images) as image, T.serial(0, nest.tiles.rows) as h:
        start = T.bind((image * nest.positions + h * nest.across) // 2 * padded)
        row = (image * nest.grad_rows + h - rows.low) * nest.grad_columns - columns.low

        def pair(at: Expr, target: Expr, both: bool) -> None:
            def channels(channel: Expr, width: int) -> None:
                low, *high = (
                    tir.widened_bits(grad.bits[span(at + behind * nest.out_pitch + channel, width)])
                    for behind in range(1 + both)
                )
                store(pairs, span(target + channel, width), tir.paired(low, *high))

            tir.vectors(nest.shape.cout, nest.tiles.lanes, channels)

        with T.If(place.unit + h < rows.out):
            with T.Then():
                whole, rest = divmod(columns.out, 2)
                if whole:
                    with T.serial(0, whole) as w:
                        pair(T.bind((row + 2 * w) * nest.out_pitch), T.bind(start + w * padded), True)
                if rest:
                    pair(T.bind((row + 2 * whole) * nest.out_pitch), start + whole * padded, False)
            with otherwise():
                zero(pairs, start, nest.across // 2 * padded, nest.tiles.lanes)


def pair_read(nest: AmxNest, pairs: Buffer, place: Place) -> None:
    """Put x of a pointwise convolution's tile, after its prologue, in pairs."""
    columns, paired = nest.shape.columns, nest.paired
    first = T.bind((place.image * nest.shape.rows.size + place.unit) * columns.size)

    def pair(pixel: Expr, target: Expr, both: bool) -> None:
        def element(channel: Expr) -> None:
            low, *high = (tir.wide_bits(nest.activated(pixel + behind, channel)) for behind in range(1 + both))
            store(pairs, target + channel, tir.paired(low, *high))

        over_channels(nest.shape.cin, nest.tiles.lanes, element)

    whole, rest = divmod(columns.size, 2)
    if whole:
        with T.serial(0, whole) as w:
            pair(T.bind(first + 2 * w), T.bind(w * paired), True)
    if rest:
        pair(first + 2 * whole, whole * paired, False)


def turn_grad(nest: AmxNest, grad: Buffer, turned: Buffer) -> None:
    """Turn dy of the tile: [image][cout][position]. Rows that there are not are zeros of the packed ones."""
    rows, columns = nest.shape.rows, nest.shape.columns
    with T.serial(0, nest.tiles.images) as image, T.serial(0, nest.tiles.rows) as h:
        source = ((image * nest.grad_rows + h - rows.low) * nest.grad_columns - columns.low) * nest.out_pitch
        target = T.bind(image * (nest.out_padded * nest.read_row) + h * nest.across)

        def turn(start: Expr, count: int, source: Expr = source, target: Expr = target) -> None:
            at = T.bind(source + start * nest.out_pitch)
            with T.serial(0, nest.shape.cout) as channel:
                _turn_row(grad, at + channel, nest.out_pitch, turned, target + channel * nest.read_row + start, count)

        tir.vectors(columns.out, STAGE, turn)


def _turn_row(source: Buffer, at: Expr, stride: int, target: Buffer, index: Expr, count: int) -> None:
    """Bring `count` elements, `stride` apart, side by side."""
    for start, lanes in cut(count, 16):
        values = source.bits[span(at + start * stride, lanes, stride)]
        T.buffer_store(target.bits, values, [span(index + start, lanes)])


def pack_read(nest: AmxNest, read: Buffer, stage: Buffer, place: Place, first: Expr, channels: int) -> None:
    """Pack x of the rows that the tile's outputs read, after its prologue, channel by channel: so many from `first`."""
    rows, columns = nest.shape.rows, nest.shape.columns
    left, middle = columns.present(nest.read_columns)
    stride = nest.strides[1]
    with T.serial(0, nest.tiles.images) as i, T.serial(0, nest.read_rows) as r:
        row = T.bind(place.unit * rows.stride - rows.pad + r * rows.step)
        pixel = T.bind(((place.image + i) * rows.size + row) * columns.size)
        for phase in range(stride):
            begin = left + (phase - left) % stride
            count = -(-(left + middle - begin) // stride)
            if count <= 0:
                continue
            at = T.bind(nest.read_at(i, r, begin))
            with T.If(inside(row, rows.size)):
                with T.Then():
                    source = pixel + begin * columns.step - columns.pad
                    whole, rest = divmod(count, STAGE)
                    turn = partial(_turn, nest, read, stage, first, channels)
                    if whole:
                        with T.serial(0, whole) as k:
                            turn(at + k * STAGE, source + k * (STAGE * stride * columns.step), STAGE)
                    if rest:
                        turn(at + whole * STAGE, source + whole * (STAGE * stride * columns.step), rest)
                with otherwise(), T.serial(0, channels) as channel:
                    zero(read, at + channel * nest.read_row, count, nest.tiles.lanes)


def _turn(
    nest: AmxNest, read: Buffer, stage: Buffer, first: Expr, channels: int, at: Expr, pixel: Expr, count: int
) -> None:
    """Pack `count` columns of a phase, pixel by pixel, and turn them."""
    width, apart = nest.turned, nest.strides[1] * nest.shape.columns.step
    with T.serial(0, count) as j:

        def element(channel: Expr) -> None:
            store(stage, j * width + channel, nest.activated(pixel + j * apart, first + channel))

        over_channels(channels, nest.tiles.lanes, element)
    with T.serial(0, channels) as channel:
        _turn_row(stage, channel, width, read, T.bind(at + channel * nest.read_row), count)


def unpack_block(nest: AmxNest, partial: Buffer, block: Expr) -> None:
    """Write dweight (OIHW) of one block of input channels, which `partial` has alone: [r][s][32][cout]."""
    shape, size = nest.shape, nest.tiles.block
    dweight, first = nest.arguments["dweight"], T.bind(block * size)

    def write(start: Expr, lanes: int) -> None:
        def channels(count: int) -> None:
            with T.serial(0, count) as channel, T.serial(0, shape.taps) as tap:
                found = partial[span((tap * size + channel) * nest.paired + start, lanes)]
                target = T.bind((start * shape.cin + first + channel) * shape.taps + tap)
                store(dweight, span(target, lanes, shape.cin * shape.taps), found)

        tir.with_width(block, size, shape.cin, channels)

    tir.vectors(shape.cout, nest.tiles.lanes, write)
