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

from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.common.geometry import Axis, Convolution, convolution_of
from bnfuse.runtime.kernels.common.images import ImagePlan
from bnfuse.runtime.kernels.common.sides import sides
from bnfuse.runtime.kernels.cpu import amx, tir
from bnfuse.runtime.kernels.cpu.amx_backward_pack import (
    STAGE,
    pack_block,
    pack_pairs,
    pack_read,
    pair_read,
    pairs_of,
    turn_grad,
    unpack_block,
)
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import Buffer, Expr, Sums, write_epilogue
from bnfuse.runtime.kernels.cpu.conv_backward_micro import Place, bias_gradient, floor_offset, meets, remaining
from bnfuse.runtime.kernels.cpu.conv_backward_nest import Nest, when
from bnfuse.runtime.kernels.cpu.conv_backward_pack import pack_grad
from bnfuse.runtime.kernels.cpu.conv_backward_shape import Plan, Tiles
from bnfuse.runtime.kernels.cpu.nest import cut
from bnfuse.runtime.kernels.cpu.tir import HALF, READ, WRITE, prefetch
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.target import CpuTarget

LEAST_CHANNELS = 16  # of either side: half of a tile is zeros then
# The cost rule, chosen by hand
POSITIONS = 1024  # of a tile, at most
TILE_BYTES = 1200 << 10  # of its packings, in 2 MiB of second-level cache
TILE_OVERHEAD = 64  # what a tile costs beyond its positions, in positions: the partial is loaded and stored
PARTIAL_BYTES = 1 << 20  # of a partial that stays near: tiles load and store it at little cost
BLOCK_BYTES = 4 << 20  # of a thread's packings of dy, all of it, where threads share the input channels


def takes(problem: Problem, shape: Convolution, target: CpuTarget) -> bool:
    """Tell whether gradients are made by tiles: of maps in 16 bits, of one group, of channels enough."""
    return is_able(problem, shape, target) and min(shape.cin, shape.cout) >= LEAST_CHANNELS


def is_able(problem: Problem, shape: Convolution, target: CpuTarget) -> bool:
    """Tell whether tiles can make gradients, of however few channels: of maps in 16 bits, of one group."""
    return (
        target.amx
        and all(problem.map(name).dtype == HALF for name in sides(problem.spec) if name in dict(problem.maps))
        and shape.groups == 1
        and ImagePlan.of(problem) is None
    )


def plan_of(problem: Problem, target: CpuTarget) -> Plan:
    """Choose how the kernel sees a problem, and its tiles: a pointwise one's pixels are cut into rows, each a tile."""
    return best_plan(plans_of(convolution_of(problem), target), target)


