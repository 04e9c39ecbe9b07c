"""The forward convolution of a few input channels, such as an image's: output rows, of which x is few lines.

A block has a tile of output channels, the whole window, and a share of the output rows of all images:

    weights: global -> shared -> registers, once
    for each step, one or a few output rows:
        x: the lines under them -> shared (lines.py)            the next step's are on their way meanwhile
        for each 16 pixels, a warp by itself: lines -> tensor cores -> epilogue

A word of a product's operand is two neighbours of a run of elements, and lies at an even one. Where a pixel's run
begins at an odd element its product begins at the one before, by weights that are moved by one element, too: a zero
comes first. Where every other pixel's does, even and odd pixels have products, and weights, of their own: a class each.

Columns of a product are channels in such an order that a thread's sums are neighbouring channels of a pixel, a vector
of the epilogue (`LineTeam`): nothing goes by way of shared memory. What a run reads beyond the window is cleared, lest
what is not finite there meet a weight of zero.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.conv_sizes import COLUMNS, DEEP, LineTile
from bnfuse.runtime.kernels.cuda.device import Block, Expr
from bnfuse.runtime.kernels.cuda.operand import Operand
from bnfuse.runtime.kernels.cuda.vector import epilogue_of
from bnfuse.runtime.kernels.kernel import Problem

FRAGMENTS = COLUMNS // 8  # of a warp's channels
HALVES = 2  # of 16 pixels: a thread has a pixel of each, and so many words of a run of 16 elements


class LineEmitter:
    """The stage under construction."""

    def __init__(self, block: Block, tile: LineTile, operand: Operand, problem: Problem) -> None:
        self.block, self.tile, self.plan, self.c = block, tile, tile.plan, tile.correlation
        self.problem, self.team = problem, tile.team
        self.shared = d.shared_memory(tile.shared)
        self.store = self.shared.view("uint32")
        self.source = block.map(operand.plan.source, operand.kind)
        self.first_output = T.bind(block.x % tile.output_tiles * self.plan.outputs)
        self.row = T.bind(block.x // tile.output_tiles)  # of the partials
        # steps, and the first of them, counted over all blocks
        more, fewer = tile.larger, tile.share - 1
        self.share = T.bind(tirx.Select(self.row < more, T.int32(tile.share), T.int32(fewer)))
        self.first = T.bind(self.row * fewer + tirx.Min(self.row, T.int32(more)))
        self.way = T.bind(block.warp // tile.warps_across)
        self.column, self.pixel = T.bind(block.lane % 4), T.bind(block.lane // 4)  # of this thread in a product
        self.weights = d.registers(tile.weight_words, "uint32")
        self.masks = {key: d.registers(1, "uint32") for key in tile.edges}

    def run(self) -> None:
        """Emit the loop over the steps of the block's share, then the row of partials."""
        tile = self.tile
        self.copy_weights()
        self.block.each(tile.buffers * tile.lines.bytes // 4, lambda i: d.put(self.store, i, T.uint32(0)))
        d.sync()
        self.bring(0)
        d.commit()
        d.wait(0)
        d.sync()
        self.take_weights()
        self.epilogue = epilogue_of(self.problem)(
            self.block, self.problem, self.team, self.shared.view("float32"), HALVES
        )
        inner = T.bind(self.first_output + self.team.vector(self.block.tid) * self.team.width)
        left = None if self.c.outputs % self.plan.outputs == 0 else T.bind(self.c.outputs - inner)
        self.epilogue.open(inner, left, self.c.outputs % 4 == 0)
        with T.serial(0, self.share) as step:
            d.wait(0)
            d.sync()
            d.when(step + 1 < self.share, lambda: self.bring(step + 1))
            d.commit()
            self.multiply(step)
        d.sync()
        self.epilogue.close(self.row)

    # -- filling ---------------------------------------------------------------------------------------------------

    def copy_weights(self) -> None:
        """Start copying the rows of the tile's outputs; zeros where there are none."""
        tile, c = self.tile, self.c
        vectors = tile.weight_row * 2 // d.VECTOR_BYTES
        weight = self.block["weight"]

        def copy(i: Expr) -> None:
            valid = d.below(self.first_output + i // vectors, c.outputs, c.outputs % self.plan.outputs == 0)
            at = self.first_output * tile.weight_row + i * (d.VECTOR_BYTES // 2)
            at = at if valid is True else tirx.Select(valid, at, T.int32(0))
            place = self.shared.address + tirx.Cast("uint32", tile.weights_at + i * d.VECTOR_BYTES)
            d.copy_async(place, weight.ptr_to([at]), valid=valid)

        self.block.each(self.plan.outputs * vectors, copy)

    def bring(self, step: Expr) -> None:
        """Start bringing the lines of a step."""
        tile, row = self.tile, T.bind((self.first + step) * self.plan.rows)
        to = T.bind(self.shared.address + tirx.Cast("uint32", step % tile.buffers * tile.lines.bytes))
        tile.lines.bring(self.block, self.source, to, row, True)

    def take_weights(self) -> None:
        """Bring this thread's words of the weights, [class][run of 16][fragment][half], to registers, and its masks."""
        tile, c = self.tile, self.c
        elements = self.shared.view("uint16")
        valid = c.horizontal.window * c.inputs
        group = self.block.warp % tile.warps_across * COLUMNS
        channel = T.bind(group + self.pixel // 2 * self.team.width + self.pixel % 2)  # of the first fragment
        row = T.bind(tile.weights_at // 2 + channel * tile.weight_row)

        def inside(element: Expr) -> Expr:
            return d.within(element, valid)

        for kind, shift in enumerate(tile.shifts):
            for eight in range(tile.depth):
                down, across = divmod(eight, tile.eights)
                element = T.bind(across * 8 + self.column * 2 - shift)
                if (kind, across) in self.masks and down == 0:
                    parts = (
                        tirx.Select(inside(element + i), T.uint32(0xFFFF << 16 * i), T.uint32(0)) for i in range(2)
                    )
                    d.put(self.masks[kind, across], 0, tirx.bitwise_or(*parts))
                for j in range(FRAGMENTS):
                    at = row + j * (2 * tile.weight_row) + down * c.flat_row + element
                    low, high = (
                        tirx.if_then_else(inside(element + i), tirx.Cast("uint32", elements[at + i]), T.uint32(0))
                        for i in range(2)
                    )
                    word = tirx.bitwise_or(low, high << T.uint32(16))
                    d.put(self.weights, self.weight_at(kind, eight // 2, j) + eight % 2, word)
            if tile.depth % 2:
                for j in range(FRAGMENTS):
                    d.put(self.weights, self.weight_at(kind, tile.depth // 2, j) + 1, T.uint32(0))

    def weight_at(self, kind: int, run: int, fragment: int) -> int:
        """Give the first of the two words of a fragment."""
        return ((kind * self.tile.runs + run) * FRAGMENTS + fragment) * 2

    # -- multiplying -----------------------------------------------------------------------------------------------

    def multiply(self, step: Expr) -> None:
        """Take the pixels of a step through products and epilogue."""
        tile, plan, lines = self.tile, self.plan, self.tile.lines
        buffer = T.bind(step % tile.buffers * (lines.bytes // 4) + self.column)
        first_row = T.bind((self.first + step) * plan.rows)
        count = plan.rows * tile.units
        with T.serial(0, -(-count // plan.ways)) as turn:
            unit = T.bind(turn * plan.ways + self.way)

            def pixels() -> None:
                row, along = (unit // tile.units, unit % tile.units) if plan.rows > 1 else (0, unit)
                line = row * (self.c.vertical.mult * lines.line_bytes // 4)
                start = T.bind(buffer + line + (along * DEEP + self.pixel) * tile.apart_words)
                place = T.bind(along * tile.span + self.pixel * tile.classes)
                first = T.bind((first_row + row) * self.c.horizontal.destination + place)
                for kind in range(tile.classes):
                    self.finish(self.products(kind, start), first + kind, place + kind)

            d.when(d.below(unit, count, count % plan.ways == 0), pixels)

    def products(self, kind: int, start: Expr) -> d.Buffer:
        """Emit the products of 16 pixels of a class; gives the sums."""
        tile, lines = self.tile, self.tile.lines
        acc = d.registers(FRAGMENTS * 4)
        for i in range(FRAGMENTS * 4):
            d.put(acc, i, T.float32(0))
        origin = (lines.first + kind * lines.apart - tile.shifts[kind]) // 2
        for run in range(tile.runs):
            a = d.registers(4, "uint32")
            for half in range(2):
                eight = run * 2 + half
                down, across = divmod(eight, tile.eights)
                at = origin + down * (lines.line_bytes // 4) + across * 4
                for i in range(HALVES):
                    word: Expr = T.uint32(0)
                    if eight < tile.depth:
                        word = self.store[start + (at + i * 8 * tile.apart_words)]
                        mask = self.masks.get((kind, across))
                        word = word if mask is None else tirx.bitwise_and(word, mask[0])
                    d.put(a, half * 2 + i, word)
            for j in range(FRAGMENTS):
                d.mma(tile.precision, acc, j * 4, a, 0, self.weights, self.weight_at(kind, run, j))
        return acc

    def finish(self, acc: d.Buffer, pixel: Expr, place: Expr) -> None:
        """Take this thread's two vectors through the epilogue: those of `pixel`, at `place` of its row, and half on."""
        tile, width = self.tile, self.c.horizontal.destination
        apart = 8 * tile.classes
        there = [d.below(place + i * apart, width, width % tile.span == 0) for i in range(HALVES)]
        for i in range(HALVES):
            self.epilogue.fetch(i, pixel + i * apart, there[i])
        values = d.registers(self.team.width)
        for i in range(HALVES):
            for j in range(FRAGMENTS):
                for k in range(2):
                    d.put(values, j * 2 + k, acc[j * 4 + i * 2 + k])
            self.epilogue.finish(i, values, pixel + i * apart, there[i])
