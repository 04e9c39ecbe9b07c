"""The gradient of the weights of few input channels, as of images, by AMX's tiles (amx.py, amx_backward.py).

    parallel over threads, for the thread's tiles (rows of dy, and the rows of x that they meet):
        grad <- dy after its prologue: [position][cout], and turned: [cout][position]
        for the rows of x: row <- x after its prologue: [column][cin]                       one after the other
                           pairs <- row: [position/2][s][cin][2]                            as the window reads it
        for r, 32 of cout, 32 of (s, cin): partial += turned * pairs over the positions

A position's columns of the window lie side by side in a row of x. Rows are in phases by the stride, so that those of
the next output are the next ones. Columns of the partial behind the window are not looked at.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.geometry import Convolution, convolution_of
from bnfuse.runtime.kernels.cpu import amx, amx_backward, tir
from bnfuse.runtime.kernels.cpu.amx_backward_pack import turn_grad
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import Buffer, Expr
from bnfuse.runtime.kernels.cpu.conv_backward_micro import Place, bias_gradient
from bnfuse.runtime.kernels.cpu.conv_backward_nest import inside, otherwise
from bnfuse.runtime.kernels.cpu.conv_backward_pack import over_channels, pack_grad
from bnfuse.runtime.kernels.cpu.conv_backward_shape import Plan
from bnfuse.runtime.kernels.cpu.nest import cut
from bnfuse.runtime.kernels.cpu.tir import HALF, span, store, zero
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.target import CpuTarget

LEAST_ROW = 8  # channels of a row of the window, of 32 that are multiplied


def takes(problem: Problem, shape: Convolution, target: CpuTarget) -> bool:
    """Tell whether the gradient of the weights alone is made so: of maps in 16 bits, of few input channels."""
    return (
        amx_backward.is_able(problem, shape, target)
        and problem.spec.core == "ConvGradWeight"
        and shape.columns.kernel > 1
        and shape.columns.dilation == 1
        and shape.cin < amx_backward.LEAST_CHANNELS <= shape.cout
        and shape.columns.kernel * shape.cin >= LEAST_ROW
    )


def plan_of(problem: Problem, target: CpuTarget) -> Plan:
    """Choose the tiles, as for other gradients; dx is not made, and x takes as many channels as a row of the window."""
    shape = convolution_of(problem)
    wide = dataclasses.replace(shape, cin=_depth(shape))
    plan = amx_backward.best_plan(amx_backward.plans_of(wide, target), target)
    return Plan(shape, plan.tiles)


def _depth(shape: Convolution) -> int:
    """Count (s, cin) of a row of the window, in whole blocks."""
    return math.ceil(shape.columns.kernel * shape.cin / amx.BLOCK) * amx.BLOCK


@dataclasses.dataclass(frozen=True)
class RowNest(amx_backward.AmxNest):
    """The layouts of the module's docstring."""

    @property
    def depth(self) -> int:
        """Count the columns of the partial: (s, cin) in whole blocks."""
        return _depth(self.shape)

    @property
    def partial_group(self) -> int:
        """Count the floats of a thread's partial: [cout/32][r][32][depth]."""
        return self.out_padded * self.shape.rows.kernel * self.depth

    def partial_index(self, channel: Expr, r: Expr, s: Expr, out: Expr) -> Expr:
        """Write where an element of dweight lies in a partial."""
        line = (out // amx.BLOCK * self.shape.rows.kernel + r) * amx.BLOCK + out % amx.BLOCK
        return line * self.depth + s * self.shape.cin + channel

    @property
    def across(self) -> int:
        """Count the positions of a row: an even number, so that no pair lies in two rows."""
        return self.shape.columns.out + self.shape.columns.out % 2

    @property
    def read_row(self) -> int:
        """Count the elements from channel to channel of dy as it is turned."""
        return amx.pitch(self.positions)

    @property
    def step(self) -> int:
        """Count the elements of a row of x from position to position."""
        return self.shape.columns.tile_stride * self.shape.cin

    @property
    def pairs_phase(self) -> int:
        """Count the pairs' rows, of (s, cin), of a phase, with what the last products overhang."""
        rows, stride = self.shape.rows, self.strides[0]
        furthest = (rows.kernel - 1) * rows.dilation // stride * self.across
        return max(math.ceil(self.read_rows / stride) * self.across, furthest + self.positions) // 2

    def pairs_at(self, image: Expr, row: Expr) -> Expr:
        """Write which of the pairs' rows is the first of a row of x."""
        stride = self.strides[0]
        return (image * stride + row % stride) * self.pairs_phase + row // stride * (self.across // 2)


def work(nest: RowNest, shared: dict[str, Buffer], thread: Expr) -> None:
    """Write a thread's share of the tiles."""
    images, zeros = nest.tiles.images, partial(tir.zeros, lanes=nest.tiles.lanes)
    grad, turned = zeros(nest.grad_size, dtype=HALF), zeros(images * nest.out_padded * nest.read_row, dtype=HALF)
    pairs = zeros(images * nest.strides[0] * nest.pairs_phase * nest.depth, dtype="uint32")
    line = zeros(max(nest.read_columns * nest.shape.cin, nest.across * nest.step) + nest.depth, dtype=HALF)
    first, count = tir.share(nest.items, nest.threads, thread)
    with amx.tiles(), T.serial(0, count) as number:
        item = T.bind(first + number)
        image, unit = T.bind(item // nest.tile_rows * images), T.bind(item % nest.tile_rows * nest.tiles.rows)
        place = Place(thread, 0, image, unit, None)
        pack_grad(nest, grad, 0, image, unit)
        if "bias" in shared:
            bias_gradient(nest, grad, shared["bias"], place)
        turn_grad(nest, grad, turned)
        pair_rows(nest, pairs, line, place)
        weight_gradient(nest, turned, pairs, shared["partial"], thread * nest.partial_size)


def pair_rows(nest: RowNest, pairs: Buffer, line: Buffer, place: Place) -> None:
    """Pack x of the rows that the tile's outputs read, after its prologue, and pair what positions read of them."""
    rows, columns, cin = nest.shape.rows, nest.shape.columns, nest.shape.cin
    left, middle = columns.present(nest.read_columns)
    with T.serial(0, nest.tiles.images) as i, T.serial(0, nest.read_rows) as r:
        row = T.bind(place.unit * rows.stride - rows.pad + r * rows.step)
        target = T.bind(nest.pairs_at(i, r) * nest.depth)
        with T.If(inside(row, rows.size)):
            with T.Then():
                pixel = T.bind(((place.image + i) * rows.size + row) * columns.size + left * columns.step - columns.pad)
                with T.serial(0, middle) as c:

                    def element(channel: Expr) -> None:
                        value = nest.activated(pixel + c * columns.step, channel)
                        store(line, (left + c) * cin + channel, value)

                    over_channels(cin, nest.tiles.lanes, element)
                with T.serial(0, nest.across // 2) as w:
                    for start, lanes in cut(nest.depth, nest.tiles.lanes):
                        low, high = (
                            tir.widened_bits(line.bits[span((2 * w + behind) * nest.step + start, lanes)])
                            for behind in range(2)
                        )
                        store(pairs, span(target + w * nest.depth + start, lanes), tir.paired(low, high))
            with otherwise():
                zero(pairs, target, nest.across // 2 * nest.depth, nest.tiles.lanes)


def weight_gradient(nest: RowNest, turned: Buffer, pairs: Buffer, total: Buffer, base: Expr) -> None:
    """Add turned * pairs over the tile's positions to the partial at `base`, 32 x 32 at a time."""
    rows, depth = nest.shape.rows, nest.depth
    with (
        T.serial(0, nest.out_padded // amx.BLOCK) as out,
        T.serial(0, rows.kernel) as r,
        T.serial(0, depth // amx.BLOCK) as block,
    ):
        target = T.bind(base + (out * rows.kernel + r) * (amx.BLOCK * depth) + block * amx.BLOCK)
        amx.resume(2, total, target, depth)
        with T.serial(0, nest.tiles.images) as image, T.serial(0, nest.positions // amx.DEPTH) as k:
            channel = image * nest.out_padded + out * amx.BLOCK
            left = turned, channel * nest.read_row + k * amx.DEPTH, nest.read_row
            pair = (nest.pairs_at(image, r * rows.dilation) + k * amx.SIDE) * depth + block * amx.BLOCK
            amx.add(2, left, (pairs, pair, depth))
        amx.leave(2, total, target, depth)
