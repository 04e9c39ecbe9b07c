"""Both gradients of a depthwise convolution (one input and one output channel a group), vectors along the channels.

    parallel over threads, each a fixed share of (image, row tile, channel block):
        grad <- dy after BatchNormGrad, with a border of zeros                      second-level cache
        for a strip of rows, for a vector of channels:
            for each input of the strip:
                load x; y <- its prologue
                for the taps that reach an output, one after the other:
                    dweight[tap] (a register) += y * grad[output]
                    d += grad[output] * weight[tap]
                other, mask, sums (registers), acc; store dx
    dweight <- the sum of the threads' partials

Going by inputs, a gradient and an input are loaded once for both results, and the padding needs no tile: it adds
nothing. A strided convolution visits one input of each residue by the stride at a time (conv_backward_shape.py).
Where the kernel has more taps than registers, further passes over the strip make the rest of dweight. A large dx
goes past the caches (stream.py).

GFLOP/s of one core (processor time, batch 16; ours with BatchNormGrad, Normalize, Clip, mask and sums, torch in
channels_last the plain convolution): 3x3 36-54 (torch 22-46), 3x3 / 2 15-24 (4-19), 5x5 61-81 (13), 5x5 / 2 51-55 (9).
That is 16 to 26 GB/s of maps read and written for 3x3, where one core copies at 14 to 18 and, past the caches, at 26.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.geometry import Convolution
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.sides import sides
from bnfuse.runtime.kernels.cpu import stream, tir
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import (
    Buffer,
    Elements,
    Expr,
    Sums,
    epilogue_value,
    finish,
    write_epilogue,
)
from bnfuse.runtime.kernels.cpu.conv_backward_micro import add_row
from bnfuse.runtime.kernels.cpu.nest import block_vectors, loop
from bnfuse.runtime.kernels.cpu.tir import READ, WRITE, prefetch, registers, span, store
from bnfuse.runtime.kernels.kernel import Kernel, Param, Problem
from bnfuse.runtime.targets.target import CpuTarget

NAME = "depthwise_backward"
# Chosen by hand; what they come to is measured by benchmarks/conv_kernels_backward.py
TILE_BYTES = 400 * 1024  # the grad tile, in the second-level cache
VECTORS = 64  # of a channel block, at most: rows of whole pixels are read and written fastest
STRIP_PIXELS = 56  # of u, at least: the sums of a strip are loaded and stored once a strip


@dataclasses.dataclass(frozen=True)
class DepthwiseTiles:
    """Values of u in a row tile (see conv_backward_shape.py) and in a strip of it, channels of a block, taps whose
    dweight a pass over a strip sums."""

    rows: int
    strip: int
    lanes: int
    block: int
    taps: int


def is_depthwise(shape: Convolution, target: CpuTarget) -> bool:
    """Tell whether this kernel takes a shape: one channel in, one out, and a row of the kernel in registers."""
    return shape.groups > 1 and shape.cin == shape.cout == 1 and shape.columns.kernel <= _tap_limit(target)


def _tap_limit(target: CpuTarget) -> int:
    return 12 if target.lanes == 8 else 25  # of 16 and 32 vector registers, chosen by hand


def choose_tiles(shape: Convolution, target: CpuTarget) -> DepthwiseTiles:
    """Choose the tallest row tiles whose grad tile fits, strips of them, and blocks of channels, all cut evenly."""
    vectors = -(-shape.groups // target.lanes)
    block = target.lanes * -(-vectors // -(-vectors // VECTORS))
    rows, columns = shape.rows, shape.columns
    width = columns.units + columns.high - columns.low

    def size(count: int) -> int:
        return 4 * block * width * (count + rows.high - rows.low)

    most = max([1, *(count for count in range(1, rows.units + 1) if size(count) <= TILE_BYTES)])
    even = -(-rows.units // -(-rows.units // most))
    strip = min(even, -(-STRIP_PIXELS // columns.units))
    taps = rows.kernel * columns.kernel
    limit = _tap_limit(target)
    return DepthwiseTiles(
        even, strip, target.lanes, block, taps if taps <= limit else limit // columns.kernel * columns.kernel
    )


def depthwise_backward(problem: Problem, target: CpuTarget, shape: Convolution, params: tuple[Param, ...]) -> Kernel:
    """Make the kernel of a depthwise convolution's gradients. `conv_backward` has checked the problem."""
    name = unique_name(NAME, problem, target)
    return Kernel(name, problem, target, params, partial(_build, problem, target, shape, params))


