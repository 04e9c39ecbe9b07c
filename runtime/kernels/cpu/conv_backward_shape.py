"""The arithmetic of the backward convolution: which output rows an input row meets, and how the work is cut into tiles.

Everything here is plain Python integers; `conv_backward.py` has the loop nest that they fill.
"""

from __future__ import annotations

import dataclasses
import math

from bnfuse.runtime.kernels.common.geometry import Axis, Convolution, convolution_of
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.cpus import vector_registers
from bnfuse.runtime.targets.target import CpuTarget

# The cost rule, all chosen by hand; what it comes to is measured by benchmarks/conv_kernels_backward.py
PIXELS = 448  # upper bound of the output pixels in a tile of a k x k convolution
FLAT_PIXELS = 128  # the same for 1x1 convolutions, whose rows are cut at will
GRAD_BYTES = 720 * 1024  # the grad tile is swept for every block: it must stay in a second-level cache of 1 MB
TILE_BYTES = 1400 * 1024  # both tiles together; the read tile is swept once
TILE_OVERHEAD = 12  # what a tile costs beyond its pixels, in pixels: the partial dweight is loaded and stored
HALO = 0.2  # what packing a row of the grad tile's border costs, in rows
LEAST_PIXELS = 4  # a micro-tile of fewer pixels takes as long as one of so many
MICRO_OVERHEAD = 0.6  # what a micro-tile costs beyond its pixels, in pixels
WIDE_PIXELS, NARROW_PIXELS = 14, 6  # of a micro-tile with 32 and with 16 vector registers: two accumulators each
WIDE_TAPS, NARROW_TAPS = 8, 6  # the same of dweight


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

    shape: Convolution
    tiles: Tiles


def conv_shape(problem: Problem, threads: int) -> Convolution:
    """Give the shape of a problem; a pointwise convolution's pixels are regrouped into rows of a convenient length."""
    return conv_shapes(problem, threads)[0]


def conv_shapes(problem: Problem, threads: int) -> list[Convolution]:
    """List the ways to see a problem, the best first: a pointwise convolution has its pixels regrouped into rows."""
    shape = convolution_of(problem)
    return _regrouped(shape, threads) if shape.is_pointwise else [shape]


def _regrouped(shape: Convolution, threads: int) -> list[Convolution]:
    """Cut pixels into rows that whole micro-tiles of 14 fill and that share out evenly; each row is then a tile."""
    pixels = shape.n * shape.rows.size * shape.columns.size

    def cost(width: int) -> tuple[int, int]:
        busiest = -(-(pixels // width) // threads)
        return busiest * (-(-width // WIDE_PIXELS) * WIDE_PIXELS + TILE_OVERHEAD), -width

    def rows_of(width: int) -> Convolution:
        count = pixels // width
        return dataclasses.replace(shape, n=1, rows=Axis(count, count), columns=Axis(width, width))

    return [rows_of(width) for width in sorted((d for d in _divisors(pixels) if d <= FLAT_PIXELS), key=cost)]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [*small, *(number // d for d in small)]


def alternatives(problem: Problem, target: CpuTarget) -> list[Plan]:
    """List plans that may beat the rule's where it misjudges: other lengths of rows, and the next sizes of a tile."""
    shape, *others = conv_shapes(problem, target.threads)
    plans = [Plan(other, choose_tiles(other, target)) for other in others[:2]]
    sizes = _ranked_sizes(shape, target)[1:3]
    return plans + [Plan(shape, _tiles_of_size(shape, target, size)) for size in sizes]


def choose_tiles(shape: Convolution, target: CpuTarget) -> Tiles:
    """Choose tiles for a shape on a target whose vectors have `target.lanes` lanes."""
    return _tiles_of_size(shape, target, _ranked_sizes(shape, target)[0])


def _tiles_of_size(shape: Convolution, target: CpuTarget, size: tuple[int, int], vectors: int = 2) -> Tiles:
    """Give the tiles of `size`, images and rows."""
    pixels, taps = (WIDE_PIXELS, WIDE_TAPS) if vector_registers(target) == 32 else (NARROW_PIXELS, NARROW_TAPS)
    lanes = target.lanes
    block = lanes * (vectors if shape.cin > lanes else 1)
    out_block = lanes * (vectors if shape.cout > lanes else 1)
    images, rows = size
    micro_rows, micro_columns = _micro(rows, -(-shape.columns.size // shape.columns.stride), pixels)
    together = pixels // (micro_rows * micro_columns)
    micro_images = max(i for i in range(1, images + 1) if images % i == 0 and i <= max(1, together))
    return Tiles(images, rows, micro_images, micro_rows, micro_columns, taps, lanes, block, out_block)


def _ranked_sizes(shape: Convolution, target: CpuTarget) -> list[tuple[int, int]]:
    """Rank images and rows in a tile: few halos, little dweight traffic, even shares, and both tiles in cache."""
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
        halo = HALO * (axis.high - axis.low) * images
        return busiest * (images * rows + halo + TILE_OVERHEAD / width)

    return sorted(fitting, key=cost)


def _fits(shape: Convolution, images: int, rows: int) -> bool:
    # borders and pitch of the grad tile by their usual sizes (conv_backward_nest.py has the exact ones)
    grad = (rows + shape.rows.high - shape.rows.low) * (shape.columns.units + 2) * (shape.cout + 16)
    read = shape.rows.reach(rows) * shape.columns.reach(shape.columns.out) * shape.cin
    return 4 * images * grad <= GRAD_BYTES and 4 * images * (grad + read) <= TILE_BYTES


def _micro(rows: int, width: int, pixels: int) -> tuple[int, int]:
    """Choose rows and columns of a micro-tile of at most `pixels`, with the least wasted work."""

    def cost(choice: tuple[int, int]) -> tuple[float, int]:
        r, c = choice
        return -(-rows // r) * -(-width // c) * (max(r * c, LEAST_PIXELS) + MICRO_OVERHEAD), r

    choices = [(r, c) for r in range(1, rows + 1) for c in range(1, min(width, pixels // r) + 1) if r * c <= pixels]
    return min(choices, key=cost)
