"""A convolution's tile on products of warpgroups: what differs from conv_tile.py, which has all else.

    for each step, a chunk of channels of a tap:
        barrier                                 source and weights of the step are there
        shared -> registers -> products         which run on while
            copies of later steps begin
            the next step's source, or a share of the next chunk's, goes through the prologue, in shared memory

A step's weights lie in a buffer of their own, from where products read them. The source of a halo tile is the same for
all taps of a chunk, and there are two of those. Its fragments come by way of registers, so that a tap outside of the
image can be a row of zeros; they are loaded in two parts, of which one is multiplied while the other is loaded.
"""

from __future__ import annotations

import dataclasses

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda import wgmma
from bnfuse.runtime.kernels.cuda.conv_sizes import Tile
from bnfuse.runtime.kernels.cuda.conv_tile import Emitter
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.kernel import Problem

# of a step: while one part is multiplied the next one's fragments are loaded. The last is the largest: what is done
# between two steps hides behind it
PARTS = (1, 3)


def emit(block: Block, tile: Tile, operand: Operand, problem: Problem) -> None:
    """Emit the whole stage; the epilogue is that of `problem`."""
    (GroupEmitter if tile.plan.grouped else Emitter)(block, tile, operand).run(problem)


class GroupEmitter(Emitter):
    """The stage under construction, of a plan that is `grouped`: each warp has all outputs of its rows."""

    def __init__(self, block: Block, tile: Tile, operand: Operand) -> None:
        super().__init__(block, tile, operand)
        rows = self.fragments[0]
        self.a = d.registers(rows * 4 * tile.plan.row_bytes // d.STEP_BYTES, "uint32")
        self.places, self.turns = d.registers(rows, "uint32"), d.registers(rows, "uint32")
        self.half = T.bind(tirx.Cast("uint32", block.lane // 16))
        self.read, self.filled = Place.of(tile), Place.of(tile)

    def steps(self, steps: Expr) -> None:
        """Emit the loop over so many steps."""
        ahead, several = self.tile.ahead, self.plan.halo and self.tile.chunks > 1
        if self.plan.halo:
            self.fetch(0, 0, self.halo_pixel)
        self.fill_ahead(steps)
        d.wait(ahead - 1)
        self.finish(0, 0)
        wgmma.publish()
        self.place_rows()
        with T.serial(0, steps) as step:
            d.sync()
            self.begin_products()
            if several:
                self.fill_chunk()
            d.when(step + ahead < steps, lambda: self.fill(step + ahead))
            d.commit()
            d.wait(ahead - 1)
            if several:
                self.finish_some()
            elif not self.plan.halo:
                d.when(step + 1 < steps, lambda: self.finish(step + 1, (step + 1) % self.tile.source_buffers))
            wgmma.publish()
            self.read.advance()
            self.place_rows()
        wgmma.wait()

    def fill(self, step: Expr) -> None:
        """Start bringing what a step needs; of a halo tile the weights alone."""
        if not self.plan.halo:
            super().fill(step)
            return
        self.fill_weights(self.filled.chunk[0], self.filled.tap[0], self.tile.weights_at + self.filled.weights[0])
        self.filled.advance()

    def fill_chunk(self) -> None:
        """Start bringing the source of the next chunk, at a chunk's first tap: nobody reads the one before any more."""
        chunk = self.read.chunk[0] + 1
        begins = d.all_of(self.read.tap[0] == 0, chunk < self.tile.chunks)
        d.when(begins, lambda: self.fetch(chunk, chunk, self.halo_pixel))

    def finish_some(self) -> None:
        """Take a part of the next chunk's source through the prologue: what has come is shared among the taps left."""
        tile, chunk = self.tile, self.read.chunk[0] + 1
        since = self.read.tap[0] - (tile.ahead - 1)  # taps
        count = -(-tile.passes // (tile.taps - tile.ahead + 1))
        due = d.all_of(since >= 0, chunk < tile.chunks)
        d.when(due, lambda: self.finish(chunk, chunk % tile.source_buffers, since * count, count))

    def begin_products(self) -> None:
        """Begin the products of a step."""
        tile = self.tile
        held = self.shared.address + tirx.Cast("uint32", self.tile.weights_at + self.read.weights[0])
        weight = T.bind(wgmma.along_rows(held))
        rows, words = self.fragments[0], self.fragments[0] * 4

        def load(i: Expr, k: int) -> None:
            chunk = tirx.bitwise_xor(T.uint32(k * 2) + self.half, self.turns[i])
            d.ldmatrix(self.a, k * words + i * 4, self.places[i] + chunk * T.uint32(d.VECTOR_BYTES))

        def product(i: Expr, k: int) -> None:
            a = [self.a[k * words + i * 4 + u] for u in range(4)]
            at = i * self.plan.outputs // 2
            wgmma.multiply(tile.precision, self.acc, at, self.plan.outputs, a, weight + T.uint64(k * wgmma.STEP))

        done = 0
        for part in PARTS:
            ks = range(done, done + part)
            done += part
            for k in ks:
                d.unrolled(rows, lambda i, k=k: load(i, k))  # type: ignore[misc]
            wgmma.fence()
            for k in ks:
                d.unrolled(rows, lambda i, k=k: product(i, k))  # type: ignore[misc]
            wgmma.commit()
            wgmma.wait(1)  # the part before, whose registers are loaded next: ptxas wants to see that at once

    def place_rows(self) -> None:
        """Note where the rows lie whose addresses this lane gives: the pixels', moved by the tap."""
        tap, zeros = self.read.tap[0], self.shared.address + T.uint32(self.tile.zeros_at)
        source = T.bind(self.shared.address + tirx.Cast("uint32", self.tile.sources_at + self.read.source[0]))
        distance = T.bind(self.where.source_distance(tap)) if self.plan.halo else 0

        def one(i: Expr) -> None:
            row = self.fragment_row(i)
            row = T.bind(self.where.source_row(row) + distance if self.plan.halo else row)
            place = source + tirx.Cast("uint32", row * self.plan.row_bytes)
            if self.plan.halo:
                inside = tirx.bitwise_and(self.inside[i] >> tirx.Cast("uint32", tap), T.uint32(1)) != T.uint32(0)
                place = tirx.Select(inside, place, zeros)
            d.put(self.places, i, place)
            d.put(self.turns, i, tirx.Cast("uint32", row % self.chunk_lanes))

        d.unrolled(self.fragments[0], one)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where among the steps one is, in registers that are moved on: to divide in each step takes longer than it."""

    tile: Tile
    weights: Buffer  # bytes from the first weights
    source: Buffer  # bytes from the first source
    chunk: Buffer
    tap: Buffer  # of a halo tile, whose steps are the taps of a chunk

    @staticmethod
    def of(tile: Tile) -> Place:
        """Begin with the first step."""
        made = Place(tile, *(d.registers(1, "int32") for _ in range(4)))
        for held in (made.weights, made.source, made.chunk, made.tap):
            d.put(held, 0, T.int32(0))
        return made

    def advance(self) -> None:
        """Go on to the next step."""
        tile = self.tile
        taps = tile.taps
        _around(self.weights, tile.weight_bytes, tile.buffers)
        if taps == 1:
            _around(self.source, tile.source_bytes, tile.source_buffers)
            return
        _around(self.tap, 1, taps)

        def next_chunk() -> None:
            _around(self.source, tile.source_bytes, tile.source_buffers)
            d.put(self.chunk, 0, self.chunk[0] + 1)

        d.when(self.tap[0] == 0, next_chunk)


def _around(held: Buffer, step: int, count: int) -> None:
    """Move a register on by a step; the last of `count` places is followed by the first."""
    d.put(held, 0, tirx.Select(held[0] == step * (count - 1), T.int32(0), held[0] + step))
