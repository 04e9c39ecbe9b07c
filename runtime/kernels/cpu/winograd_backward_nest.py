"""What the parts of a backward Winograd convolution share: the tiles, the layouts and the arguments.

Workspaces (float32; all inside the kernel; f is one of the 16 places of a transformed patch; `read`, `grad`, `sums` and
`bias` as in `conv_backward_nest.py`):

    weights   [f][Cin/block][Cout][block]                  G w' G^T of the rotated weights w', shared by the threads
    partial   [thread][f][Cin/block][block][Cout padded]   dweight before G^T . G
    inputs    [f][block of in_blocks][tile][block]         B^T x B, 4 x 4 of the activated input
    outputs   [f][tile][Cout padded]                       A dy A^T, 2 x 2 of the output gradient
    windows   [f][tile][out pitch]                         B^T dy B, 4 x 4 of the output gradient
    products  [f][block of in_blocks][tile][block]         what A^T . A makes dx of

Where threads share blocks, `read`, `weights` and `partial` have one block, and each thread has them of its own.
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
        """Count the tiles of a row of tiles, which cover dx and dy."""
        return grid(self.shape.columns)

    @property
    def chunk_rows(self) -> int:
        """Count the rows of tiles in each image of a chunk."""
        return self.tiles.rows // OUT

    @property
    def count(self) -> int:
        """Count the tiles of a chunk."""
        return self.tiles.images * self.chunk_rows * self.tile_columns

    @property
    def whole_count(self) -> int:
        """Count the tiles of a chunk in whole micro-tiles."""
        return -(-self.count // self.tiles.micro) * self.tiles.micro

    def active_rows(self, unit: Expr) -> Expr:
        """Count the rows of tiles in the chunk whose first row of pixels is `unit`: an image's last may lack some."""
        rows = grid(self.shape.rows)
        if rows % self.chunk_rows == 0:
            return self.chunk_rows
        return tirx.Min(self.chunk_rows, rows - unit // OUT)

    def active(self, unit: Expr) -> Expr:
        """Count the tiles of the chunk whose first row of pixels is `unit`."""
        return self.active_rows(unit) * (self.tiles.images * self.tile_columns)

    def place_of(self, tile: Expr) -> tuple[Expr, Expr, Expr]:
        """Write image, row and column of a tile inside its chunk."""
        row = tile // self.tile_columns
        return row // self.chunk_rows, row % self.chunk_rows, tile % self.tile_columns

    @property
    def bias_size(self) -> int:
        """Count a thread's sums of dbias."""
        return self.problem.map("dy").c if "BiasGrad" in self.spec.epilogue else 0

    # The tiles of pixels

    @property
    def tile_rows(self) -> int:
        """Count the chunks from the top of an image to its bottom."""
        return -(-grid(self.shape.rows) // self.chunk_rows)

    def images_of(self, first: int, last: int) -> tuple[int, int]:
        """Give the first and the last image of the chunks from `first` to `last`."""
        images = self.tiles.images
        return first // self.tile_rows * images, (last // self.tile_rows + 1) * images - 1

    @property
    def grad_rows(self) -> int:
        """Count the rows of pixels of the grad tile, with its borders."""
        return self.tiles.rows + self.shape.rows.high - self.shape.rows.low

    @property
    def grad_columns(self) -> int:
        """Count the columns of pixels of the grad tile, with its borders."""
        return OUT * self.tile_columns + self.shape.columns.high - self.shape.columns.low

    @property
    def read_rows(self) -> int:
        """Count the rows of pixels of the read tile: its patches overlap."""
        return self.tiles.rows + PATCH - OUT

    @property
    def read_columns(self) -> int:
        """Count the columns of pixels of the read tile."""
        return OUT * self.tile_columns + PATCH - OUT

    @property
    def read_size(self) -> int:
        """Count the floats of the read tile, of all blocks of input channels."""
        return self.held_blocks * self.read_block

    # What is transformed

    @property
    def held_blocks(self) -> int:
        """Count the blocks of input channels that `read`, `weights` and `partial` have."""
        return 1 if self.tiles.by_block else self.blocks

    def held(self, block: Expr) -> Expr:
        """Write where a block of input channels is among those."""
        return 0 if self.tiles.by_block else block

    @property
    def weights_place(self) -> int:
        """Count the floats from one place of `weights` to the next."""
        return self.held_blocks * self.shape.cout * self.tiles.block + APART

    @property
    def weights_size(self) -> int:
        """Count the floats of `weights`."""
        return PLACES * self.weights_place

    @property
    def partial_place(self) -> int:
        """Count the floats from one place of `partial` to the next."""
        return self.held_blocks * self.tiles.block * self.out_padded + APART

    @property
    def partial_size(self) -> int:
        """Count the floats of a thread's `partial`."""
        return PLACES * self.partial_place

    @property
    def inputs_place(self) -> int:
        """Count the floats from one place of `inputs` to the next."""
        return self.tiles.in_blocks * self.count * self.tiles.block + APART

    @property
    def outputs_place(self) -> int:
        """Count the floats from one place of `outputs` to the next."""
        return self.count * self.out_padded + APART

    @property
    def windows_place(self) -> int:
        """Count the floats from one place of `windows` to the next; the last micro-tile may overhang."""
        return self.whole_count * self.out_pitch + APART

    @property
    def products_tiles(self) -> int:
        """Count the tiles whose products wait for their inverse transform."""
        return self.tiles.together * self.tiles.micro

    @property
    def products_place(self) -> int:
        """Count the floats from one place of `products` to the next."""
        return self.tiles.in_blocks * self.products_tiles * self.tiles.block + APART

    @property
    def rounds(self) -> int:
        """Count how often `in_blocks` blocks are taken."""
        return -(-self.blocks // self.tiles.in_blocks)

    def present(self, block: Expr) -> Expr:
        """Count the blocks of input channels from `block` on that are taken together."""
        if self.blocks % self.tiles.in_blocks == 0:
            return self.tiles.in_blocks
        return tirx.Min(self.tiles.in_blocks, self.blocks - block)
