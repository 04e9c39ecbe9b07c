"""What the parts of a backward convolution share: the problem, its tiles, the layouts and the arguments.

Workspaces (float32 unless noted; all inside the kernel; `g` is a group, channels are those of one group):

    packed   [g][Cin/block][R][S][Cout][block]                   weights, shared by the threads
    partial  [thread][g][Cin/block][R][S'][taps][out pitch]      dweight; S' = 1 where (s, channel) is one dense index
    sums     [thread][reduction][Cin of all groups]              float64
    bias     [thread][Cout of all groups]                        float64
    grad     [image][row][column][out pitch]                     dy after its prologue, with a border of zeros
    read     [Cin/block][image][row][column][width of block]     x after its prologue, with the padding's zeros
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.geometry import Convolution
from bnfuse.runtime.kernels.cpu.conv_backward_epilogue import Elements, Expr
from bnfuse.runtime.kernels.cpu.conv_backward_shape import Tiles


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """Write the block under a condition."""
    with T.If(condition), T.Then():
        yield


@contextmanager
def otherwise() -> Iterator[None]:
    """Write the block for where the condition of the enclosing `T.If` does not hold."""
    with T.Else():
        yield


@dataclasses.dataclass(frozen=True)
class Nest(Elements):
    """One kernel being built: its shape, its tiles and the sizes that follow from them."""

    shape: Convolution
    tiles: Tiles

    packed_dtype: ClassVar[str] = "float32"  # of the packed weights

    # Channels

    @property
    def blocks(self) -> int:
        """Count the blocks of input channels in a group; the last may be short."""
        return -(-self.shape.cin // self.tiles.block)

    @property
    def out_pitch(self) -> int:
        """Count the floats between pixels of the grad tile: whole blocks, no multiple of what crowds a cache set."""
        padded = -(-self.shape.cout // self.tiles.out_block) * self.tiles.out_block
        return padded + 16 if padded >= 128 else padded  # chosen by hand

    @property
    def out_padded(self) -> int:
        """Count the output channels of a group in whole blocks."""
        return -(-self.shape.cout // self.tiles.out_block) * self.tiles.out_block

    @property
    def read_width(self) -> int:
        """Count the channels of a block of the read tile. A lone block is as wide as it has channels."""
        return self.shape.cin if self.blocks == 1 else self.tiles.block

    # The packed weights

    @property
    def packed_block(self) -> int:
        """Count the floats of a packed block: [R][S][Cout][block]."""
        return self.shape.taps * self.shape.cout * self.tiles.block

    @property
    def packed_size(self) -> int:
        """Count the floats of the packed weights of all groups."""
        return self.shape.groups * self.blocks * self.packed_block

    # The partial dweight

    @property
    def is_dense(self) -> bool:
        """Tell whether (s, channel) is one index: the channels that a row of the kernel reads lie side by side."""
        return self.blocks == 1 and self.shape.columns.dilation == 1

    @property
    def weight_columns(self) -> int:
        """Give the S' of the partial: 1 where (s, channel) is one index."""
        return 1 if self.is_dense else self.shape.columns.kernel

    @property
    def weight_taps(self) -> int:
        """Count the positions per (block, row, column) of the partial, before rounding."""
        return self.shape.columns.kernel * self.read_width if self.is_dense else self.read_width

    @property
    def weight_groups(self) -> int:
        """Count the groups of `taps` positions per (block, row, column); the last is filled up."""
        return -(-self.weight_taps // self.tiles.taps)

    @property
    def partial_row(self) -> int:
        """Count the floats per (block, row, column) of the partial."""
        return self.weight_groups * self.tiles.taps * self.out_padded

    @property
    def partial_group(self) -> int:
        """Count the floats of a group's partial."""
        return self.blocks * self.shape.rows.kernel * self.weight_columns * self.partial_row

    @property
    def partial_size(self) -> int:
        """Count the floats of a thread's partial."""
        return self.shape.groups * self.partial_group

    def partial_index(self, channel: Expr, r: Expr, s: Expr, out: Expr) -> Expr:
        """Write where an element of dweight lies in a group's partial."""
        block, inner = channel // self.read_width, channel % self.read_width
        line = block * self.shape.rows.kernel + r
        if self.is_dense:
            return line * self.partial_row + (s * self.read_width + inner) * self.out_padded + out
        return (line * self.weight_columns + s) * self.partial_row + inner * self.out_padded + out

    # The tiles

    @property
    def tile_rows(self) -> int:
        """Count the row tiles of an image."""
        return -(-self.shape.rows.units // self.tiles.rows)

    @property
    def items(self) -> int:
        """Count the tiles that the threads share."""
        return self.shape.n // self.tiles.images * self.tile_rows

    def images_of(self, first: int, last: int) -> tuple[int, int]:
        """Give the first and the last image, as the map counts them, of the tiles from `first` to `last`."""
        made, axis = self.problem.map(self.result), self.shape.rows

        def row(item: int, rows: int) -> int:
            image, unit = divmod(item, self.tile_rows)
            return image * self.tiles.images * axis.size + min((unit * self.tiles.rows + rows) * axis.stride, axis.size)

        behind = row(last, self.tiles.rows) + (self.tiles.images - 1) * axis.size
        width, area = self.shape.columns.size, made.h * made.w
        return row(first, 0) * width // area, (behind * width - 1) // area

    @property
    def grad_rows(self) -> int:
        """Count the rows of the grad tile, with its borders and with what the last micro-tile overhangs."""
        axis = self.shape.rows
        micro = -(-self.tiles.rows // self.tiles.micro_rows) * self.tiles.micro_rows
        return micro + axis.high - axis.low

    @property
    def grad_columns(self) -> int:
        """Count the columns of the grad tile, with its borders and with what the last micro-tile overhangs."""
        axis = self.shape.columns
        most = -(-axis.size // axis.stride)
        micro = -(-most // self.tiles.micro_columns) * self.tiles.micro_columns
        return max(micro, axis.units) + axis.high - axis.low

    @property
    def grad_size(self) -> int:
        """Count the floats of the grad tile, of all its images."""
        return self.tiles.images * self.grad_rows * self.grad_columns * self.out_pitch

    @property
    def micro_size(self) -> int:
        """Count the floats of a micro-tile of dx."""
        tiles = self.tiles
        return tiles.micro_images * tiles.micro_rows * tiles.micro_columns * tiles.block

    @property
    def read_rows(self) -> int:
        """Count the rows of the read tile: what a tile's outputs take."""
        return self.shape.rows.reach(self.tiles.rows)

    @property
    def read_columns(self) -> int:
        """Count the columns of the read tile, the padding among them."""
        return self.shape.columns.reach(self.shape.columns.out)

    @property
    def read_block(self) -> int:
        """Count the floats of a block of the read tile, of all its images."""
        return self.tiles.images * self.read_rows * self.read_columns * self.read_width

    @property
    def read_size(self) -> int:
        """Count the floats of the read tile."""
        return self.blocks * self.read_block + self.tiles.taps  # the last group of taps reads beyond the end


def inside(value: Expr, size: int) -> Expr:
    """Write whether 0 <= value < size."""
    return tirx.And(value >= 0, value < size)
