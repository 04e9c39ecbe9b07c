"""Products of bfloat16 in tiles (AMX): 16 x 32 values times 32 x 16, with float32 sums.

    tiles 0 1 2 3   sums         [16 rows][16 columns]             float32; of 32 rows and 32 columns
    tiles 4 5       left side    [16 rows][32 deep]                bfloat16
    tiles 6 7       right side   [16 pairs of the depth][16 columns][2]   bfloat16

All tiles have that size. A load reads 16 rows of 64 bytes at any stride: what is too much holds zeros, or gives sums
that nobody reads. Each of a block's two left and two right tiles is used twice, so that loads keep up with products.

The instruction adds the products of even places and those of odd ones, each by fused operations, and then both to the
sum. It rounds to nearest and takes subnormal operands for zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu.tir import Buffer, Expr, Half, element, store, workspace, zero

SIDE, DEPTH = 16, 32  # rows, or columns, of a tile of sums; how deep a product is
BLOCK = 2 * SIDE  # rows, or columns, of a block of sums
SUMS, LEFT, RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)
LINE = 64  # bytes of a tile's row
NEAR = 512 << 10  # bytes of packed weights that stay in a second-level cache of 2 MiB, beside a tile
CONFIGURATION, PALETTE, WIDTHS, HEIGHTS = 64, 1, 16, 48  # its size, its first byte, where sizes of tiles are


def instruction(name: str, *operands: Expr) -> None:
    """Write an instruction; the numbers of tiles are constants."""
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *operands))


@contextlib.contextmanager
def tiles() -> Iterator[None]:
    """Let the thread at hand use tiles within the block; they are released at its end."""
    sizes = workspace(CONFIGURATION, "uint8")
    zero(sizes, 0, CONFIGURATION, 1)
    store(sizes, 0, tirx.const(PALETTE, "uint8"))
    for number in (*SUMS, *LEFT, *RIGHT):
        store(sizes, WIDTHS + 2 * number, tirx.const(LINE, "uint8"))
        store(sizes, HEIGHTS + number, tirx.const(SIDE, "uint8"))
    instruction("ldtilecfg", tirx.address_of(sizes[0]))
    yield
    instruction("tilerelease")


def load(number: int, buffer: Buffer, index: Expr, stride: int) -> None:
    """Load a tile from element `index` on, with `stride` elements from row to row."""
    instruction("tileloadd64", *_place(number, buffer, index, stride))


def keep(number: int, buffer: Buffer, index: Expr, stride: int) -> None:
    """Store a tile from element `index` on, with `stride` elements from row to row."""
    instruction("tilestored64", *_place(number, buffer, index, stride))


def _place(number: int, buffer: Buffer, index: Expr, stride: int) -> tuple[Expr, Expr, Expr]:
    return _tile(number), tirx.address_of(element(buffer, index)), tirx.const(stride * _size(buffer), "int64")


def _size(buffer: Buffer) -> int:
    """Give the bytes of an element: of float32, of a pair, or of bfloat16."""
    return 2 if isinstance(buffer, Half) else 4


def _tile(number: int) -> Expr:
    return tirx.const(number, "int8")


def sums_of(columns: int) -> list[tuple[int, int, int]]:
    """List the tiles of a block's sums as row, column, number; `columns` of tiles are 1 or 2."""
    return [(i, j, SUMS[2 * i + j]) for i in range(2) for j in range(columns)]


def clear(columns: int) -> None:
    """Set a block's sums to zero."""
    for _, _, number in sums_of(columns):
        instruction("tilezero", _tile(number))


def resume(columns: int, buffer: Buffer, index: Expr, stride: int) -> None:
    """Load a block's sums, float32, from element `index` on."""
    for i, j, number in sums_of(columns):
        load(number, buffer, index + i * SIDE * stride + j * SIDE, stride)


def leave(columns: int, buffer: Buffer, index: Expr, stride: int) -> None:
    """Store a block's sums, float32, from element `index` on."""
    for i, j, number in sums_of(columns):
        keep(number, buffer, index + i * SIDE * stride + j * SIDE, stride)


def add(columns: int, left: tuple[Buffer, Expr, int], right: tuple[Buffer, Expr, int]) -> None:
    """Add a product to a block's sums; its sides are (buffer, index of the first element, stride of rows).

    The left side has 32 rows of 32 values, the right one 16 rows of 16 `columns` pairs: bfloat16, or 32 bits for both.
    """
    buffer, index, stride = left
    for i, number in enumerate(LEFT):
        load(number, buffer, index + i * SIDE * stride, stride)
    buffer, index, stride = right
    for j, number in enumerate(RIGHT[:columns]):
        load(number, buffer, index + j * LINE // _size(buffer), stride)
    for i, j, number in sums_of(columns):
        instruction("tdpbf16ps", _tile(number), _tile(LEFT[i]), _tile(RIGHT[j]))


@contextlib.contextmanager
def sweep(weights: int, blocks: int, images: Expr, windows: Expr) -> Iterator[tuple[Expr, Expr, Expr]]:
    """Write loops over blocks of channels, over images and over their windows of 32 positions.

    Where so many packed weights stay near, all channels of a window are done at once: what lies together in the maps is
    read and written together. Otherwise a block's weights are used for all windows.
    """
    if 2 * weights <= NEAR:
        with T.serial(0, images) as image, T.serial(0, windows) as window, T.serial(0, blocks) as block:
            yield block, image, window
    else:
        with T.serial(0, blocks) as block, T.serial(0, images) as image, T.serial(0, windows) as window:
            yield block, image, window


def deep(size: int) -> int:
    """Round up to whole depths of products."""
    return -(-size // DEPTH) * DEPTH


def pitch(size: int) -> int:
    """Give the elements from row to row of a left side of `size`, bfloat16: an odd number of cache lines.

    Rows an even number of lines apart would crowd a few sets of the first-level cache.
    """
    lines = -(-size // DEPTH)
    return (lines + 1 - lines % 2) * DEPTH
