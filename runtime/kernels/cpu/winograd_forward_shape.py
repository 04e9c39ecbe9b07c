"""The rules of the forward Winograd convolution: its tiles, and what it costs beside the direct algorithm.

Plain Python numbers; `winograd_forward.py` has the loop nest that they fill. A *square* is 2 x 2 pixels of y.
"""

from __future__ import annotations

import dataclasses
import math

from bnfuse.runtime.kernels.cpu.tiles import (
    PACK_DIRECT,
    ConvShape,
    Tiles,
    balanced,
    choose_tiles,
    choose_vectors,
    cost,
    micro_pixels,
)
from bnfuse.runtime.kernels.cpu.winograd import OUT, PLACES
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.target import CpuTarget

# Chosen by hand
TILE_BYTES = 448 << 10  # of packed input
NEAR_BYTES = 512 << 10  # of transformed weights that stay in the second-level cache, and of patches beside them
FAR_BYTES = 1152 << 10  # of patches, where the weights come from afar: once for each block of squares

# Cycles with 16 lanes, fitted to 26 layers' times (docs/decisions.md, D12; benchmarks/conv_kernels.py measures both
# algorithms); a multiplication of two vectors is half a cycle
PACK = 14  # a vector of a packed pixel
TRANSFORM = 58  # a vector of a patch
FINISH = 40  # a vector of a square's outputs
WEIGHT = 80  # to transform the windows of a vector of output channels and an input channel, more than to pack them
NEAR, FAR = 1 / 64, 1 / 24  # a byte of weights, each time
COLD, COLD_BYTES = 1, 4 << 20  # a byte of weights beyond so many, once: all threads wait for one memory
BLOCK_SQUARES = 4  # times which all squares must be fewer than the output channels, for threads to share these
WEIGHT_SQUARES = 12  # whose multiplications take as long as the transforms of the weights, where threads share blocks
MARGIN = 0.95  # of the direct kernel's cycles, which it has to stay below; chosen by hand


def takes(shape: ConvShape) -> bool:
    """Tell whether the algorithm can do a convolution: 3x3, without stride, dilation and groups; any padding."""
    window = (shape.r, shape.s, shape.stride_h, shape.stride_w, shape.dilation_h, shape.dilation_w)
    return window == (3, 3, 1, 1, 1, 1) and shape.groups == 1


def wins(problem: Problem, shape: ConvShape, target: CpuTarget) -> bool:
    """Tell whether the algorithm is estimated to be faster than the direct one."""
    if shares_blocks(problem, shape, target):
        return PLACES * (squares_of(shape) + WEIGHT_SQUARES) < shape.r * shape.s * shape.n * shape.oh * shape.ow
    direct = choose_tiles(shape, target)
    return winograd_cost(shape, choose_winograd_tiles(shape, target), target) < MARGIN * direct_cost(
        shape, direct, target
    )


def shares_blocks(problem: Problem, shape: ConvShape, target: CpuTarget) -> bool:
    """Tell whether threads share the output channels and not the squares: where weights are far more than maps.

    Each of them then transforms all of x, and none transforms a weight that another one does too. Measured
    (docs/decisions.md, D111). Sums of images are of whole threads, and so are these.
    """
    blocks = math.ceil(shape.cout / choose_vectors(shape.cout, target) / target.lanes)
    is_small = BLOCK_SQUARES * squares_of(shape) <= shape.cout and blocks >= target.threads
    return is_small and "ImageStatistics" not in problem.spec.epilogue


def squares_of(shape: ConvShape) -> int:
    """Count the squares that cover y."""
    even = whole_squares(shape)
    return even.n * even.oh * even.ow // OUT**2


def whole_squares(shape: ConvShape) -> ConvShape:
    """Round the sizes of y up to what whole squares cover."""
    return dataclasses.replace(shape, oh=math.ceil(shape.oh / OUT) * OUT, ow=math.ceil(shape.ow / OUT) * OUT)


@dataclasses.dataclass(frozen=True)
class WinogradTiles:
    """Sizes of the micro tile (vectors x squares), the block of squares, and the packed tile (images x rows)."""

    vectors: int
    micro: int
    block: int
    images: int
    rows: int  # of output, even
    pitch: int  # elements between pixels of the packed tile, and between squares of the transformed patches
    by_block: bool = False  # whether a tile has all squares, and threads share the blocks of output channels

    def packed_bytes(self, even: ConvShape) -> int:
        """Count the bytes of the packed tile."""
        return 4 * self.images * even.packed_rows(self.rows) * even.packed_columns * self.pitch

    def squares(self, even: ConvShape) -> int:
        """Count the squares of a packed tile."""
        return self.images * self.rows * even.ow // OUT**2

    @property
    def patch_bytes(self) -> int:
        """Count the bytes of a block's transformed patches."""
        return 4 * PLACES * self.block * self.pitch