def _build(problem: Problem, target: CpuTarget, shape: Convolution, params: tuple[Param, ...]) -> Any:
    with tir.function(unique_name(NAME, problem, target), params) as arguments:
        tiles = choose_tiles(shape, target)
        nest = _Depthwise(problem, target.threads, arguments.buffers, arguments.offsets, shape, tiles)
        if nest.is_streamed:
            with stream.streaming(problem.map(nest.result), tiles.lanes):
                nest.body()
        else:
            nest.body()
    return arguments.result


@dataclasses.dataclass(frozen=True)
class _Item:
    """What a thread works on: an image, the first u of a row tile, a channel block and its first channel."""

    thread: Expr
    image: Expr
    unit: Expr
    block: Expr
    first: Expr


@dataclasses.dataclass(frozen=True)
class _Vector:
    """A vector of channels, counted from the block's first, and what is kept of it during a pass over a strip."""

    start: Expr
    channel: Expr  # of the map
    width: int
    taps: range  # whose dweight this pass makes
    leaves: bool  # whether this pass makes dx
    weights: list[Expr]
    dweight: Buffer  # [tap][width]
    sums: Sums


@dataclasses.dataclass(frozen=True)
class _Depthwise(Elements):
    shape: Convolution
    tiles: DepthwiseTiles

    # Sizes

    @property
    def blocks(self) -> int:
        return -(-self.channels // self.tiles.block)

    @property
    def padded(self) -> int:
        return self.blocks * self.tiles.block

    @property
    def taps(self) -> int:
        return self.shape.taps

    @property
    def row_tiles(self) -> int:
        return -(-self.shape.rows.units // self.tiles.rows)

    @property
    def grad_rows(self) -> int:
        return self.tiles.rows + self.shape.rows.high - self.shape.rows.low

    @property
    def grad_columns(self) -> int:
        axis = self.shape.columns
        return axis.units + axis.high - axis.low

    @property
    def grad_plane(self) -> int:
        """Count the floats of a vector's part of the grad tile: [vector][row][column][lanes]."""
        return self.grad_rows * self.grad_columns * self.tiles.lanes

    @property
    def is_streamed(self) -> bool:
        """Tell whether dx goes past the caches. One that is read first (Accumulate) is in them anyway."""
        if not self.wants_input or "Accumulate" in self.spec.epilogue:
            return False
        return stream.is_streamed(self.problem.map(self.result), self.tiles.lanes)

    # The loop nest

    def body(self) -> None:
        tiles = self.tiles
        sizes = {
            "partial": (self.taps * self.padded if self.wants_weight else 0, "float32"),
            "sums": (self.sums_size, "float64"),
            "bias": (self.channels if "BiasGrad" in self.spec.epilogue else 0, "float64"),
        }
        space = {name: tir.workspace(self.threads * size, dtype) for name, (size, dtype) in sizes.items() if size}
        if self.wants_input:
            space["packed"] = tir.workspace(self.taps * self.padded)
            self._pack_weights(space["packed"])
        with T.parallel(0, self.threads) as thread:
            for name, (size, _) in sizes.items():
                if size:
                    tir.zero(space[name], thread * size, size, tiles.lanes)
            grad = tir.workspace(tiles.block // tiles.lanes * self.grad_plane)
            tir.zero(grad, 0, tiles.block // tiles.lanes * self.grad_plane, tiles.lanes)
            first, count = tir.share(self.shape.n * self.row_tiles * self.blocks, self.threads, thread)
            with T.serial(0, count) as number:
                index = T.bind(first + number)
                tile, block = T.bind(index // self.blocks), T.bind(index % self.blocks)
                unit = T.bind(tile % self.row_tiles * tiles.rows)
                image = T.bind(tile // self.row_tiles)
                item = _Item(thread, image, unit, block, T.bind(block * tiles.block))
                self._pack_grad(item, grad)
                if "bias" in space:
                    self._bias(item, grad, space["bias"])
                with loop(-(-tiles.rows // tiles.strip)) as strip:
                    self._strip(item, grad, space, strip * tiles.strip)
            if self.is_streamed:
                stream.fence()
        if self.wants_weight:
            self._unpack(space["partial"])
        finish(self, space.get("sums"), space.get("bias"))

    def _pack_weights(self, packed: Buffer) -> None:
        """Pack OIHW, here [channel][tap], to [tap][channel]."""
        weight = self.arguments["weight"]
        with T.serial(0, self.taps) as tap, T.serial(0, self.channels) as channel:
            store(packed, tap * self.padded + channel, weight[channel * self.taps + tap])

    def _unpack(self, partials: Buffer) -> None:
        with T.serial(0, self.channels) as channel, T.serial(0, self.taps) as tap:
            source = tap * self.padded + channel
            total = partials[source]
            for thread in range(1, self.threads):
                total = total + partials[source + thread * (self.taps * self.padded)]
            store(self.arguments["dweight"], channel * self.taps + tap, total)

    def _vectors(self, item: _Item, body: Callable[[Expr, int], None]) -> None:
        """Call `body(start, width)` for the vectors of a block of channels; `start` counts from the block's first."""
        block_vectors(item.block, self.tiles.block, self.channels, self.tiles.lanes, body)

    # The gradients of the outputs

    def _pack_grad(self, item: _Item, grad: Buffer) -> None:
        """Pack dy. Zeros stay where no output is, but for rows, which the tile before may have filled."""
        rows, columns, lanes = self.shape.rows, self.shape.columns, self.tiles.lanes
        with T.serial(0, self.grad_rows) as r:
            row = T.bind(item.unit + r + rows.low)
            with T.If(tirx.And(row >= 0, row < rows.out)):
                with T.Then(), T.serial(0, columns.out) as column:
                    pixel = T.bind((item.image * rows.out + row) * columns.out + column)
                    at = T.bind((r * self.grad_columns + column - columns.low) * lanes)

                    def fill(start: Expr, width: int) -> None:
                        channel, target = T.bind(item.first + start), T.bind(self._plane(start) + at)
                        with T.vectorized(0, width) as j:
                            store(grad, target + j, self.gradient(pixel, channel + j))

                    self._vectors(item, fill)
                with T.Else(), T.serial(0, self.tiles.block // lanes) as v:
                    at = v * self.grad_plane + r * (self.grad_columns * lanes)
                    tir.zero(grad, at, self.grad_columns * lanes, lanes)

    def _plane(self, start: Expr) -> Expr:
        """Write where the part of the grad tile of the vector of channels from `start` on begins."""
        return start * (self.grad_plane // self.tiles.lanes)

    def _grad_at(self, row: Expr, column: Expr) -> Expr:
        """Write where output (row, column) of the tile starts in a vector's part of the grad tile."""
        rows, columns = self.shape.rows, self.shape.columns
        return ((row - rows.low) * self.grad_columns + column - columns.low) * self.tiles.lanes

    def _bias(self, item: _Item, grad: Buffer, bias: Buffer) -> None:
        """Take a float32 sum for each row of outputs, added in float64; of inputs, where dy lies there."""
        if self.spec.is_transposed:
            self._input_bias(item, bias)
            return

        def rows(start: Expr, width: int) -> None:
            lanes = span(0, width)
            with T.serial(0, tirx.Min(self.tiles.rows, self.shape.rows.out - item.unit)) as h:
                total = registers(width)
                store(total, lanes, tir.splat(0, width))
                with T.serial(0, self.shape.columns.out) as w:
                    store(total, lanes, total[lanes] + grad[span(self._plane(start) + self._grad_at(h, w), width)])
                index = span(item.thread * self.channels + item.first + start, width)
                store(bias, index, bias[index] + tir.widen(total[lanes], width))

        self._vectors(item, rows)

    def _input_bias(self, item: _Item, bias: Buffer) -> None:
        rows, columns = self.shape.rows, self.shape.columns
        first = item.unit * rows.stride
        own = tirx.Max(0, tirx.Min(self.tiles.rows * rows.stride, rows.size - first))
        with T.serial(0, own) as h:
            pixel = T.bind((item.image * rows.size + first + h) * columns.size)

            def add(start: Expr, width: int) -> None:
                channel = T.bind(item.first + start)
                add_row(self, bias, item.thread * self.channels + channel, (pixel, columns.size), channel, width)

            self._vectors(item, add)

    # The inputs

    def _strip(self, item: _Item, grad: Buffer, space: dict[str, Buffer], strip: Expr) -> None:
        """Visit all inputs of the rows of u from `strip` on."""
        if not self.wants_weight:
            passes = [range(0)]
        else:
            passes = [range(at, min(at + self.tiles.taps, self.taps)) for at in range(0, self.taps, self.tiles.taps)]
        for number, taps in enumerate(passes):
            leaves = self.wants_input and number == 0
            self._vectors(item, partial(self._pass, item, grad, space, strip, taps, leaves))

    def _pass(
        self,
        item: _Item,
        grad: Buffer,
        space: dict[str, Buffer],
        strip: Expr,
        taps: range,
        leaves: bool,
        start: Expr,
        width: int,
    ) -> None:
        channel = T.bind(item.first + start)
        weights = [
            T.bind(space["packed"][span(tap * self.padded + channel, width)]) for tap in range(self.taps) if leaves
        ]
        dweight = registers(max(1, len(taps)) * width)
        for tap in range(len(taps)):
            store(dweight, span(tap * width, width), tir.splat(0, width))
        sums = Sums.zero(self, width, width)
        vector = _Vector(start, channel, width, taps, leaves, weights, dweight, sums)
        with loop(self.tiles.strip) as row:
            self._row(item, grad, vector, T.bind(strip + row))
        for number, tap in enumerate(taps):
            at = span((item.thread * self.taps + tap) * self.padded + channel, width)
            store(space["partial"], at, space["partial"][at] + dweight[span(number * width, width)])
        if leaves:
            sums.flush(space.get("sums"), item.thread, channel, {0: width})

    def _row(self, item: _Item, grad: Buffer, vector: _Vector, row: Expr) -> None:
        """Visit the inputs of row `row` of u in the tile; at the end of the map some residues or all may lack."""
        axis, tiles = self.shape.rows, self.tiles
        whole, rest = divmod(axis.size, axis.stride)
        unit = T.bind(item.unit + row)
        inside = self.row_tiles * tiles.rows == whole and tiles.rows % tiles.strip == 0 and not rest
        if inside:
            self._columns(item, grad, vector, row, axis.stride)
            return
        mine = tirx.And(row < tiles.rows, unit < whole)
        with T.If(mine), T.Then():
            self._columns(item, grad, vector, row, axis.stride)
        if rest:
            with T.If(tirx.And(row < tiles.rows, unit == whole)), T.Then():
                self._columns(item, grad, vector, row, rest)

    def _columns(self, item: _Item, grad: Buffer, vector: _Vector, row: Expr, residues: int) -> None:
        axis = self.shape.columns
        whole, rest = divmod(axis.size, axis.stride)
        if whole:
            with loop(whole) as column:
                self._inputs(item, grad, vector, (row, column), (residues, axis.stride))
        if rest:
            self._inputs(item, grad, vector, (row, whole), (residues, rest))

    def _inputs(
        self, item: _Item, grad: Buffer, vector: _Vector, place: tuple[Expr, Expr], residues: tuple[int, int]
    ) -> None:
        """Visit the inputs that belong to one u of rows and of columns."""
        rows, columns = self.shape.rows, self.shape.columns
        corner = (item.unit + place[0]) * rows.stride, place[1] * columns.stride
        pixel = T.bind((item.image * rows.size + corner[0]) * columns.size + corner[1])
        output = T.bind(self._plane(vector.start) + self._grad_at(*place))
        for residue in product(range(residues[0]), range(residues[1])):
            self._prefetch(vector, (item.image, *corner), residue)
            self._input(item, grad, vector, output, pixel + residue[0] * columns.size + residue[1], residue)

    def _input(
        self, item: _Item, grad: Buffer, vector: _Vector, output: Expr, pixel: Expr, residue: tuple[int, int]
    ) -> None:
        rows, columns, width = self.shape.rows, self.shape.columns, vector.width
        channel = vector.channel
        y, d = registers(width), registers(width)
        lanes = span(0, width)
        store(d, lanes, tir.splat(0, width))
        if vector.taps:
            with T.vectorized(0, width) as j:
                store(y, j, self.activated(pixel, channel + j))
        for tap in range(self.taps):
            up = rows.offset(residue[0], tap // columns.kernel)
            left = columns.offset(residue[1], tap % columns.kernel)
            if up is None or left is None or not (vector.leaves or tap in vector.taps):
                continue
            offset = (up * self.grad_columns + left) * self.tiles.lanes
            dy = T.bind(grad[span(output + offset, width)])
            if tap in vector.taps:
                at = span((tap - vector.taps.start) * width, width)
                store(vector.dweight, at, vector.dweight[at] + y[lanes] * dy)
            if vector.leaves:
                store(d, lanes, d[lanes] + dy * vector.weights[tap])
        if vector.leaves:
            self._write(d, vector, pixel, channel)

    def _write(self, d: Buffer, vector: _Vector, pixel: Expr, channel: Expr) -> None:
        streamed = self.is_streamed and vector.width == self.tiles.lanes
        with T.vectorized(0, vector.width) as j:
            where = (pixel, channel + j, j)
            if streamed:
                store(d, j, epilogue_value(self, d[j], (d, j), vector.sums, where))
            else:
                write_epilogue(self, d[j], (d, j), vector.sums, where)
        if streamed:
            at = self.index(self.result, pixel, channel)
            stream.stream(self.arguments[self.result], at, d[span(0, vector.width)], vector.width)

    def _prefetch(self, vector: _Vector, place: tuple[Expr, Expr, Expr], residue: tuple[int, int]) -> None:
        """Ask for a line of x, and of dx unless it goes past the caches, of the next row of u.

        Where the map is dense, a pass asks for its share of the row as one stretch: memory likes the order.
        """
        rows, columns, lanes = self.shape.rows, self.shape.columns, self.tiles.lanes
        image, row, column = place
        line = (image * rows.size + row + rows.stride + residue[0]) * columns.size

        def index(name: str) -> Expr:
            if self.blocks == 1 and self.problem.map(name).stride == self.channels and self.channels % lanes == 0:
                return self.index(name, line, vector.start * columns.size + (column + residue[1]) * lanes)
            return self.index(name, line + column + residue[1], vector.channel)

        if self.spec.is_gradient:
            read = sides(self.spec)[0]
            prefetch(self.arguments[read], index(read), READ)
        if vector.leaves and not self.is_streamed:
            prefetch(self.arguments[self.result], index(self.result), WRITE)
