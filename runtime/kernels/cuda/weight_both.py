"""Both gradients of a 1x1 convolution of few outputs in one sweep over its maps, by warpgroups.

    dweight[o, c] = sum over pixels of   dy[pixel, o] * x[pixel, c]
    dx[pixel, c]  = sum over outputs of  dy[pixel, o] * weight[o, c]

Apart each reads dy, which is made of two maps, and x: one in its product, the other in its epilogue. A block has
all outputs, a tile of input channels with their weights, and a share of the pixels. What weight_group.py has in shared
memory for dweight, dy behind its prologue, pixel by pixel, is what dx is a product of as it lies there:

    for each step, 64 of its pixels:
        barrier                                   dy and x of the step are there
        dy of the pixels times the weights        both from shared memory
        the products of dweight                   which run on while
            maps of dx's epilogue: global -> registers
            copies of later steps begin, and dx goes through its epilogue and is stored
        the next step's dy and x go through the prologues

A group of four warps has 32 input channels of dx. Their weights lie in such an order that a thread's sums of a pixel
are eight neighbours, a vector as the epilogue takes it: dx never passes through shared memory.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda import wgmma
from bnfuse.runtime.kernels.cuda.both_sizes import BothTile
from bnfuse.runtime.kernels.cuda.device import Block, Expr
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.cuda.vector import epilogue_of
from bnfuse.runtime.kernels.cuda.weight_group import COLUMN, LANES, GroupEmitter
from bnfuse.runtime.kernels.cuda.weight_slide import place
from bnfuse.runtime.kernels.kernel import Problem

HALVES = 2  # pixels of a thread: a product gives it one of either half of its warp's 16
EIGHT = 8  # channels of a vector, and columns of a thread's four pairs in the result of a product


class BothEmitter(GroupEmitter):
    """The stage under construction. `problem` has the epilogue of dx."""

    tile: BothTile
    left_running = 0  # dy is read until then, and copied over by the next step

    def __init__(self, block: Block, tile: BothTile, gradient: Operand, source: Operand, problem: Problem) -> None:
        super().__init__(block, tile, gradient, source)
        self.dx = d.registers(tile.own_inputs // 2)
        self.values = d.registers(EIGHT)
        self.warpgroup = T.bind(d.of_warp(block.tid // wgmma.GROUP))
        # of the tile. Not by `of_warp`: that it is a multiple of eight has to be seen
        self.own_input = block.tid // wgmma.GROUP * tile.own_inputs + block.lane % 4 * EIGHT
        inner = T.bind(self.source.first + self.own_input)
        left = None if self.c.inputs % self.plan.inputs == 0 else T.bind(self.c.inputs - inner)
        self.epilogue = epilogue_of(problem)(block, problem, tile.team, self.floats, HALVES)
        self.epilogue.begin(inner, left, self.c.inputs % 4 == 0)
        self.destination = T.bind(self.first + block.warp % 4 * 16 + block.lane // 4)

    def prepare(self) -> None:
        """Start bringing the tile's weights, from [input][output], zeros beyond the last of either; and bring the
        coefficients of dx's epilogue."""
        tile, c = self.tile, self.c
        for n, name in enumerate(self.epilogue.reader.vectors):
            self.keep(self.source, name, tile.epilogue_at + n * self.plan.inputs * 4)
        lanes = tile.columns[0] * LANES  # vectors of an input's outputs
        weight, row_of = self.block["weight"], -(-c.outputs // EIGHT) * EIGHT

        def bring(i: Expr) -> None:
            row, lane = T.bind(i // lanes), i % lanes
            # of 32 rows, the eight that are four pairs of columns of a thread are eight neighbours
            inside = row % tile.own_inputs
            channel = T.bind(
                self.source.first + row - inside + inside % EIGHT // 2 * EIGHT + inside // EIGHT * 2 + row % 2
            )
            exists = d.all_of(
                d.below(channel, c.inputs, c.inputs % self.plan.inputs == 0),
                d.below(lane * EIGHT, row_of, row_of % self.plan.outputs == 0),
            )
            index = channel * row_of + lane * EIGHT
            if exists is not True:
                index = tirx.Select(exists, index, 0)
            at = tile.weights_at + lane // LANES * tile.weight_column + place(row, lane % LANES)
            d.copy_async(self.shared.address + tirx.Cast("uint32", at), weight.ptr_to([index]), valid=exists)

        self.block.each(self.plan.inputs * lanes, bring)

    def lanes(self, which: int) -> int:
        """Count the vectors of dy, 0, or of x, 1, that threads bring side by side: all, so that coefficients are loaded
        once a step."""
        return self.tile.columns[which] * LANES

    def make_room(self) -> None:
        """Note no bits: whether a pixel exists is soon found."""

    def fill(self, step: Expr) -> None:
        """Start bringing dy and x of a step."""
        for side in self.sides:
            for row in range(side.rows):
                self.copy(side, step, row, *self.pixel(side, step, row))

    def is_kept(self, step: Expr, row: int) -> Expr:
        """Tell whether a pixel exists."""
        assert self.cleared is not None
        return self.pixel(self.cleared, step, row)[1]

    def begin_products(self, step: Expr) -> None:
        """Begin the products of a step; those of dx are done behind it."""
        tile, base = self.tile, self.shared.address
        gradient = self.gradient.at + step % self.gradient.buffers * self.gradient.bytes
        weights = tile.weights_at + self.warpgroup * (tile.own_inputs * tile.row_bytes)
        dy, w = (T.bind(wgmma.along_rows(base + tirx.Cast("uint32", at))) for at in (gradient, weights))
        down = gradient + self.down * (self.deep * tile.chunk_bytes)
        dy_across = T.bind(wgmma.across_rows(base + tirx.Cast("uint32", down), tile.chunk_bytes))
        x = self.source_across(step)
        with T.serial(0, tile.own_inputs // 2, unroll=True) as i:
            d.put(self.dx, i, T.float32(0))
        wgmma.fence()
        for column in range(tile.columns[0]):
            for k in range(COLUMN // wgmma.DEPTH):
                a = dy + T.uint64((column * tile.chunk_bytes >> 4) + k * wgmma.STEP)
                b = w + T.uint64((column * tile.weight_column >> 4) + k * wgmma.STEP)
                wgmma.multiply(tile.precision, self.dx, 0, tile.own_inputs, a, b)
        wgmma.commit()
        for k in range(self.plan.pixels // wgmma.DEPTH):
            rows = k * wgmma.DEPTH * tile.row_bytes
            for block in range(self.deep):
                a = dy_across + T.uint64(rows + block * tile.chunk_bytes >> 4)
                b = x + T.uint64(rows >> 4)
                wgmma.multiply(tile.precision, self.acc, block * self.width // 2, self.width, a, b, across=(True, True))
        wgmma.commit()
        for half in range(HALVES):
            self.epilogue.fetch(half, *self.destination_at(step, half))
        wgmma.wait(1)

    def destination_at(self, step: Expr, half: int) -> tuple[Expr, Expr]:
        """Find one of this thread's pixels of dx, and whether it exists."""
        pixel = T.bind(self.destination + step * self.plan.pixels + half * EIGHT)
        return pixel, d.below(pixel, self.c.rows, self.exact)

    def between(self, step: Expr) -> None:
        """Take dx of the step through its epilogue."""
        for n, held in enumerate(self.epilogue.reader.vectors.values()):
            self.load_kept(held, self.tile.epilogue_at + n * self.plan.inputs * 4, self.own_input // EIGHT)
        for half in range(HALVES):
            for pair in range(EIGHT // 2):
                for word in range(2):
                    d.put(self.values, pair * 2 + word, self.dx[pair * 4 + half * 2 + word])
            self.epilogue.finish(half, self.values, *self.destination_at(step, half))

    def close(self) -> None:
        """Write dweight's accumulators, then the row of dx's sums."""
        super().close()
        d.sync()
        self.epilogue.close(self.split)