def choose_winograd_tiles(shape: ConvShape, target: CpuTarget, by_block: bool = False) -> WinogradTiles:
    """Choose the cheapest of the tiles that fit; with `by_block` a tile has all squares."""
    even = whole_squares(shape)
    if by_block:
        squares = even.n * even.oh * even.ow // OUT**2
        vectors, micro = _micro(shape, squares, target)
        return WinogradTiles(
            vectors, micro, math.ceil(squares / micro) * micro, even.n, even.oh, _pitch(shape, target), True
        )
    sizes = [(1, rows) for rows in range(OUT, even.oh + 1, OUT)] + [
        (images, even.oh) for images in range(2, even.n + 1)
    ]
    options = [_tiles(shape, target, *size) for size in sizes]
    fitting = [tiles for tiles in options if tiles.packed_bytes(even) <= TILE_BYTES]
    return min(fitting or options[:1], key=lambda tiles: winograd_cost(shape, tiles, target))


def _tiles(shape: ConvShape, target: CpuTarget, images: int, rows: int) -> WinogradTiles:
    """Give the largest blocks of squares that the cache has room for, all of one size, in micro tiles of one size."""
    pitch = _pitch(shape, target)
    most = (NEAR_BYTES if weight_bytes(shape) <= NEAR_BYTES else FAR_BYTES) // (4 * PLACES * pitch)
    block = balanced(images * rows * whole_squares(shape).ow // OUT**2, max(most, 1))
    vectors, micro = _micro(shape, block, target)
    return WinogradTiles(vectors, micro, math.ceil(block / micro) * micro, images, rows, pitch)


def _micro(shape: ConvShape, block: int, target: CpuTarget) -> tuple[int, int]:
    """Give vectors and squares of a micro tile, of blocks of so many squares."""
    vectors = choose_vectors(shape.cout, target)
    return vectors, balanced(block, micro_pixels(vectors, target))


def _pitch(shape: ConvShape, target: CpuTarget) -> int:
    """Give one vector more than the channels, in elements."""
    return math.ceil(shape.cin / target.lanes) * target.lanes + target.lanes


def weight_bytes(shape: ConvShape) -> int:
    """Count the bytes of the transformed weights."""
    return 4 * PLACES * shape.cin * shape.cout


def winograd_cost(shape: ConvShape, tiles: WinogradTiles, target: CpuTarget) -> float:
    """Estimate the cycles of the busiest thread."""
    even = whole_squares(shape)
    inputs, outputs = math.ceil(shape.cin / target.lanes), math.ceil(shape.cout / target.lanes / tiles.vectors)
    outputs *= tiles.vectors
    squares = tiles.squares(even)
    blocks = math.ceil(squares / tiles.block)
    multiply = blocks * tiles.block * PLACES * shape.cin * outputs / 2
    pack = PACK * tiles.images * even.packed_rows(tiles.rows) * even.packed_columns * inputs
    transforms = squares * (TRANSFORM * inputs + FINISH * outputs)
    sweep = blocks * weight_bytes(shape) * (NEAR if weight_bytes(shape) <= NEAR_BYTES else FAR)
    count = math.ceil(shape.n / tiles.images) * math.ceil(even.oh / tiles.rows)
    weights = WEIGHT * shape.cin * outputs / target.threads + COLD * max(0, weight_bytes(shape) - COLD_BYTES)
    return math.ceil(count / target.threads) * (multiply + pack + transforms + sweep) + weights


def direct_cost(shape: ConvShape, tiles: Tiles, target: CpuTarget) -> float:
    """Estimate the cycles of the busiest thread for the direct algorithm."""
    count = math.ceil(shape.n / tiles.images) * math.ceil(shape.oh / tiles.rows)
    packed = tiles.images * shape.packed_rows(tiles.rows) * shape.packed_columns
    more = packed * math.ceil(shape.cin / target.lanes) * (PACK - PACK_DIRECT)  # `cost` counts that
    return cost(shape, tiles, target) + math.ceil(count / target.threads) * more
