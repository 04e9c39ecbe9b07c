"""The arithmetic of the backward convolution: which output rows an input row meets, and how the work is cut into tiles.

Everything here is plain Python integers; `conv_backward.py` has the loop nest that they fill.

An input index i is written  i = stride*u + e  (0 <= e < stride; e is its *residue*). Tap k of the kernel reaches it
from the output index  o = (i + pad - k*dilation)/stride, where that is an integer:  o = u + offset(e, k). So, residue
by residue, the gradient of the input is a convolution of stride one over u.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.cpus import vector_registers
from bnfuse.runtime.targets.target import CpuTarget

PIXELS = 448  # upper bound of the output pixels in a tile of a k x k convolution
FLAT_PIXELS = 128  # the same for 1x1 convolutions, whose rows are cut at will
GRAD_BYTES = 720 * 1024  # the grad tile is swept for every block: it must stay in a second-level cache of 1 MB
TILE_BYTES = 1400 * 1024  # both tiles together; the read tile is swept once
TILE_OVERHEAD = 12  # what a tile costs beyond its pixels, in pixels: the partial dweight is loaded and stored


@dataclasses.dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution: sizes of input and output, kernel size, stride, leading pad, dilation."""

    size: int
    out: int
    kernel: int = 1
    stride: int = 1
    pad: int = 0
    dilation: int = 1

    def offset(self, residue: int, tap: int) -> int | None:
        """o - u for this tap at this residue; None where the tap meets no output."""
        distance = residue + self.pad - tap * self.dilation
        return distance // self.stride if distance % self.stride == 0 else None

    def _offsets(self) -> Iterator[int]:
        yield 0
        for residue in range(self.stride):
            for tap in range(self.kernel):
                offset = self.offset(residue, tap)
                if offset is not None:
                    yield offset

    @property
    def low(self) -> int:
        """The smallest offset, at most 0."""
        return min(self._offsets())

    @property
    def high(self) -> int:
        """The largest offset, at least 0."""
        return max(self._offsets())

    @property
    def units(self) -> int:
        """Values of u that cover the input, and the output as well."""
        return max(-(-self.size // self.stride), self.out)

    @property
    def step(self) -> int:
        """Inputs from one position of a read tile to the next: what no tap meets is left out where that is regular."""
        return self.stride if self.kernel == 1 else 1

    @property
    def tile_stride(self) -> int:
        """Positions of a read tile from one output to the next."""
        return self.stride // self.step

    def reach(self, count: int) -> int:
        """Positions of a read tile that `count` neighbouring outputs take. Position i is input i*step - pad."""
        return (count - 1) * self.tile_stride + (self.kernel - 1) * self.dilation + 1

    def present(self, reach: int) -> tuple[int, int]:
        """The first of `reach` positions, from output 0 on, that is an input and not padding; and how many are."""
        first = -(-self.pad // self.step)
        last = (self.size - 1 + self.pad) // self.step
        return first, max(0, min(reach, last + 1) - first)


@dataclasses.dataclass(frozen=True)
class ConvShape:
    """A convolution as the kernel runs it. Channels are those of one group."""

    n: int
    rows: Axis
    columns: Axis
    cin: int
    cout: int
    groups: int

    @property
    def taps(self) -> int:
        return self.rows.kernel * self.columns.kernel

    @property
    def is_pointwise(self) -> bool:
        """Whether every output pixel reads the input pixel of the same number and no other."""
        return all(
            a.kernel == 1 and a.stride == 1 and a.pad == 0 and a.out == a.size for a in (self.rows, self.columns)
        )


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of the loop nest.

    A tile is `rows` values of u in each of `images` images, at full width. A micro-tile of the input gradient is
    `micro_images` x `micro_rows` x `micro_columns` pixels by `block` channels; one of the weight gradient is `taps`
    positions of (kernel column, input channel) by `out_block` output channels.
    """

    images: int
    rows: int
    micro_images: int
    micro_rows: int
    micro_columns: int
    taps: int
    lanes: int
    block: int
    out_block: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shape as the kernel runs it, and its tiles."""

    shape: ConvShape
    tiles: Tiles


def conv_shape(problem: Problem, threads: int) -> ConvShape:
    """The shape of a problem; a pointwise convolution has its pixels regrouped into rows of a convenient length."""
    return conv_shapes(problem, threads)[0]


def conv_shapes(problem: Problem, threads: int) -> list[ConvShape]:
    """The ways to see a problem, the best first: a pointwise convolution has its pixels regrouped into rows."""
    x, dy = problem.map("x"), problem.map("dy")
    group = problem.attribute("group")
    pads, strides, dilations = (problem.attribute(name) for name in ("pads", "strides", "dilations"))
    out, cin, *kernel = problem.weight
    rows, columns = (
        Axis(size, size_out, kernel[i], strides[i], pads[i], dilations[i])
        for i, (size, size_out) in enumerate(((x.h, dy.h), (x.w, dy.w)))
    )
    shape = ConvShape(x.n, rows, columns, cin, out // group, group)
    return _regrouped(shape, threads) if shape.is_pointwise else [shape]


def _regrouped(shape: ConvShape, threads: int) -> list[ConvShape]:
    """Rows of a length that whole micro-tiles of 14 pixels fill and that share out evenly; each row is then a tile."""
    pixels = shape.n * shape.rows.size * shape.columns.size

    def cost(width: int) -> tuple[int, int]:
        busiest = -(-(pixels // width) // threads)
        return busiest * (-(-width // 14) * 14 + TILE_OVERHEAD), -width

    def rows_of(width: int) -> ConvShape:
        count = pixels // width
        return dataclasses.replace(shape, n=1, rows=Axis(count, count), columns=Axis(width, width))

    return [rows_of(width) for width in sorted((d for d in _divisors(pixels) if d <= FLAT_PIXELS), key=cost)]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [*small, *(number // d for d in small)]


def alternatives(problem: Problem, target: CpuTarget) -> list[Plan]:
    """Plans that may beat that of the rule where it misjudges: other lengths of rows, and the next sizes of a tile."""
    shape, *others = conv_shapes(problem, target.threads)
    plans = [Plan(other, choose_tiles(other, target)) for other in others[:2]]
    sizes = _ranked_sizes(shape, target)[1:3]
    return plans + [Plan(shape, _tiles_of_size(shape, target, size)) for size in sizes]


def choose_tiles(shape: ConvShape, target: CpuTarget) -> Tiles:
    """Tiles for a shape on a target whose vectors have `target.lanes` lanes."""
    return _tiles_of_size(shape, target, _ranked_sizes(shape, target)[0])


def _tiles_of_size(shape: ConvShape, target: CpuTarget, size: tuple[int, int], vectors: int = 2) -> Tiles:
    """`size`: images and rows."""
    pixels, taps = (14, 8) if vector_registers(target) == 32 else (6, 6)
    lanes = target.lanes
    block = lanes * (vectors if shape.cin > lanes else 1)
    out_block = lanes * (vectors if shape.cout > lanes else 1)
    images, rows = size
    micro_rows, micro_columns = _micro(rows, -(-shape.columns.size // shape.columns.stride), pixels)
    together = pixels // (micro_rows * micro_columns)
    micro_images = max(i for i in range(1, images + 1) if images % i == 0 and i <= max(1, together))
    return Tiles(images, rows, micro_images, micro_rows, micro_columns, taps, lanes, block, out_block)


def _ranked_sizes(shape: ConvShape, target: CpuTarget) -> list[tuple[int, int]]:
    """Images and rows in a tile: few halos, little dweight traffic, even shares, and both tiles in cache."""
    axis, width = shape.rows, shape.columns.units
    limit = FLAT_PIXELS if shape.is_pointwise else PIXELS
    choices = [(1, rows) for rows in range(1, axis.units + 1)]
    choices += [(images, axis.units) for images in range(2, shape.n + 1) if shape.n % images == 0]
    fitting = [
        (images, rows) for images, rows in choices if images * rows * width <= limit and _fits(shape, images, rows)
    ] or [(1, 1)]

    def cost(choice: tuple[int, int]) -> float:
        images, rows = choice
        items = shape.n // images * -(-axis.units // rows)
        busiest = -(-items // target.threads)
        halo = 0.2 * (axis.high - axis.low) * images
        return busiest * (images * rows + halo + TILE_OVERHEAD / width)

    return sorted(fitting, key=cost)


def _fits(shape: ConvShape, images: int, rows: int) -> bool:
    grad = (rows + shape.rows.high - shape.rows.low) * (shape.columns.units + 2) * (shape.cout + 16)
    read = shape.rows.reach(rows) * shape.columns.reach(shape.columns.out) * shape.cin
    return 4 * images * grad <= GRAD_BYTES and 4 * images * (grad + read) <= TILE_BYTES


def _micro(rows: int, width: int, pixels: int) -> tuple[int, int]:
    """Rows and columns of a micro-tile of at most `pixels`, with the least wasted work."""

    def cost(choice: tuple[int, int]) -> tuple[float, int]:
        r, c = choice
        return -(-rows // r) * -(-width // c) * (max(r * c, 4) + 0.6), r

    choices = [(r, c) for r in range(1, rows + 1) for c in range(1, min(width, pixels // r) + 1) if r * c <= pixels]
    return min(choices, key=cost)
