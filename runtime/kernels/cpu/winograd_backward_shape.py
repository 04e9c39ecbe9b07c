"""The sizes of the backward Winograd convolution: its tiles, and what each algorithm costs.

Plain Python integers; `winograd_backward.py` has the loop nest that they fill. A *tile* is 2 x 2 pixels of dx and of
dy at one place of the grid that covers both maps; a *chunk* is what a thread transforms at a time.
"""

from __future__ import annotations

import dataclasses

from bnfuse.runtime.kernels.common.geometry import Axis, Convolution
from bnfuse.runtime.kernels.cpu.conv_backward_shape import (
    LEAST_PIXELS,
    MICRO_OVERHEAD,
    NARROW_PIXELS,
    WIDE_PIXELS,
    Tiles,
)
from bnfuse.runtime.kernels.cpu.conv_backward_shape import choose_tiles as choose_direct_tiles
from bnfuse.runtime.kernels.cpu.winograd import OUT, PLACES
from bnfuse.runtime.targets.cpus import vector_registers
from bnfuse.runtime.targets.target import CpuTarget

KERNEL = 3
TILES = 128  # of a chunk, at most; chosen by hand

# Measured (docs/decisions.md, D13); benchmarks/conv_kernels_backward.py times both algorithms
WEIGHT_TILES = 12  # whose multiplications take as long as the transforms of the weights and of their gradient
FEW_WEIGHTS = 512 * 1024  # bytes of all transformed weights that every micro-tile may read anew
BLOCK_TILES = 4  # times which all tiles must be fewer than the input channels, for threads to share these

# The cost of a chunk, chosen by hand
HALO = 0.15  # what the border of an image of a chunk costs, in rows of tiles
CHUNK_OVERHEAD = 6  # what a chunk costs beyond its tiles, in tiles


@dataclasses.dataclass(frozen=True)
class WinogradTiles(Tiles):
    """Sizes of the loop nest. `rows` counts pixels: a chunk is `rows`/2 rows of tiles in each of `images` images.

    `micro` tiles are multiplied at a time, `together` times as many wait for their inverse transform, and `in_blocks`
    blocks of input channels are transformed before the multiplications. With `by_block` one chunk has all tiles, and
    the threads share the blocks of input channels.
    """

    micro: int
    together: int
    in_blocks: int
    by_block: bool = False


def is_possible(shape: Convolution) -> bool:
    """Tell whether the algorithm can do a shape: 3 x 3, without stride, dilation and groups; any padding."""
    return shape.groups == 1 and all(a.kernel == 3 and a.stride == a.dilation == 1 for a in (shape.rows, shape.columns))


def is_faster(shape: Convolution, target: CpuTarget) -> bool:
    """Tell whether fewer multiplications are left once the tiles overhang odd maps and the weights are transformed.

    Measured at 30 shapes, the rule is wrong where it costs 0.01 ms. Channels that do not fill a vector are transformed
    and multiplied all the same.
    """
    # bounds chosen by hand
    if shape.cin < target.lanes or shape.cout < target.lanes // 2:
        return False
    pixels = shape.n * (shape.rows.size * shape.columns.size + shape.rows.out * shape.columns.out)
    tiles = shape.n * grid(shape.rows) * grid(shape.columns)
    return 2 * PLACES * (tiles + WEIGHT_TILES) < KERNEL * KERNEL * pixels


def grid(axis: Axis) -> int:
    """Count the tiles that cover the input and the output along an axis."""
    return -(-axis.units // OUT)


def choose_tiles(shape: Convolution, target: CpuTarget, by_block: bool = False) -> WinogradTiles:
    """Choose tiles for a shape on a target whose vectors have `target.lanes` lanes."""
    direct = choose_direct_tiles(shape, target)
    images, rows = (shape.n, grid(shape.rows)) if by_block else _chunk(shape, target)
    count = images * rows * grid(shape.columns)
    pixels = WIDE_PIXELS if vector_registers(target) == 32 else NARROW_PIXELS
    micro = min(range(1, pixels + 1), key=lambda m: (-(-count // m) * (max(m, LEAST_PIXELS) + MICRO_OVERHEAD), -m))
    taps = max(t for t in range(1, direct.taps + 1) if direct.block % t == 0)
    chosen = dataclasses.replace(
        direct, images=images, rows=OUT * rows, micro_images=1, micro_rows=OUT, micro_columns=OUT, taps=taps
    )
    blocks = -(-shape.cin // direct.block)
    is_big = PLACES * 4 * shape.cin * shape.cout > FEW_WEIGHTS
    return WinogradTiles(
        **dataclasses.asdict(chosen),
        micro=micro,
        together=-(-count // micro) if is_big else 1,
        in_blocks=blocks if is_big and not by_block else 1,
        by_block=by_block,
    )


def shares_blocks(shape: Convolution, target: CpuTarget) -> bool:
    """Tell whether threads share the input channels and not the tiles: where weights are far more than maps.

    Each of them then transforms all of dy, and none transforms a weight, or sums a weight's gradient, that another one
    does too. Measured (docs/decisions.md, D111).
    """
    tiles = shape.n * grid(shape.rows) * grid(shape.columns)
    blocks = -(-shape.cin // choose_direct_tiles(shape, target).block)
    return BLOCK_TILES * tiles <= shape.cin and blocks >= target.threads


def _chunk(shape: Convolution, target: CpuTarget) -> tuple[int, int]:
    """Choose images and rows of tiles in a chunk: few halos, little dweight traffic, even shares."""
    height, width = grid(shape.rows), grid(shape.columns)
    choices = [(1, rows) for rows in range(1, height + 1)]
    choices += [(images, height) for images in range(2, shape.n + 1) if shape.n % images == 0]
    fitting = [(images, rows) for images, rows in choices if images * rows * width <= TILES] or [(1, 1)]

    def cost(choice: tuple[int, int]) -> float:
        images, rows = choice
        items = shape.n // images * -(-height // rows)
        busiest = -(-items // target.threads)
        return busiest * (images * rows + HALO * images + CHUNK_OVERHEAD / width)

    return min(fitting, key=cost)
