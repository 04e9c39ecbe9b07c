"""Both gradients of a convolution in bfloat16 by AMX's tiles (amx.py); what they have in common with those in float32
is in conv_backward.py.

    pack the weights: [cin/32][r][s][cout/2][32][2], cout rounded up to 32                  workspace, bfloat16
    parallel over threads, for the thread's tiles (rows of dy, and the rows of x that they meet):
        grad <- dy after its prologue, with a border of zeros: [position][cout]             second-level cache
        dweight: pairs <- grad: [position/2][cout][2]; read <- x after its prologue: [cin][position]
                 for r, s, 32 of cin, 32 of cout: partial += read * pairs over the positions
                 (1x1 with fewer channels at its output: pairs <- x, read <- grad; turning is what takes time)
        dx:      for residues, 32 of cin and 32 positions: sums += grad * weights, over r, s, 32 of cout
                 to a scratch, and from there through the epilogue

As on the way forward (amx_forward.py) positions are all places of a row of a tile, pixels or not. Towards x those are
of `grad`. Over the pixels they are of `read`, whose rows each tap loads from another place on: there dy is zero
beside the pixels. `read` is cut into phases by the stride. Takes one group, and no sums over images.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from functools import partial
from typing import ClassVar

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.geometry import Axis, Convolution, convolution_of
from bnfuse.runtime.kernels.common.images import ImagePlan
from bnfuse.runtime.kernels.common.sides import sides
from bnfuse.runtime.kernels.cpu import amx, tir
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import Buffer, Expr, Sums, write_epilogue
from bnfuse.runtime.kernels.cpu.conv_backward_micro import Place, bias_gradient, floor_offset, meets, remaining
from bnfuse.runtime.kernels.cpu.conv_backward_nest import Nest, inside, otherwise, when
from bnfuse.runtime.kernels.cpu.conv_backward_pack import over_channels, pack_grad
from bnfuse.runtime.kernels.cpu.conv_backward_shape import Plan, Tiles
from bnfuse.runtime.kernels.cpu.nest import cut
from bnfuse.runtime.kernels.cpu.tir import HALF, span, store, zero
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.target import CpuTarget

LEAST_CHANNELS = 16  # of either side: half of a tile is zeros then
# The cost rule, chosen by hand, without a machine to measure on
POSITIONS = 1024  # of a tile, at most
TILE_BYTES = 1200 << 10  # of its packings, in 2 MiB of second-level cache
TILE_OVERHEAD = 64  # what a tile costs beyond its positions, in positions: the partial is loaded and stored
STAGE = 32  # columns that are packed before they are turned


def takes(problem: Problem, shape: Convolution, target: CpuTarget) -> bool:
    """Tell whether gradients are made by tiles: of maps in 16 bits, of one group, of channels enough."""
    return (
        target.amx
        and all(problem.map(name).dtype == HALF for name in sides(problem.spec) if name in dict(problem.maps))
        and shape.groups == 1
        and min(shape.cin, shape.cout) >= LEAST_CHANNELS
        and ImagePlan.of(problem) is None
    )


def plan_of(problem: Problem, target: CpuTarget) -> Plan:
    """Choose how the kernel sees a problem, and its tiles: a pointwise one's pixels are cut into rows, each a tile."""
    shape = convolution_of(problem)
    if shape.is_pointwise:
        pixels = shape.n * shape.rows.size * shape.columns.size
        widths = [width for width in range(1, min(pixels, POSITIONS) + 1) if pixels % width == 0]
        seen = [
            dataclasses.replace(shape, n=1, rows=Axis(pixels // width, pixels // width), columns=Axis(width, width))
            for width in widths
        ]
        plans = [Plan(one, _tiles(1, 1, target.lanes)) for one in seen]
    else:
        counts = [(1, rows) for rows in range(1, shape.rows.units + 1)]
        counts += [(images, shape.rows.units) for images in range(2, shape.n + 1) if shape.n % images == 0]
        plans = [Plan(shape, _tiles(images, rows, target.lanes)) for images, rows in counts]
    fitting = [plan for plan in plans if _fits(plan)] or plans[:1]
    return min(fitting, key=lambda plan: cost(plan, target))


def _tiles(images: int, rows: int, lanes: int) -> Tiles:
    return Tiles(images, rows, 1, 1, 1, amx.BLOCK, lanes, amx.BLOCK, amx.BLOCK)


def _fits(plan: Plan) -> bool:
    shape, tiles = plan.shape, plan.tiles
    rows, columns = (axis.high - axis.low for axis in (shape.rows, shape.columns))
    positions = tiles.images * (tiles.rows + rows) * (shape.columns.units + columns)
    return positions <= 2 * POSITIONS and 2 * positions * (2 * shape.cout + shape.cin) <= TILE_BYTES


def cost(plan: Plan, target: CpuTarget) -> float:
    """Estimate the busiest thread's work, in positions."""
    shape, tiles = plan.shape, plan.tiles
    items = shape.n // tiles.images * math.ceil(shape.rows.units / tiles.rows)
    positions = math.ceil(tiles.rows * shape.columns.units / amx.BLOCK) * amx.BLOCK
    halo = shape.rows.high - shape.rows.low
    border = halo * shape.columns.units / 4  # packed, not multiplied
    return math.ceil(items / target.threads) * (tiles.images * (positions + border) + TILE_OVERHEAD)


@dataclasses.dataclass(frozen=True)
class AmxNest(Nest):
    """The layouts of the module's docstring, in place of those of conv_backward_nest.py."""

    packed_dtype: ClassVar[str] = HALF

    @property
    def out_depth(self) -> int:
        """Count the output channels in whole depths of products."""
        return amx.deep(self.shape.cout)

    @property
    def out_pitch(self) -> int:
        """Count the elements between positions of the grad tile."""
        return amx.pitch(self.shape.cout)

    @property
    def packed_block(self) -> int:
        """Count the elements of a packed block: [r][s][cout/2][32][2]."""
        return self.shape.taps * self.out_depth * self.tiles.block

    @property
    def is_dense(self) -> bool:
        """Keep the places of the window apart in the partial: [cin/32][r][s][32][cout]."""
        return False

    @property
    def read_width(self) -> int:
        """Count the channels of a block of the partial: whole tiles."""
        return self.tiles.block

    @property
    def grad_size(self) -> int:
        """Count the elements of the grad tile, with what the last window overhangs."""
        return super().grad_size + amx.BLOCK * self.out_pitch

    @property
    def micro_size(self) -> int:
        """Count the floats of a block of sums."""
        return amx.BLOCK * amx.BLOCK

    # The sides of dweight: one is turned, of the other one positions are paired

    @property
    def turns_grad(self) -> bool:
        """Tell whether dy is turned in the place of x: where it has fewer channels, and no tap moves x."""
        return self.shape.is_pointwise and self.shape.cout < self.shape.cin

    @property
    def turned(self) -> int:
        """Count the channels of the side that is turned, in whole blocks."""
        return self.out_padded if self.turns_grad else self.blocks * self.tiles.block

    @property
    def paired(self) -> int:
        """Count the channels of the side whose positions are paired, in whole blocks."""
        return self.blocks * self.tiles.block if self.turns_grad else self.out_padded

    @property
    def partial_row(self) -> int:
        """Count the floats per (block, row, column) of the partial: [32][paired]."""
        return amx.BLOCK * self.paired

    @property
    def partial_group(self) -> int:
        """Count the floats of a thread's partial."""
        return self.turned * self.shape.taps * self.paired

    def partial_index(self, channel: Expr, r: Expr, s: Expr, out: Expr) -> Expr:
        """Write where an element of dweight lies in a partial."""
        return out * self.paired + channel if self.turns_grad else super().partial_index(channel, r, s, out)

    # The read tile: [image][row % stride][column % stride][channel][row / stride, column / stride]

    @property
    def strides(self) -> tuple[int, int]:
        """Give rows and columns of the read tile from one output to the next."""
        return self.shape.rows.tile_stride, self.shape.columns.tile_stride

    @property
    def across(self) -> int:
        """Count the positions of a row: an even number, so that no pair lies in two rows."""
        count = math.ceil(self.read_columns / self.strides[1])
        return count + count % 2

    @property
    def positions(self) -> int:
        """Count the positions of an image's outputs, in whole depths of products."""
        return amx.deep(self.tiles.rows * self.across)

    @property
    def read_row(self) -> int:
        """Count the elements from channel to channel: the positions, with what the last products overhang."""
        rows = math.ceil(self.read_rows / self.strides[0])
        furthest = (self.shape.rows.kernel - 1) * self.shape.rows.dilation // self.strides[0] * self.across
        furthest += (self.shape.columns.kernel - 1) * self.shape.columns.dilation // self.strides[1]
        return amx.pitch(max(rows * self.across, self.positions + furthest))

    @property
    def read_phase(self) -> int:
        """Count the elements of a phase."""
        return self.turned * self.read_row

    @property
    def read_image(self) -> int:
        """Count the elements of an image of the read tile."""
        return self.strides[0] * self.strides[1] * self.read_phase

    def read_at(self, image: Expr, row: Expr, column: Expr) -> Expr:
        """Write where the first channel of a position of the read tile lies."""
        down, across = self.strides
        phase = image * self.read_image + (row % down * across + column % across) * self.read_phase
        return phase + row // down * self.across + column // across


def pack_weights(nest: AmxNest, packed: Buffer) -> None:
    """Pack OIHW to [cin/32][r][s][cout/2][32][2]; the channels that fill up are zeros."""
    shape, block, depth = nest.shape, nest.tiles.block, nest.out_depth
    weight = nest.arguments["weight"]
    with T.parallel(0, nest.threads) as thread:
        first, count = tir.share(nest.blocks * depth, nest.threads, thread)
        with T.serial(0, count) as i:
            item = T.bind(first + i)
            out, start = T.bind(item % depth), T.bind(item // depth * block)
            valid = T.bind(tirx.Select(out < shape.cout, tirx.Min(block, shape.cin - start), 0))
            source = (out * shape.cin + start) * shape.taps
            target = item // depth * nest.packed_block + out // 2 * (2 * block) + out % 2
            with T.serial(0, shape.taps) as tap:
                row = target + tap * (depth * block)
                with T.serial(0, valid) as j:
                    store(packed, row + 2 * j, weight[source + j * shape.taps + tap])
                with T.serial(valid, block) as j:
                    store(packed, row + 2 * j, tirx.const(0, "float32"))


def work(nest: AmxNest, space: dict[str, Buffer], thread: Expr) -> None:
    """Write a thread's share of the tiles."""
    lanes, images = nest.tiles.lanes, nest.tiles.images
    grad = tir.workspace(nest.grad_size, HALF)
    zero(grad, 0, nest.grad_size, lanes)
    if nest.wants_weight:
        read, pairs = tir.workspace(images * nest.read_image, HALF), _pairs(nest)
        zero(read, 0, images * nest.read_image, lanes)
        stage = None if nest.turns_grad else tir.workspace(STAGE * nest.blocks * nest.tiles.block, HALF)
    scratch = tir.workspace(nest.micro_size)
    first, count = tir.share(nest.items, nest.threads, thread)
    with amx.tiles(), T.serial(0, count) as number:
        item = T.bind(first + number)
        image, unit = T.bind(item // nest.tile_rows * images), T.bind(item % nest.tile_rows * nest.tiles.rows)
        place = Place(thread, 0, image, unit, scratch)
        pack_grad(nest, grad, 0, image, unit)
        if "bias" in space:
            bias_gradient(nest, grad, space["bias"], place)
        if nest.wants_weight:
            if nest.turns_grad:
                pair_read(nest, pairs, place)
                turn_grad(nest, grad, read)
            else:
                pack_pairs(nest, grad, pairs, place)
                pack_read(nest, read, stage, place)
            weight_gradient(nest, read, pairs, space["partial"], place)
        if nest.wants_input:
            input_gradient(nest, grad, space["packed"], space.get("sums"), place)


# The gradient of the weights


def _pairs(nest: AmxNest) -> Buffer:
    """Allocate the pairs: two neighbouring positions of a channel in the halves of 32 bits."""
    size = nest.tiles.images * nest.positions // 2 * nest.paired
    pairs = tir.workspace(size, "uint32")
    zero(pairs, 0, size, nest.tiles.lanes)
    return pairs


def pack_pairs(nest: AmxNest, grad: Buffer, pairs: Buffer, place: Place) -> None:
    """Put dy of the tile's outputs in pairs; those beside them stay zeros, and rows that there are not become so."""
    rows, columns, padded = nest.shape.rows, nest.shape.columns, nest.out_padded
    with T.serial(0, nest.tiles.images) as image, T.serial(0, nest.tiles.rows) as h:
        start = T.bind((image * nest.positions + h * nest.across) // 2 * padded)
        row = (image * nest.grad_rows + h - rows.low) * nest.grad_columns - columns.low

        def pair(at: Expr, target: Expr, both: bool) -> None:
            def channels(channel: Expr, width: int) -> None:
                def bits(behind: int) -> Expr:
                    found = grad.bits[span(at + behind * nest.out_pitch + channel, width)]
                    return tirx.Cast(tir.like("uint32", found), found)

                value = bits(0)
                if both:
                    value = value | (bits(1) << tir.constant(16, "uint32", value))
                store(pairs, span(target + channel, width), value)

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
            low, *high = (
                tirx.Cast("uint32", tir.rounded(nest.activated(pixel + behind, channel))) for behind in range(1 + both)
            )
            store(pairs, target + channel, low | (high[0] << tirx.const(16, "uint32")) if both else low)

        over_channels(nest.shape.cin, nest.tiles.lanes, element)

    whole, rest = divmod(columns.size, 2)
    if whole:
        with T.serial(0, whole) as w:
            pair(T.bind(first + 2 * w), T.bind(w * paired), True)
    if rest:
        pair(first + 2 * whole, whole * paired, False)


def turn_grad(nest: AmxNest, grad: Buffer, read: Buffer) -> None:
    """Turn dy of a pointwise convolution's tile: [cout][position]."""
    whole, rest = divmod(nest.shape.columns.size, STAGE)

    def turn(start: Expr, count: int) -> None:
        with T.serial(0, nest.shape.cout) as channel:
            _turn_row(
                grad, start * nest.out_pitch + channel, nest.out_pitch, read, channel * nest.read_row + start, count
            )

    if whole:
        with T.serial(0, whole) as k:
            turn(T.bind(k * STAGE), STAGE)
    if rest:
        turn(whole * STAGE, rest)


def _turn_row(source: Buffer, at: Expr, stride: int, target: Buffer, index: Expr, count: int) -> None:
    """Bring `count` elements, `stride` apart, side by side."""
    for start, lanes in cut(count, 16):
        values = source.bits[span(at + start * stride, lanes, stride)]
        T.buffer_store(target.bits, values, [span(index + start, lanes)])


def pack_read(nest: AmxNest, read: Buffer, stage: Buffer, place: Place) -> None:
    """Pack x of the rows that the tile's outputs read, after its prologue, channel by channel."""
    rows, columns = nest.shape.rows, nest.shape.columns
    left, middle = columns.present(nest.read_columns)
    stride = nest.strides[1]
    with T.serial(0, nest.tiles.images) as i, T.serial(0, nest.read_rows) as r:
        row = T.bind(place.unit * rows.stride - rows.pad + r * rows.step)
        pixel = T.bind(((place.image + i) * rows.size + row) * columns.size)
        for phase in range(stride):
            first = left + (phase - left) % stride
            count = -(-(left + middle - first) // stride)
            if count <= 0:
                continue
            at = T.bind(nest.read_at(i, r, first))
            with T.If(inside(row, rows.size)):
                with T.Then():
                    source = pixel + first * columns.step - columns.pad
                    whole, rest = divmod(count, STAGE)
                    turn = partial(_turn, nest, read, stage)
                    if whole:
                        with T.serial(0, whole) as k:
                            turn(at + k * STAGE, source + k * (STAGE * stride * columns.step), STAGE)
                    if rest:
                        turn(at + whole * STAGE, source + whole * (STAGE * stride * columns.step), rest)
                with otherwise(), T.serial(0, nest.shape.cin) as channel:
                    zero(read, at + channel * nest.read_row, count, nest.tiles.lanes)


def _turn(nest: AmxNest, read: Buffer, stage: Buffer, at: Expr, pixel: Expr, count: int) -> None:
    """Pack `count` columns of a phase, pixel by pixel, and turn them."""
    width, apart = nest.blocks * nest.tiles.block, nest.strides[1] * nest.shape.columns.step
    with T.serial(0, count) as j:

        def element(channel: Expr) -> None:
            store(stage, j * width + channel, nest.activated(pixel + j * apart, channel))

        over_channels(nest.shape.cin, nest.tiles.lanes, element)
    with T.serial(0, nest.shape.cin) as channel:
        _turn_row(stage, channel, width, read, T.bind(at + channel * nest.read_row), count)


def weight_gradient(nest: AmxNest, read: Buffer, pairs: Buffer, total: Buffer, place: Place) -> None:
    """Add read * pairs over the tile's positions to the thread's partial, 32 x 32 channels at a time."""
    rows, columns, paired = nest.shape.rows, nest.shape.columns, nest.paired
    with (
        T.serial(0, nest.turned // amx.BLOCK) as block,
        T.serial(0, rows.kernel) as r,
        T.serial(0, columns.kernel) as s,
        T.serial(0, paired // amx.BLOCK) as other,
    ):
        line = (block * rows.kernel + r) * columns.kernel + s
        target = T.bind(place.thread * nest.partial_size + line * nest.partial_row + other * amx.BLOCK)
        tap = T.bind(nest.read_at(0, r * rows.dilation, s * columns.dilation) + block * (amx.BLOCK * nest.read_row))
        amx.resume(2, total, target, paired)
        with T.serial(0, nest.tiles.images) as image, T.serial(0, nest.positions // amx.DEPTH) as k:
            left = read, tap + image * nest.read_image + k * amx.DEPTH, nest.read_row
            pair = (image * (nest.positions // 2) + k * amx.SIDE) * paired + other * amx.BLOCK
            amx.add(2, left, (pairs, pair, paired))
        amx.leave(2, total, target, paired)


# The gradient of the input


def input_gradient(nest: AmxNest, grad: Buffer, packed: Buffer, sums: Buffer | None, place: Place) -> None:
    """Write dx of the tile: residue by residue, a block of channels of 32 positions at a time."""
    rows, columns, tiles = nest.shape.rows, nest.shape.columns, nest.tiles
    positions = (tiles.rows - 1) * nest.grad_columns + math.ceil(columns.size / columns.stride)
    windows = math.ceil(positions / amx.BLOCK)
    with (
        T.serial(0, rows.stride) as row_residue,
        T.serial(0, columns.stride) as column_residue,
        amx.sweep(nest.packed_size, nest.blocks, tiles.images, windows) as (block, image, window),
    ):
        residues = (row_residue if rows.stride > 1 else 0, column_residue if columns.stride > 1 else 0)
        start = T.bind(window * amx.BLOCK)
        _multiply(nest, grad, packed, place, block, residues, image, start)
        finish = partial(_finish, nest, sums, place, block, residues, image, start)
        tir.with_width(block, tiles.block, nest.shape.cin, finish)


def _multiply(
    nest: AmxNest,
    grad: Buffer,
    packed: Buffer,
    place: Place,
    block: Expr,
    residues: tuple[Expr, Expr],
    image: Expr,
    start: Expr,
) -> None:
    """Leave the sums of 32 positions, over the taps that meet the residues and the output channels, in the scratch."""
    rows, columns, row = nest.shape.rows, nest.shape.columns, 2 * nest.tiles.block
    amx.clear(2)
    with T.serial(0, nest.shape.taps) as tap:
        r, s = T.bind(tap // columns.kernel), T.bind(tap % columns.kernel)
        met = meets(rows, residues[0], r) + meets(columns, residues[1], s)
        with when(tirx.all(*met)) if met else contextlib.nullcontext():
            up = floor_offset(rows, residues[0], r) - rows.low
            left = floor_offset(columns, residues[1], s) - columns.low
            first = (image * nest.grad_rows + up) * nest.grad_columns + left + start
            at = T.bind(first * nest.out_pitch)
            line = T.bind(block * nest.packed_block + tap * (nest.out_depth * amx.BLOCK))
            with T.serial(0, nest.out_depth // amx.DEPTH) as k:
                weights = packed, line + k * (amx.SIDE * row), row
                amx.add(2, (grad, at + k * amx.DEPTH, nest.out_pitch), weights)
    amx.leave(2, place.scratch, 0, amx.BLOCK)


def _finish(
    nest: AmxNest,
    sums: Buffer | None,
    place: Place,
    block: Expr,
    residues: tuple[Expr, Expr],
    image: Expr,
    start: Expr,
    count: int,
) -> None:
    """Write the epilogue of the pixels among 32 positions, `count` channels of each."""
    rows, columns, across = nest.shape.rows, nest.shape.columns, nest.grad_columns
    first = T.bind(block * amx.BLOCK)
    part, widths = Sums.zero(nest, amx.BLOCK, nest.tiles.lanes), dict(cut(count, nest.tiles.lanes))
    height = tirx.Min(remaining(rows, residues[0], place.unit), nest.tiles.rows)
    width = remaining(columns, residues[1], 0)
    top = T.bind(start // across)
    bottom = T.bind(tirx.Min((start + amx.BLOCK - 1) // across, height - 1))
    with T.serial(0, tirx.Max(0, bottom - top + 1)) as i:
        row = T.bind(top + i)
        begins = T.bind(tirx.Max(start - row * across, 0))
        ends = tirx.Min(start + amx.BLOCK - row * across, width)
        line = ((place.image + image) * rows.size + (place.unit + row) * rows.stride + residues[0]) * columns.size
        with T.serial(0, tirx.Max(0, ends - begins)) as j:
            column = T.bind(begins + j)
            pixel = T.bind(line + column * columns.stride + residues[1])
            number = T.bind((row * across + column - start) * amx.BLOCK)
            for begin, lanes in widths.items():
                with T.vectorized(0, lanes) as lane:
                    inner = begin + lane
                    cell = place.scratch, number + inner
                    write_epilogue(nest, place.scratch[number + inner], cell, part, (pixel, first + inner, inner))
    part.flush(sums, place.thread, first, widths)