def plans_of(shape: Convolution, target: CpuTarget) -> list[Plan]:
    """List the ways to see a shape, and to cut it into tiles."""
    if shape.is_pointwise:
        pixels = shape.n * shape.rows.size * shape.columns.size
        widths = [width for width in range(1, min(pixels, POSITIONS) + 1) if pixels % width == 0]
        seen = [
            dataclasses.replace(shape, n=1, rows=Axis(pixels // width, pixels // width), columns=Axis(width, width))
            for width in widths
        ]
        return [Plan(one, _tiles(1, 1, target.lanes)) for one in seen]
    counts = [(1, rows) for rows in range(1, shape.rows.units + 1)]
    counts += [(images, shape.rows.units) for images in range(2, shape.n + 1) if shape.n % images == 0]
    return [Plan(shape, _tiles(images, rows, target.lanes)) for images, rows in counts]


def best_plan(plans: list[Plan], target: CpuTarget) -> Plan:
    """Choose the one of those that fit that the busiest thread is through with first."""
    fitting = [plan for plan in plans if _fits(plan)] or plans[:1]
    return min(fitting, key=lambda plan: cost(plan, target))


def plan_by_block(problem: Problem, tiled: Plan, target: CpuTarget) -> Plan | None:
    """Choose all of the pixels as one tile of each thread, which then share the input channels, in the place of a plan.

    Where they have to pack less for it than large partials of the tiles of `tiled` would move, and it stays near. None
    elsewhere.
    """
    shape = convolution_of(problem)
    weights = shape.cin * shape.cout * shape.taps
    if shape.is_pointwise:
        pixels = shape.n * shape.rows.size * shape.columns.size
        shape = dataclasses.replace(shape, n=1, rows=Axis(1, 1), columns=Axis(pixels, pixels))
    turns = tiled.shape.is_pointwise and shape.cout < shape.cin  # what takes little by tiles (AmxNest.turns_grad)
    positions = shape.n * _with_border(shape.rows) * _with_border(shape.columns)
    again = (target.threads - 1) * shape.cout + turns * shape.cin  # channels of each position, for all threads
    moved = weights * (math.ceil(_items(tiled) / target.threads) + 1)
    blocks = math.ceil(shape.cin / amx.BLOCK)
    even = 3 * target.threads * math.ceil(blocks / target.threads) <= 4 * blocks  # a quarter of them idle, at most
    is_near = 4 * positions * shape.cout <= BLOCK_BYTES
    if 4 * weights < PARTIAL_BYTES or not even or not is_near or positions * again > target.threads * moved:
        return None
    return Plan(shape, _tiles(shape.n, shape.rows.units, target.lanes))


def _with_border(axis: Axis) -> int:
    return axis.units + axis.high - axis.low


def _tiles(images: int, rows: int, lanes: int) -> Tiles:
    return Tiles(images, rows, 1, 1, 1, amx.BLOCK, lanes, amx.BLOCK, amx.BLOCK)


def _items(plan: Plan) -> int:
    """Count the tiles that the threads share."""
    return plan.shape.n // plan.tiles.images * math.ceil(plan.shape.rows.units / plan.tiles.rows)


def _fits(plan: Plan) -> bool:
    shape, tiles = plan.shape, plan.tiles
    rows, columns = (axis.high - axis.low for axis in (shape.rows, shape.columns))
    positions = tiles.images * (tiles.rows + rows) * (shape.columns.units + columns)
    return positions <= 2 * POSITIONS and 2 * positions * (2 * shape.cout + shape.cin) <= TILE_BYTES


def cost(plan: Plan, target: CpuTarget) -> float:
    """Estimate the busiest thread's work, in positions."""
    shape, tiles = plan.shape, plan.tiles
    positions = math.ceil(tiles.rows * shape.columns.units / amx.BLOCK) * amx.BLOCK
    halo = shape.rows.high - shape.rows.low
    border = halo * shape.columns.units / 4  # packed, not multiplied
    return math.ceil(_items(plan) / target.threads) * (tiles.images * (positions + border) + TILE_OVERHEAD)


@dataclasses.dataclass(frozen=True)
class AmxNest(Nest):
    """The layouts of the module's docstring, in place of those of conv_backward_nest.py."""

    packed_dtype: ClassVar[str] = "uint32"
    by_block: bool = False  # the packings of x and the partial are of one block of input channels

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
        """Count the pairs of a packed block: [r][s][cout/2][32]."""
        return self.shape.taps * self.out_depth // 2 * self.tiles.block

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
        return self.shape.is_pointwise and self.shape.cout < self.shape.cin and not self.by_block

    @property
    def turned(self) -> int:
        """Count the channels of the side that is turned, in whole blocks."""
        if self.turns_grad:
            return self.out_padded
        return self.tiles.block if self.by_block else self.blocks * self.tiles.block

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


@dataclasses.dataclass(frozen=True)
class _Space:
    """A thread's packings; None what the weights' gradient alone reads, and is not wanted."""

    grad: Buffer
    read: Buffer | None
    pairs: Buffer | None
    stage: Buffer | None
    scratch: Buffer

    @staticmethod
    def allocate(nest: AmxNest) -> _Space:
        """Allocate them; what packing does not write is zero."""
        zeros = partial(tir.zeros, lanes=nest.tiles.lanes, dtype=HALF)
        turns_read = nest.wants_weight and not nest.turns_grad
        return _Space(
            grad=zeros(nest.grad_size),
            read=zeros(nest.tiles.images * nest.read_image) if nest.wants_weight else None,
            pairs=pairs_of(nest) if nest.wants_weight else None,
            stage=tir.workspace(STAGE * nest.turned, HALF) if turns_read else None,
            scratch=tir.workspace(nest.micro_size),
        )


def work(nest: AmxNest, shared: dict[str, Buffer], thread: Expr) -> None:
    """Write a thread's share of the tiles."""
    space, images = _Space.allocate(nest), nest.tiles.images
    first, count = tir.share(nest.items, nest.threads, thread)
    with amx.tiles(), T.serial(0, count) as number:
        item = T.bind(first + number)
        image, unit = T.bind(item // nest.tile_rows * images), T.bind(item % nest.tile_rows * nest.tiles.rows)
        place = Place(thread, 0, image, unit, space.scratch)
        pack_grad(nest, space.grad, 0, image, unit)
        if "bias" in shared:
            bias_gradient(nest, space.grad, shared["bias"], place)
        if nest.wants_weight:
            if nest.turns_grad:
                pair_read(nest, space.pairs, place)
                turn_grad(nest, space.grad, space.read)
            else:
                pack_pairs(nest, space.grad, space.pairs, place)
                pack_read(nest, space.read, space.stage, place, 0, nest.shape.cin)
            weight_gradient(nest, space, shared["partial"], thread * nest.partial_size)
        if nest.wants_input:
            input_gradient(nest, space.grad, shared["packed"], shared.get("sums"), place)


def work_by_block(nest: AmxNest, shared: dict[str, Buffer], thread: Expr) -> None:
    """Write a thread's share of the blocks of input channels, of all positions: it packs all of dy, and no weights, and
    sums no weight's gradient, that another one does too."""
    space = _Space.allocate(nest)
    place = Place(thread, 0, 0, 0, space.scratch)
    packed = tir.workspace(nest.packed_block, nest.packed_dtype) if nest.wants_input else None
    total = tir.workspace(nest.partial_size) if nest.wants_weight else None
    pack_grad(nest, space.grad, 0, 0, 0)
    if "bias" in shared:
        with when(thread == 0):
            bias_gradient(nest, space.grad, shared["bias"], place)
    if nest.wants_weight:
        pack_pairs(nest, space.grad, space.pairs, place)
    first, count = tir.share(nest.blocks, nest.threads, thread)
    with amx.tiles(), T.serial(0, count) as number:
        block = T.bind(first + number)
        if total is not None:
            start = T.bind(block * nest.tiles.block)
            read = partial(pack_read, nest, space.read, space.stage, place, start)
            tir.with_width(block, nest.tiles.block, nest.shape.cin, read)
            weight_gradient(nest, space, total, 0)
            unpack_block(nest, total, block)
        if packed is not None:
            pack_block(nest, packed, block)
            input_gradient(nest, space.grad, packed, shared.get("sums"), place, block)


# The gradient of the weights


def weight_gradient(nest: AmxNest, space: _Space, total: Buffer, base: Expr) -> None:
    """Add read * pairs over the tile's positions to the partial at `base`, 32 x 32 channels at a time.

    With all positions in the tile there is nothing yet to add to.
    """
    rows, columns, paired = nest.shape.rows, nest.shape.columns, nest.paired
    with (
        T.serial(0, nest.turned // amx.BLOCK) as block,
        T.serial(0, rows.kernel) as r,
        T.serial(0, columns.kernel) as s,
        T.serial(0, paired // amx.BLOCK) as other,
    ):
        line = (block * rows.kernel + r) * columns.kernel + s
        target = T.bind(base + line * nest.partial_row + other * amx.BLOCK)
        tap = T.bind(nest.read_at(0, r * rows.dilation, s * columns.dilation) + block * (amx.BLOCK * nest.read_row))
        if nest.by_block:
            amx.clear(2)
        else:
            amx.resume(2, total, target, paired)
        with T.serial(0, nest.tiles.images) as image, T.serial(0, nest.positions // amx.DEPTH) as k:
            left = space.read, tap + image * nest.read_image + k * amx.DEPTH, nest.read_row
            pair = (image * (nest.positions // 2) + k * amx.SIDE) * paired + other * amx.BLOCK
            amx.add(2, left, (space.pairs, pair, paired))
        amx.leave(2, total, target, paired)


# The gradient of the input


def input_gradient(nest: AmxNest, grad: Buffer, packed: Buffer, sums: Buffer | None, place: Place, *only: Expr) -> None:
    """Write dx of the tile: residue by residue, a block of channels of 32 positions at a time; of `only` one block,
    whose weights `packed` has alone."""
    rows, columns, tiles = nest.shape.rows, nest.shape.columns, nest.tiles
    positions = (tiles.rows - 1) * nest.grad_columns + math.ceil(columns.size / columns.stride)
    windows = math.ceil(positions / amx.BLOCK)
    with (
        T.serial(0, rows.stride) as row_residue,
        T.serial(0, columns.stride) as column_residue,
        amx.sweep(2 * nest.packed_size, 1 if only else nest.blocks, tiles.images, windows) as (slot, image, window),
    ):
        residues = (row_residue if rows.stride > 1 else 0, column_residue if columns.stride > 1 else 0)
        start, block = T.bind(window * amx.BLOCK), only[0] if only else slot
        _multiply(nest, grad, packed, place, slot, residues, image, start)
        finish = partial(_finish, nest, sums, place, block, residues, image, start)
        tir.with_width(block, tiles.block, nest.shape.cin, finish)


def _multiply(
    nest: AmxNest,
    grad: Buffer,
    packed: Buffer,
    place: Place,
    slot: Expr,
    residues: tuple[Expr, Expr],
    image: Expr,
    start: Expr,
) -> None:
    """Leave the sums of 32 positions, over the taps that meet the residues and the output channels, in the scratch."""
    rows, columns, row = nest.shape.rows, nest.shape.columns, nest.tiles.block
    amx.clear(2)
    with T.serial(0, nest.shape.taps) as tap:
        r, s = T.bind(tap // columns.kernel), T.bind(tap % columns.kernel)
        met = meets(rows, residues[0], r) + meets(columns, residues[1], s)
        with when(tirx.all(*met)) if met else contextlib.nullcontext():
            up = floor_offset(rows, residues[0], r) - rows.low
            left = floor_offset(columns, residues[1], s) - columns.low
            first = (image * nest.grad_rows + up) * nest.grad_columns + left + start
            at = T.bind(first * nest.out_pitch)
            line = T.bind(slot * nest.packed_block + tap * (nest.out_depth // 2 * row))
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
            if nest.blocks > 1 and not nest.by_block:
                _ask(nest, pixel, first + amx.BLOCK)
            for begin, lanes in widths.items():
                with T.vectorized(0, lanes) as lane:
                    inner = begin + lane
                    cell = place.scratch, number + inner
                    write_epilogue(nest, place.scratch[number + inner], cell, part, (pixel, first + inner, inner))
    part.flush(sums, place.thread, first, widths)


def _ask(nest: AmxNest, pixel: Expr, channel: Expr) -> None:
    """Ask for what the epilogue of the next block reads and writes of a pixel: a cache line of each map."""
    prefetch(nest.arguments[nest.result], nest.index(nest.result, pixel, channel), WRITE)
    for name in {name: None for name in EpiloguePlan(nest.problem).maps if name != nest.result}:
        prefetch(nest.arguments[name], nest.index(name, pixel, channel), READ)
