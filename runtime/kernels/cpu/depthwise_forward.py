"""Forward depthwise convolution: every output channel reads one input channel; vectors run over output channels.

pack the weights: [r][s][output channel]                                                    workspace
parallel over threads, for the thread's tiles (one image, rows x all columns of output):
    for a block of output channels:
        pack the activated input under them, with its zero border; with a channel multiplier m,
        each input channel m times, so that output channel k lies under pixel channel k     second-level cache
        for a micro tile of columns, for a vector of channels:                               registers
            for r, s: accumulators += pixels * weights
            + bias; sum and squared deviations to the thread's float64 partials; store y
add up the threads' partials: mean and variance

A large y goes past the caches (stream.py).

GFLOP/s of one core (processor time, batch 16; ours with prologue and statistics, torch's plain convolution in
brackets): 3x3 34-50 (45-58), 3x3 / 2 13-22 (13-25), 5x5 87-96 (86-96), 5x5 / 2 40-43 (53-54).
"""

from __future__ import annotations

import dataclasses
import functools
import math

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu import stream
from bnfuse.runtime.kernels.cpu.forward_nest import ForwardNest
from bnfuse.runtime.kernels.cpu.nest import (
    MicroTile,
    PackedTile,
    Place,
    block_vectors,
    loop,
    micro_tiles,
    places,
)
from bnfuse.runtime.kernels.cpu.tiles import TILE_BYTES, ConvShape, balanced, micro_pixels
from bnfuse.runtime.kernels.cpu.tir import (
    Arguments,
    Expr,
    registers,
    share,
    span,
    splat,
    store,
    vectors,
    workspace,
)
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.target import CpuTarget

TILES_OF_A_THREAD = 2  # at least, of a batch, so that shares come out even; chosen by hand


@dataclasses.dataclass(frozen=True)
class DepthwiseTiles:
    """Output rows and output channels of a tile, columns of a micro tile."""

    rows: int
    channels: int
    columns: int


def choose_depthwise_tiles(shape: ConvShape, target: CpuTarget) -> DepthwiseTiles:
    """Choose the tallest tile that fits, of all channels if two rows of them do, and short enough for all threads."""
    unit = target.lanes * shape.group_cout
    channels = shape.cout
    while channels > unit and _bytes(shape, min(2, shape.oh), channels) > TILE_BYTES:
        channels = math.ceil(channels / 2 / unit) * unit
    wanted = math.ceil(TILES_OF_A_THREAD * target.threads / shape.n)  # tiles of an image
    rows = max(1, math.ceil(shape.oh / wanted))
    while rows > 1 and _bytes(shape, rows, channels) > TILE_BYTES:
        rows -= 1
    return DepthwiseTiles(balanced(shape.oh, rows), channels, balanced(shape.ow, micro_pixels(2, target)))


def _bytes(shape: ConvShape, rows: int, channels: int) -> int:
    return 4 * shape.packed_rows(rows) * shape.packed_columns * channels


class DepthwiseNest(ForwardNest):
    """The loop nest of the module's docstring."""

    def __init__(self, problem: Problem, target: CpuTarget, arguments: Arguments, shape: ConvShape) -> None:
        super().__init__(problem, target, arguments, shape)
        self.tiles = choose_depthwise_tiles(shape, target)
        self.blocks = math.ceil(shape.cout / self.tiles.channels)
        self.is_streamed = not self.is_gradient and stream.is_streamed(self.y.type, target.lanes)

    def emit(self) -> None:
        """Write the function's body; a large y goes past the caches."""
        if not self.is_streamed:
            super().emit()
            return
        with stream.streaming(self.y.type, self.lanes):
            super().emit()

    @property
    def packed_weights(self) -> int:
        """Count the floats of the packed weights: [r][s][output channel]."""
        return self.shape.r * self.shape.s * self.shape.cout

    def pack_weights(self, thread: Expr) -> None:
        """Pack [channel][r][s] to [r][s][channel]; a thread takes some (r, s)s."""
        taps = self.shape.r * self.shape.s
        first, count = share(taps, self.target.threads, thread)
        with T.serial(0, count) as i:
            tap = T.bind(first + i)

            def body(channel: Expr, width: int) -> None:
                values = self.arguments["weight"][span(channel * taps + tap, width, taps)]
                store(self.weights, span(tap * self.shape.cout + channel, width), values)

            vectors(self.shape.cout, self.lanes, body)

    def work(self, thread: Expr) -> None:
        """Write all tiles of a thread."""
        shape, tiles = self.shape, self.tiles
        stride = math.ceil(tiles.channels / self.lanes) * self.lanes
        self.tile = PackedTile(shape, 1, tiles.rows, stride, self.lanes)
        if self.is_gradient:
            self.scratch = workspace(tiles.columns * self.lanes)
        for place in places(shape, 1, tiles.rows, self.target.threads, thread):
            with loop(self.blocks) as block:
                self.sweep(place, block)
        if self.is_streamed:
            stream.fence()

    def sweep(self, place: Place, block: Expr) -> None:
        """Do one block of output channels of a tile."""
        shape, channels, repeat = self.shape, self.tiles.channels, self.shape.group_cout
        first = T.bind(block * channels) if self.blocks > 1 else 0

        def pack_pixel(index: Expr, pixel: Expr, stored: bool) -> None:
            def pack(channel: Expr, width: int) -> None:
                source, target = block * (channels // repeat) + channel, index + channel * repeat
                self.entry.pack(self.tile.buffer, target, pixel, source, width, stored, repeat)

            block_vectors(block, channels // repeat, shape.cin, self.lanes, pack)

        self.tile.pack(place, self.stores_in_passing, pack_pixel)
        for micro in micro_tiles(place, shape, (1, 1, self.tiles.columns)):
            body = functools.partial(self.micro_tile, place, micro, first)
            block_vectors(block, channels, shape.cout, self.lanes, body)

    def micro_tile(self, place: Place, micro: MicroTile, first: Expr, channel: Expr, width: int) -> None:
        """Do the columns of a micro tile in the `width` output channels from first + channel on."""
        shape, tile = self.shape, self.tile
        accumulators = registers(micro.pixels * self.lanes)
        slots = [span(p * self.lanes, width) for p in range(micro.pixels)]
        for slot in slots:
            store(accumulators, slot, splat(0, width))
        corner = T.bind(tile.corner(micro) + channel)
        target = T.bind(first + channel)
        with loop(shape.r) as r, loop(shape.s) as s:
            weight = T.bind(self.weights[span((r * shape.s + s) * shape.cout + target, width)])
            for slot, offset in zip(slots, tile.offsets(micro), strict=True):
                pixel = tile.buffer[span(corner + tile.tap(r, s) + offset, width)]
                store(accumulators, slot, accumulators[slot] + pixel * weight)
        if self.is_gradient:
            for slot in slots:
                store(self.scratch, slot, accumulators[slot])
            each = functools.partial(self.each_pixel, place, micro)
            self.leave(self.scratch, self.lanes, place.thread, target, width, each)
            return
        values = self.finished([accumulators[slot] for slot in slots], target, width)
        for pixel, value in zip(place.output_pixels(micro, shape), values, strict=True):
            if self.is_streamed and width == self.lanes:
                stream.stream(self.y.buffer, self.y.at(pixel, target), value, width)
            else:
                store(self.y.buffer, span(self.y.at(pixel, target), width), value)
        if "Statistics" in self.epilogue:
            self.partials.add(place.thread, target, values, width)
