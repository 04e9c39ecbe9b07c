"""Forward convolution: NHWC implicit GEMM with the prologue in the packing and statistics in the epilogue.

    pack the weights: [group][cout/NR][cin block][r][s][cin][NR], NR = vectors*lanes         workspace
    parallel over threads, for the thread's tiles (images x rows x all columns of output):
        for a block of input channels:
            pack the activated input of the tile, with its zero border                          second-level cache
            for NR output channels, for a micro tile of pixels:                                 registers
                for r, s, input channel: accumulators += pixel * weights
                last block: + bias; sum and squared deviations to the thread's float64 partials; store y
    add up the threads' partials: mean and variance

Takes every convolution; depthwise ones go to depthwise_forward.py, 3x3 ones to winograd_forward.py where that pays,
those of bfloat16 to amx_forward.py where the CPU has tiles. A
1x1 convolution of stride 1 sees one column of n*h*w pixels. Where the input has fewer channels than a vector has
lanes, a row of the window is one reduction over columns and channels. Groups are convolved one after the other: with
few channels a group fills few lanes.

Measured with prologue and statistics, one thread of a shared AVX-512 server core (sgemm there: 141-155 GFLOP/s):
1x1 of DenseNet-121 121-166 GFLOP/s, its 3x3 150-194, its stem 133-153, 3x3 of ResNet-50 149-178, 32 groups of 4 23-34.
torch's plain convolutions, channels last: 1x1 101-157, 3x3 130-192, stem 104-136, ResNet 153-185, grouped 24-44.
The inner loop is 28 FMAs, 14 broadcasts and 2 loads of weights; it does not touch the stack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator
from typing import Any

from tvm.script.ir_builder import tirx as T

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.common.images import ImagePlan
from bnfuse.runtime.kernels.common.params import operator_params
from bnfuse.runtime.kernels.cpu import amx_forward, products
from bnfuse.runtime.kernels.cpu.depthwise_forward import DepthwiseNest
from bnfuse.runtime.kernels.cpu.forward_nest import ForwardNest
from bnfuse.runtime.kernels.cpu.nest import (
    MicroTile,
    PackedTile,
    Place,
    block_vectors,
    cut,
    loop,
    micro_tiles,
    places,
)
from bnfuse.runtime.kernels.cpu.partials import moments
from bnfuse.runtime.kernels.cpu.tiles import ConvShape, Tiles, alternatives, choose_tiles, conv_shape, flatten
from bnfuse.runtime.kernels.cpu.tir import (
    HALF,
    WRITE,
    Arguments,
    Buffer,
    Expr,
    at_most,
    function,
    prefetch,
    registers,
    share,
    span,
    splat,
    store,
    workspace,
)
from bnfuse.runtime.kernels.cpu.winograd_forward import WinogradNest
from bnfuse.runtime.kernels.cpu.winograd_forward_shape import choose_winograd_tiles, shares_blocks, takes, wins
from bnfuse.runtime.kernels.kernel import Choice, Kernel, Problem
from bnfuse.runtime.targets.target import CpuTarget


def algorithms(problem: Problem, target: CpuTarget) -> tuple[str, ...]:
    """List the algorithms that can do a convolution, the one that the cost rule chooses first."""
    shape = conv_shape(problem)
    tiles = ("amx",) if amx_forward.takes(problem, shape, target) else ()
    if not takes(shape):
        return (*tiles, "direct")
    return (
        *tiles,
        *(("winograd", "direct") if wins(problem, shape, target) else ("direct", "winograd")),
    )


def takes_image_sums(problem: Problem, target: CpuTarget) -> bool:
    """Tell whether statistics of images are taken on the way out: by all but depthwise convolutions."""
    plan = ImagePlan.of(problem)
    return plan is not None and plan.statistics and problem.spec.core == "Conv" and not conv_shape(problem).is_depthwise


def seen(problem: Problem) -> ConvShape:
    """Give the shape as the direct algorithm sees it: pixels in a list, of each image where sums are of images."""
    return flatten(conv_shape(problem), whole_batch=ImagePlan.of(problem) is None)


def choices(problem: Problem, target: CpuTarget) -> tuple[Choice, ...]:
    """List all ways to do a problem that are worth measuring, that of the rules first."""
    able = algorithms(problem, target)
    shape = conv_shape(problem)
    plans = [] if shape.is_depthwise else alternatives(seen(problem), target)
    return (*(Choice(name) for name in able), *(Choice("direct", plan) for plan in plans))


def conv_forward(
    problem: Problem, target: CpuTarget, algorithm: str | None = None, plan: Tiles | None = None
) -> Kernel:
    """Make the kernel of a forward operator with core Conv: any prologue, Bias, Relu, StoreInput, Statistics.

    Or that of ConvTransposeGradInput, a convolution of dy with a gradient's epilogue. `algorithm` is one of
    `algorithms`, the first by default; `plan` has the tiles of the direct one. Raises BnfuseError for an algorithm that
    cannot do the convolution.
    """
    able = algorithms(problem, target)
    chosen = algorithm or able[0]
    if chosen not in able:
        raise BnfuseError(f"{problem.op}: no algorithm '{chosen}' for this convolution; choose from {', '.join(able)}")
    shape = conv_shape(problem)
    name = f"{problem.op}_{hashlib.sha256(repr((problem, target, chosen)).encode()).hexdigest()[:12]}"
    params = operator_params(problem)

    def build() -> Any:
        with function(name, params) as arguments:
            nest(problem, target, arguments, shape, chosen, plan).emit()
        return arguments.result

    return Kernel(name, problem, target, params, build, plan)


def nest(
    problem: Problem, target: CpuTarget, arguments: Arguments, shape: ConvShape, algorithm: str, plan: Tiles | None
) -> ForwardNest:
    """Give the loop nest of an algorithm for a shape; `plan` is of the direct one alone."""
    if algorithm == "winograd":
        by_block = shares_blocks(problem, shape, target)
        return WinogradNest(problem, target, arguments, shape, choose_winograd_tiles(shape, target, by_block))
    if shape.is_depthwise:
        return DepthwiseNest(problem, target, arguments, shape)
    flat = seen(problem)
    if algorithm == "amx":
        return amx_forward.AmxNest(problem, target, arguments, flat, amx_forward.choose_amx_tiles(flat, target))
    return ConvNest(problem, target, arguments, flat, plan or choose_tiles(flat, target))


@dataclasses.dataclass(frozen=True)
class Part:
    """Which weights: a group, a block of its output channels, a block of input channels."""

    group: Expr
    block: Expr
    in_block: Expr


class ConvNest(ForwardNest):
    """The loop nest of the module's docstring."""

    def __init__(
        self, problem: Problem, target: CpuTarget, arguments: Arguments, shape: ConvShape, tiles: Tiles
    ) -> None:
        super().__init__(problem, target, arguments, shape)
        self.tiles = tiles
        self.width = tiles.vectors * target.lanes
        self.out_blocks = math.ceil(shape.group_cout / self.width)
        self.grouped = shape.groups > 1
        self.in_blocks = 1 if self.grouped else math.ceil(shape.cin / tiles.channels)
        self.taps = shape.r * shape.s
        self.in_pairs = products.takes(shape, target)
        self.packed_dtype = HALF if self.in_pairs else "float32"

    def emit(self) -> None:
        """Write the function's body, with what it takes in."""
        with products.products(self.lanes) if self.in_pairs else contextlib.nullcontext():
            super().emit()

    # Weights

    @property
    def packed_weights(self) -> int:
        """Count the floats of the packed weights of all groups."""
        return self.shape.groups * self.out_blocks * self.shape.group_cin * self.taps * self.width

    def weight_block(self, group: Expr, block: Expr, in_block: Expr) -> Expr:
        """Write where the packed weights of a group, an output block and an input block start."""
        size = self.shape.group_cin * self.taps * self.width
        return (group * self.out_blocks + block) * size + in_block * (self.tiles.channels * self.taps * self.width)

    def block_channels(self, in_block: Expr) -> Expr:
        """Count the input channels of a block that one output reads."""
        if self.in_blocks == 1:
            return self.shape.group_cin
        return at_most(self.tiles.channels, self.shape.cin - in_block * self.tiles.channels)

    def pack_weights(self, thread: Expr) -> None:
        """Pack OIHW to the module's layout; a thread takes some (group, output block, input channel)s."""
        shape, channels = self.shape, self.shape.group_cin
        first, count = share(shape.groups * self.out_blocks * channels, self.target.threads, thread)
        with T.serial(0, count) as i:
            item = T.bind(first + i)
            group = T.bind(item // (channels * self.out_blocks))
            block = T.bind(item // channels % self.out_blocks)
            channel = T.bind(item % channels)
            in_block = 0 if self.in_blocks == 1 else T.bind(channel // self.tiles.channels)
            inside = channel - in_block * self.tiles.channels if self.in_blocks > 1 else channel
            source = ((group * shape.group_cout + block * self.width) * channels + channel) * self.taps
            with T.serial(0, self.taps) as tap:
                row = tap * self.block_channels(in_block) + inside
                target = self.weight_block(group, block, in_block) + row * self.width
                if self.in_pairs:  # beside the other channel of its pair
                    target = target - inside % 2 * (self.width - 1)
                self.with_output_width(block, functools.partial(self.pack_weight_row, source + tap, target))

    def pack_weight_row(self, source: Expr, target: Expr, width: int) -> None:
        """Pack one row of `self.width` output channels, of which `width` exist."""
        weight, stride = self.arguments["weight"], self.shape.group_cin * self.taps
        apart = 2 if self.in_pairs else 1
        for start, part in cut(width, self.lanes):
            values = weight[span(source + start * stride, part, stride)]
            store(self.weights, span(target + start * apart, part, apart), values)
        for start, part in cut(self.width - width, self.lanes):
            store(self.weights, span(target + (width + start) * apart, part, apart), splat(0, part))

    # Tiles

    def work(self, thread: Expr) -> None:
        """Write all tiles of a thread."""
        shape, tiles = self.shape, self.tiles
        self.tile = PackedTile(shape, tiles.images, tiles.rows, tiles.row_stride, self.lanes, self.packed_dtype)
        if self.is_gradient:
            self.scratch = workspace(math.prod(tiles.micro) * self.width)
        if self.in_blocks > 1:
            self.sums = workspace(self.out_blocks * tiles.images * tiles.rows * shape.ow * self.width)
        for place in places(shape, tiles.images, tiles.rows, self.target.threads, thread):
            with loop(self.in_blocks) as in_block:
                self.sweep(place, in_block)

    def sweep(self, place: Place, in_block: Expr) -> None:
        """Do one block of input channels of a tile: pack it, then multiply it with every block of weights."""
        self.tile.pack(place, self.stores_in_passing, functools.partial(self.pack_pixel, in_block))
        with loop(self.shape.groups) as group, loop(self.out_blocks) as block:
            part = Part(group, block, in_block)
            for micro in micro_tiles(place, self.shape, self.tiles.micro):
                self.micro_tile(place, part, micro)

    def pack_pixel(self, in_block: Expr, index: Expr, pixel: Expr, stored: bool) -> None:
        """Pack the block's channels of one pixel."""
        channels = self.tiles.channels

        def pack(channel: Expr, width: int) -> None:
            source = channel + in_block * channels
            self.entry.pack(self.tile.buffer, index + channel, pixel, source, width, stored)

        block_vectors(in_block, channels, self.shape.cin, self.lanes, pack)

    # Micro tiles

    def micro_tile(self, place: Place, part: Part, micro: MicroTile) -> None:
        """Do one micro tile with one part of the weights: to y with the last input block, else to the sums."""
        accumulators = registers(micro.pixels * self.width)
        self.prefetch_output(place, part, micro)
        self.start(place, part, micro, accumulators)
        self.multiply(part, micro, accumulators)
        if self.in_blocks == 1:
            self.finish(place, part, micro, accumulators)
            return
        with T.If(part.in_block == self.in_blocks - 1):
            with T.Then():
                self.finish(place, part, micro, accumulators)
            with T.Else():
                for index, spilled in self.spilled(part, micro):
                    store(self.sums, spilled, accumulators[index])

    def prefetch_output(self, place: Place, part: Part, micro: MicroTile) -> None:
        """Ask for the lines of y that the micro tile will write: 5 to 15 % where memory sets the pace, else nothing."""
        for pixel in place.output_pixels(micro, self.shape):
            for start in range(0, self.width, self.lanes):
                channel = part.group * self.shape.group_cout + part.block * self.width + start
                prefetch(self.y.buffer, self.y.at(pixel, channel), WRITE)

    def start(self, place: Place, part: Part, micro: MicroTile, accumulators: Buffer) -> None:
        """Begin with zero, or with what the input blocks before this one left."""

        def clear() -> None:
            for index, _ in self.spilled(part, micro):
                store(accumulators, index, splat(0, self.lanes))

        if self.in_blocks == 1:
            clear()
            return
        with T.If(part.in_block == 0):
            with T.Then():
                clear()
            with T.Else():
                for index, spilled in self.spilled(part, micro):
                    store(accumulators, index, self.sums[spilled])

    def spilled(self, part: Part, micro: MicroTile) -> Iterator[tuple[Expr, Expr]]:
        """List the vectors of the accumulators, and where each waits between two blocks of input channels."""
        rows, columns = self.tiles.rows, self.shape.ow
        first = (micro.image.start * rows + micro.row.start) * columns + micro.column.start
        first = part.block * (self.tiles.images * rows * columns) + first
        for p, (i, h, w) in enumerate(micro.places()):
            for v in range(self.tiles.vectors):
                index = first * self.width + (((i * rows + h) * columns + w) * self.width + v * self.lanes)
                yield span(p * self.width + v * self.lanes, self.lanes), span(index, self.lanes)

    def multiply(self, part: Part, micro: MicroTile, accumulators: Buffer) -> None:
        """Add pixels * weights to the accumulators, over the window and a block of input channels."""
        shape, tile = self.shape, self.tile
        corner = T.bind(tile.corner(micro) + (part.group * shape.group_cin if self.grouped else 0))
        weights = T.bind(self.weight_block(part.group, part.block, part.in_block))
        channels = self.block_channels(part.in_block)
        whole_rows = not self.grouped and tile.row_stride == shape.cin and shape.dilation_w == 1
        steps_w, depth = (1, shape.s * shape.cin) if whole_rows else (shape.s, channels)
        each = 2 if self.in_pairs else 1  # channels of a step
        with loop(shape.r) as r, loop(steps_w) as s, T.serial(0, depth // each) as k:
            pixel = corner + tile.tap(r, s) + k * each
            row = weights + ((r * steps_w + s) * depth + k * each) * self.width
            for p, offset in enumerate(tile.offsets(micro)):
                for v in range(self.tiles.vectors):
                    index = span(p * self.width + v * self.lanes, self.lanes)
                    place, vector = pixel + offset, row + v * self.lanes * each
                    store(accumulators, index, self.added(accumulators[index], place, vector))

    def added(self, sums: Expr, pixel: Expr, row: Expr) -> Expr:
        """Write a vector of sums and what a step adds to it: a pixel of the tile times a vector of weights."""
        if self.in_pairs:
            return products.add_products(sums, self.tile.buffer, pixel, self.weights, row, self.lanes)
        return sums + self.tile.buffer[pixel] * self.weights[span(row, self.lanes)]

    def finish(self, place: Place, part: Part, micro: MicroTile, accumulators: Buffer) -> None:
        """Write bias, activation, statistics, y."""
        shape = self.shape
        if self.is_gradient:
            self.finish_gradient(place, part, micro, accumulators)
            return
        pixels = place.output_pixels(micro, shape)

        def body(width: int) -> None:
            for start, lanes in cut(width, self.lanes):
                channel = part.group * shape.group_cout + part.block * self.width + start
                values = [accumulators[span(p * self.width + start, lanes)] for p in range(micro.pixels)]
                values = self.finished(values, channel, lanes)
                for pixel, value in zip(pixels, values, strict=True):
                    store(self.y.buffer, span(self.y.at(pixel, channel), lanes), value)
                if "Statistics" in self.epilogue:
                    self.partials.add(place.thread, channel, values, lanes)
                if self.images is not None:
                    self.add_images(place, micro, channel, values, lanes)

        self.with_output_width(part.block, body)

    def add_images(self, place: Place, micro: MicroTile, channel: Expr, values: list[Expr], lanes: int) -> None:
        """Add the sums of y and y^2 over the pixels of each image in a micro tile."""
        assert self.images is not None
        each = micro.pixels // micro.image.size
        for i in range(micro.image.size):
            image = place.image + micro.image.start + i
            sums = moments(values[i * each : (i + 1) * each], lanes)
            self.images.add(image, place.thread, channel, sums, lanes)

    def images_of(self, first: int, last: int) -> tuple[int, int]:
        """Give the first and the last image of the tiles from `first` to `last`."""
        rows, images = math.ceil(self.shape.oh / self.tiles.rows), self.tiles.images
        return first // rows * images, min((last // rows + 1) * images, self.shape.n) - 1

    @property
    def items(self) -> int:
        """Count the tiles that the threads share."""
        return math.ceil(self.shape.n / self.tiles.images) * math.ceil(self.shape.oh / self.tiles.rows)

    def finish_gradient(self, place: Place, part: Part, micro: MicroTile, accumulators: Buffer) -> None:
        """Write the epilogue of a gradient, pixel by pixel out of memory: in registers no loop could go over them."""
        for index, _ in self.spilled(part, micro):
            store(self.scratch, index, accumulators[index])
        channel = T.bind(part.group * self.shape.group_cout + part.block * self.width)

        def body(count: int) -> None:
            each = functools.partial(self.each_pixel, place, micro)
            self.leave(self.scratch, self.width, place.thread, channel, count, each)

        self.with_output_width(part.block, body)
