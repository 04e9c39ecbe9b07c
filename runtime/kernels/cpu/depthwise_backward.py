"""Both gradients of a depthwise convolution (one input and one output channel a group), vectors along the channels.

    parallel over threads, each a fixed share of (image, row tile, channel block):
        grad <- dy after BatchNormGrad, with a border of zeros; read <- x after its prologue, with the padding's zeros
        dweight: for each vector of the block:  R*S registers += read[pixel + tap] * grad[pixel], over the tile's pixels
        dx:      for each residue, row, 6 pixels: 6 registers += grad[pixel + tap] * weight[tap], over the taps;
                 into a row, from which other, mask, sums, acc and the store follow
    dweight <- the sum of the threads' partials

Where the kernel has more taps than registers, dweight goes row by row of the kernel.

Bound by memory: one core (Sapphire Rapids) moves 10 to 15 GB/s here, which is 27 GFLOP/s for 3x3 with 144 channels at
56 and 7 for 3x3 / 2 with 96 channels at 112 (torch in channels_last, the plain convolution: 37 and 9).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.conv_backward_leave import (
    WRITE,
    Buffer,
    Elements,
    Expr,
    Sums,
    chunks,
    finish,
    leave,
    prefetch,
)
from bnfuse.runtime.kernels.cpu.conv_backward_shape import ConvShape
from bnfuse.runtime.kernels.cpu.tir import registers, span, store
from bnfuse.runtime.kernels.kernel import Kernel, Param, Problem, Target
from bnfuse.runtime.targets import vector_registers

NAME = "depthwise_backward"
TILE_BYTES = 400 * 1024  # the three tiles together
VECTORS = 8  # of a channel block, at most
PIXELS = 6  # of a micro-tile of dx


@dataclasses.dataclass(frozen=True)
class DepthwiseTiles:
    """Values of u in a row tile (see conv_backward_shape.py), channels of a block, taps that dweight sums at a time."""

    rows: int
    lanes: int
    block: int
    taps: int


def is_depthwise(shape: ConvShape, target: Target) -> bool:
    """Whether this module's kernel takes a shape: one channel in, one out, and a row of the kernel in registers."""
    return shape.groups > 1 and shape.cin == shape.cout == 1 and shape.columns.kernel <= _tap_limit(target)


def _tap_limit(target: Target) -> int:
    return 25 if vector_registers(target) == 32 else 12


