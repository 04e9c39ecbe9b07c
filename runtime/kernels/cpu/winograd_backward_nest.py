"""What the parts of a backward Winograd convolution share: the tiles, the layouts and the arguments.

Workspaces (float32; all inside the kernel; f is one of the 16 places of a transformed patch; `read`, `grad`, `sums` and
`bias` as in `conv_backward_nest.py`):

    weights   [f][Cin/block][Cout][block]                  G w' G^T of the rotated weights w', shared by the threads
    partial   [thread][f][Cin/block][block][Cout padded]   dweight before G^T . G
    inputs    [f][block of in_blocks][tile][block]         B^T x B, 4 x 4 of the activated input
    outputs   [f][tile][Cout padded]                       A dy A^T, 2 x 2 of the output gradient
    windows   [f][tile][out pitch]                         B^T dy B, 4 x 4 of the output gradient
    products  [f][block of in_blocks][tile][block]         what A^T . A makes dx of
"""

from __future__ import annotations

import dataclasses

from tvm import tirx

from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import Expr
from bnfuse.runtime.kernels.cpu.conv_backward_nest import Nest
from bnfuse.runtime.kernels.cpu.winograd import OUT, PATCH, PLACES
from bnfuse.runtime.kernels.cpu.winograd_backward_shape import WinogradTiles, grid

APART = 16  # floats between places beyond their size: else all 16 would meet in a few sets of the cache


@dataclasses.dataclass(frozen=True)
class WinogradNest(Nest):
    """One kernel being built."""

    tiles: WinogradTiles

    # The grid

    @property
    def tile_columns(self) -> int:
        return grid(self.shape.columns)

    @property
    def chunk_rows(self) -> int:
        """Rows of tiles in each image of a chunk."""
        return self.tiles.rows // OUT

    @property
    def count(self) -> int:
        """Tiles of a chunk."""
        return self.tiles.images * self.chunk_rows * self.tile_columns

    @property
    def whole_count(self) -> int:
        """The same in whole micro-tiles."""
        return -(-self.count // self.tiles.micro) * self.tiles.micro

    def active_rows(self, unit: Expr) -> Expr:
        """Rows of tiles in the chunk whose first row of pixels is `unit`: the last of an image may have fewer."""
        rows = grid(self.shape.rows)
        if rows % self.chunk_rows == 0:
            return self.chunk_rows
        return tirx.Min(self.chunk_rows, rows - unit // OUT)

    def active(self, unit: Expr) -> Expr:
        """Tiles of the chunk."""
        return self.active_rows(unit) * (self.tiles.images * self.tile_columns)

    def place_of(self, tile: Expr) -> tuple[Expr, Expr, Expr]:
        """Image, row and column of a tile inside its chunk."""
        row = tile // self.tile_columns
        return row // self.chunk_rows, row % self.chunk_rows, tile % self.tile_columns

    # The tiles of pixels

    @property
    def tile_rows(self) -> int:
        return -(-grid(self.shape.rows) // self.chunk_rows)

    @property
    def grad_rows(self) -> int:
        return self.tiles.rows + self.shape.rows.high - self.shape.rows.low

    @property
    def grad_columns(self) -> int:
        return OUT * self.tile_columns + self.shape.columns.high - self.shape.columns.low

    @property
    def read_rows(self) -> int:
        return self.tiles.rows + PATCH - OUT

    @property
    def read_columns(self) -> int:
        return OUT * self.tile_columns + PATCH - OUT

    @property
    def read_size(self) -> int:
        return self.blocks * self.read_block

    # What is transformed

    @property
    def weights_place(self) -> int:
        return self.blocks * self.shape.cout * self.tiles.block + APART

    @property
    def weights_size(self) -> int:
        return PLACES * self.weights_place

    @property
    def partial_place(self) -> int:
        return self.blocks * self.tiles.block * self.out_padded + APART

    @property
    def partial_size(self) -> int:
        return PLACES * self.partial_place

    @property
    def inputs_place(self) -> int:
        return self.tiles.in_blocks * self.count * self.tiles.block + APART

    @property
    def outputs_place(self) -> int:
        return self.count * self.out_padded + APART

    @property
    def windows_place(self) -> int:
        return self.whole_count * self.out_pitch + APART

    @property
    def products_tiles(self) -> int:
        return self.tiles.together * self.tiles.micro

    @property
    def products_place(self) -> int:
        return self.tiles.in_blocks * self.products_tiles * self.tiles.block + APART

    @property
    def rounds(self) -> int:
        """How often `in_blocks` blocks are taken."""
        return -(-self.blocks // self.tiles.in_blocks)

    def present(self, block: Expr) -> Expr:
        """Blocks of input channels from `block` on that are taken together."""
        if self.blocks % self.tiles.in_blocks == 0:
            return self.tiles.in_blocks
        return tirx.Min(self.tiles.in_blocks, self.blocks - block)