def choose_tiles(shape: ConvShape, target: Target) -> DepthwiseTiles:
    vectors = -(-shape.groups // target.lanes)
    block = target.lanes * -(-vectors // -(-vectors // VECTORS))
    rows, columns = shape.rows, shape.columns

    def size(count: int) -> int:
        grad = (count + rows.high - rows.low) * (columns.units + columns.high - columns.low + PIXELS)
        read = rows.reach(count) * columns.reach(columns.out)
        return 4 * block * (grad + read + rows.stride * (columns.size + PIXELS * columns.stride))

    most = max([1, *(count for count in range(1, rows.units + 1) if size(count) <= TILE_BYTES)])
    even = -(-rows.units // -(-rows.units // most))
    taps = rows.kernel * columns.kernel
    return DepthwiseTiles(even, target.lanes, block, taps if taps <= _tap_limit(target) else columns.kernel)


def depthwise_backward(problem: Problem, target: Target, shape: ConvShape, params: tuple[Param, ...]) -> Kernel:
    """The kernel of a depthwise convolution's gradients. `conv_backward` has checked the problem."""
    return Kernel(NAME, problem, target, params, partial(_build, problem, target, shape, params))


def _build(problem: Problem, target: Target, shape: ConvShape, params: tuple[Param, ...]) -> Any:
    with tir.function(NAME, params) as arguments:
        tiles = choose_tiles(shape, target)
        _Depthwise(problem, target.threads, arguments.buffers, arguments.offsets, shape, tiles).body()
    return arguments.result


@dataclasses.dataclass(frozen=True)
class _Item:
    """What a thread works on: an image, the first u of a row tile, a channel block and how many channels it has."""

    thread: Expr
    image: Expr
    unit: Expr
    block: Expr
    first: Expr  # channel


@dataclasses.dataclass(frozen=True)
class _Depthwise(Elements):
    shape: ConvShape
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
    def micro_columns(self) -> int:
        """Micro-tiles along a row of u."""
        width = -(-self.shape.columns.size // self.shape.columns.stride)
        return -(-width // PIXELS)

    @property
    def grad_rows(self) -> int:
        return self.tiles.rows + self.shape.rows.high - self.shape.rows.low

    @property
    def grad_columns(self) -> int:
        axis = self.shape.columns
        return max(self.micro_columns * PIXELS, axis.units) + axis.high - axis.low

    @property
    def read_rows(self) -> int:
        return self.shape.rows.reach(self.tiles.rows)

    @property
    def read_columns(self) -> int:
        return self.shape.columns.reach(self.shape.columns.out)

    @property
    def leave_columns(self) -> int:
        return self.micro_columns * PIXELS * self.shape.columns.stride

    @property
    def out_size(self) -> int:
        """d of one u: all residues of the rows."""
        return self.shape.rows.stride * self.leave_columns * self.tiles.block

    # The loop nest

    def body(self) -> None:
        tiles = self.tiles
        sizes = {
            "partial": (self.taps * self.padded if self.wants_weight else 0, "float32"),
            "sums": (self.sums_size, "float64"),
            "bias": (self.channels if "BiasGrad" in self.spec.epilogue else 0, "float64"),
        }
        space = {name: tir.workspace(self.threads * size, dtype) for name, (size, dtype) in sizes.items() if size}
        packed = tir.workspace(self.taps * self.padded) if self.wants_input else None
        if packed is not None:
            self._pack_weights(packed)
        with T.parallel(0, self.threads) as thread:
            for name, buffer in space.items():
                tir.zero(buffer, thread * sizes[name][0], sizes[name][0], tiles.lanes)
            grad = _zeros(self.grad_rows * self.grad_columns * tiles.block, tiles.lanes)
            read = _zeros(self.read_rows * self.read_columns * tiles.block, tiles.lanes) if self.wants_weight else None
            out = (
                _zeros(self.shape.rows.stride * self.leave_columns * tiles.block, tiles.lanes)
                if self.wants_input
                else None
            )
            first, count = tir.share(self.shape.n * self.row_tiles * self.blocks, self.threads, thread)
            with T.serial(0, count) as number:
                index = first + number
                tile, block = index // self.blocks, index % self.blocks
                unit = tile % self.row_tiles * tiles.rows
                item = _Item(thread, tile // self.row_tiles, unit, block, block * tiles.block)
                self._pack_grad(item, grad)
                if "bias" in space:
                    self._bias(item, grad, space["bias"])
                if read is not None:
                    self._pack_read(item, read)
                    self._weight_gradient(item, read, grad, space["partial"])
                if out is not None:
                    with T.serial(0, tiles.rows) as row:
                        self._input_gradient(item, grad, packed, out, row)
                        self._leave(item, out, space.get("sums"), row)
        if self.wants_weight:
            self._unpack(space["partial"])
        finish(self, space.get("sums"), space.get("bias"))

    def _pack_weights(self, packed: Buffer) -> None:
        """OIHW, here [channel][tap], to [tap][channel]."""
        weight = self.arguments["weight"]
        with T.serial(0, self.taps) as tap, T.serial(0, self.channels) as channel:
            store(packed, tap * self.padded + channel, weight[channel * self.taps + tap])
        if self.padded > self.channels:
            with T.serial(0, self.taps) as tap:
                tir.zero(packed, tap * self.padded + self.channels, self.padded - self.channels, self.tiles.lanes)

    def _unpack(self, partials: Buffer) -> None:
        with T.serial(0, self.channels) as channel, T.serial(0, self.taps) as tap:
            source = tap * self.padded + channel
            total = partials[source]
            for thread in range(1, self.threads):
                total = total + partials[source + thread * (self.taps * self.padded)]
            store(self.arguments["dweight"], channel * self.taps + tap, total)

    def _with_channels(self, item: _Item, body: Callable[[int], None]) -> None:
        """`body(channels)` for a whole block, or for the last one, which may be short."""
        whole, rest = divmod(self.channels, self.tiles.block)
        if not (whole and rest):
            body(rest or self.tiles.block)
            return
        with T.If(item.block < whole):
            with T.Then():
                body(self.tiles.block)
            with T.Else():
                body(rest)

    def _pack(
        self,
        tile: Buffer,
        count: int,
        size: tuple[int, int],
        row: Callable[[Expr], tuple[Expr, int]],
        columns: tuple[int, int],
        element: Callable[[Expr, Expr, Expr], Expr],
    ) -> None:
        """Rows of a tile of `size` = (rows, columns): `element(row, column, channel)` in the `columns` = (first, count)
        of those inside the map, zeros in the others."""
        pitch = size[1] * self.tiles.block
        with T.serial(0, size[0]) as r:
            at, (place, axis_size) = r * pitch, row(r)
            with T.If(tirx.And(place >= 0, place < axis_size)):
                with T.Then(), T.serial(0, columns[1]) as c:
                    start = at + (columns[0] + c) * self.tiles.block
                    for lane, width in chunks(count, self.tiles.lanes).items():
                        with T.vectorized(0, width) as j:
                            store(tile, start + lane + j, element(place, c, lane + j))
                with T.Else():
                    tir.zero(tile, at, pitch, self.tiles.lanes)

    def _pack_grad(self, item: _Item, grad: Buffer) -> None:
        rows, columns = self.shape.rows, self.shape.columns

        def element(row: Expr, column: Expr, channel: Expr) -> Expr:
            pixel = (item.image * rows.out + row) * columns.out + column
            return self.gradient(pixel, item.first + channel)

        def fill(count: int) -> None:
            size = (self.grad_rows, self.grad_columns)
            place = (-columns.low, columns.out)
            self._pack(grad, count, size, lambda r: (item.unit + r + rows.low, rows.out), place, element)

        self._with_channels(item, fill)

    def _pack_read(self, item: _Item, read: Buffer) -> None:
        rows, columns = self.shape.rows, self.shape.columns
        left, middle = columns.present(self.read_columns)

        def element(row: Expr, column: Expr, channel: Expr) -> Expr:
            pixel = (item.image * rows.size + row) * columns.size + (left + column) * columns.step - columns.pad
            return self.activated(pixel, item.first + channel)[0]

        def fill(count: int) -> None:
            size = (self.read_rows, self.read_columns)
            start = item.unit * rows.stride - rows.pad
            self._pack(read, count, size, lambda r: (start + r * rows.step, rows.size), (left, middle), element)

        if middle:
            self._with_channels(item, fill)

    def _valid_outputs(self, item: _Item) -> Expr:
        return tirx.Min(self.tiles.rows, self.shape.rows.out - item.unit)

    def _grad_at(self, row: Expr, column: Expr) -> Expr:
        """Where output (row, column) of the tile starts in the grad tile."""
        rows, columns = self.shape.rows, self.shape.columns
        return ((row - rows.low) * self.grad_columns + column - columns.low) * self.tiles.block

    def _bias(self, item: _Item, grad: Buffer, bias: Buffer) -> None:
        lanes = self.tiles.lanes
        with T.serial(0, self._valid_outputs(item)) as h:

            def rows(count: int) -> None:
                for lane, width in chunks(count, lanes).items():
                    total = registers(lanes)
                    store(total, span(0, lanes), tir.splat(0, lanes))
                    with T.serial(0, self.shape.columns.out) as w:
                        dy = grad[span(self._grad_at(h, w) + lane, lanes)]
                        store(total, span(0, lanes), total[span(0, lanes)] + dy)
                    index = span(item.thread * self.channels + item.first + lane, width)
                    store(bias, index, bias[index] + tir.widen(total[span(0, width)], width))

            self._with_channels(item, rows)

    def _weight_gradient(self, item: _Item, read: Buffer, grad: Buffer, partials: Buffer) -> None:
        rows, columns, tiles = self.shape.rows, self.shape.columns, self.tiles
        lanes = tiles.lanes
        with T.serial(0, tiles.block // lanes) as v, T.serial(0, self.taps // tiles.taps) as group:
            acc = registers(tiles.taps * lanes)
            for tap in range(tiles.taps):
                store(acc, span(tap * lanes, lanes), tir.splat(0, lanes))
            with T.serial(0, self._valid_outputs(item)) as h, T.serial(0, columns.out) as w:
                dy = grad[span(self._grad_at(h, w) + v * lanes, lanes)]
                for tap in range(tiles.taps):
                    r, s = group + tap // columns.kernel, tap % columns.kernel
                    row = h * rows.tile_stride + r * rows.dilation
                    column = w * columns.tile_stride + s * columns.dilation
                    x = read[span((row * self.read_columns + column) * tiles.block + v * lanes, lanes)]
                    store(acc, span(tap * lanes, lanes), acc[span(tap * lanes, lanes)] + x * dy)
            for tap in range(tiles.taps):
                at = (item.thread * self.taps + group * tiles.taps + tap) * self.padded + item.first + v * lanes
                store(partials, span(at, lanes), partials[span(at, lanes)] + acc[span(tap * lanes, lanes)])

    def _residues(self) -> Iterator[tuple[int, int]]:
        for row in range(self.shape.rows.stride):
            for column in range(self.shape.columns.stride):
                yield row, column

    def _input_gradient(self, item: _Item, grad: Buffer, packed: Buffer, out: Buffer, row: Expr) -> None:
        """d of one u and all its residues; the taps that meet each residue are known here."""
        with T.serial(0, self.tiles.block // self.tiles.lanes) as v, T.serial(0, self.micro_columns) as micro:
            for residue in self._residues():
                self._prefetch(item, residue, (row, micro * PIXELS), item.first + v * self.tiles.lanes)
            for residue in self._residues():
                self._micro(grad, packed, out, residue, (row, micro * PIXELS), item.first, v * self.tiles.lanes)

    def _prefetch(self, item: _Item, residue: tuple[int, int], start: tuple[Expr, Expr], channel: Expr) -> None:
        """Ask for the lines of dx that this micro-tile's d will be written to."""
        rows, columns = self.shape.rows, self.shape.columns
        row = (item.unit + start[0]) * rows.stride + residue[0]
        pixel = (item.image * rows.size + row) * columns.size + start[1] * columns.stride + residue[1]
        corner, stride = T.bind(self.index("dx", pixel, channel)), self.problem.map("dx").stride
        for j in range(PIXELS):
            prefetch(self.arguments["dx"], corner + j * columns.stride * stride, WRITE)

    def _micro(
        self,
        grad: Buffer,
        packed: Buffer,
        out: Buffer,
        residue: tuple[int, int],
        start: tuple[Expr, Expr],
        first: Expr,
        lane: Expr,
    ) -> None:
        rows, columns, lanes = self.shape.rows, self.shape.columns, self.tiles.lanes
        acc = registers(PIXELS * lanes)
        for j in range(PIXELS):
            store(acc, span(j * lanes, lanes), tir.splat(0, lanes))
        for r in range(rows.kernel):
            for s in range(columns.kernel):
                up, left = rows.offset(residue[0], r), columns.offset(residue[1], s)
                if up is None or left is None:
                    continue
                weight = packed[span((r * columns.kernel + s) * self.padded + first + lane, lanes)]
                for j in range(PIXELS):
                    dy = grad[span(self._grad_at(start[0] + up, start[1] + left + j) + lane, lanes)]
                    store(acc, span(j * lanes, lanes), acc[span(j * lanes, lanes)] + dy * weight)
        for j in range(PIXELS):
            column = (start[1] + j) * columns.stride + residue[1]
            at = (residue[0] * self.leave_columns + column) * self.tiles.block + lane
            store(out, span(at, lanes), acc[span(j * lanes, lanes)])

    def _leave(self, item: _Item, out: Buffer, sums: Buffer | None, unit: Expr) -> None:
        rows, columns, tiles = self.shape.rows, self.shape.columns, self.tiles
        first = (item.unit + unit) * rows.stride
        valid = tirx.Min(rows.stride, rows.size - first)

        def row(count: int) -> None:
            with T.serial(0, valid) as r:
                part = Sums.zero(self, tiles.block, tiles.lanes)
                widths = chunks(count, tiles.lanes)
                with T.serial(0, columns.size) as c:
                    pixel = T.bind((item.image * rows.size + first + r) * columns.size + c)
                    for start, width in widths.items():
                        with T.vectorized(0, width) as j:
                            inner = start + j
                            at = (r * self.leave_columns + c) * tiles.block + inner
                            leave(self, out[at], (out, at), part, (pixel, item.first + inner, inner))
                part.flush(sums, item.thread, item.first, widths)

        self._with_channels(item, row)


def _zeros(size: int, lanes: int) -> Buffer:
    """A thread's workspace, full of zeros."""
    buffer = tir.workspace(size)
    tir.zero(buffer, 0, size, lanes)
    return buffer
