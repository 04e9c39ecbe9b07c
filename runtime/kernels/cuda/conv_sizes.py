"""The sizes of a convolution's tile (conv_tile.py): how it is cut up, and what follows from that."""

from __future__ import annotations

import dataclasses
from typing import Literal

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda import wgmma
from bnfuse.runtime.kernels.cuda.correlation import Correlation
from bnfuse.runtime.kernels.cuda.operand import Operand, can_ring, chunks_of, element_size, vector_width
from bnfuse.runtime.kernels.cuda.partials import Team


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """How a tile is cut up: `pixels` by `outputs`, rows of `row_bytes` a chunk, warps along both, blocks at a time."""

    pixels: int
    outputs: int
    row_bytes: int
    warps: tuple[int, int]
    read: Literal["gather", "halo", "flat"]
    min_blocks: int = 1
    ahead: int = 1  # steps; more than 1 only where vectors can be copied asynchronously
    grouped: bool = False  # products of warpgroups (conv_group.py)
    columns: int = 0  # of a halo tile that is a patch of an image; without, it is a run of the flattened map

    @property
    def halo(self) -> bool:
        """Tell whether the source is read with a halo."""
        return self.read == "halo"

    @property
    def threads(self) -> int:
        """Count the threads of a block."""
        return self.warps[0] * self.warps[1] * d.WARP


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile's sizes, which follow from the correlation, the plan and the precision."""

    correlation: Correlation
    plan: TilePlan
    precision: str
    ring: bool  # whether vectors are copied asynchronously
    further: int  # maps of the operand beside the first that are copied so

    @property
    def channels(self) -> int:
        """Count the source channels of a chunk."""
        return self.plan.row_bytes // element_size(self.precision)

    @property
    def depth(self) -> int:
        """Count the channels of a group, or the elements of a whole window where taps and channels are one axis."""
        c = self.correlation
        return c.vertical.window * c.flat_row if self.plan.read == "flat" else c.inputs

    @property
    def chunks(self) -> int:
        """Count the chunks that `depth` is cut into."""
        return -(-self.depth // self.channels)

    @property
    def taps(self) -> int:
        """Count the taps that one chunk in shared memory serves."""
        return self.correlation.taps if self.plan.halo else 1

    @property
    def weight_taps(self) -> int:
        """Count the taps of a chunk whose weights lie in one buffer of shared memory."""
        return 1 if self.plan.grouped else self.taps

    @property
    def patch_rows(self) -> int:
        """Count the rows of a patch."""
        return self.plan.pixels // self.plan.columns

    @property
    def pitch(self) -> int:
        """Count the rows of a halo tile's source from a pixel to the one below it."""
        h = self.correlation.horizontal
        return self.plan.columns + 2 * h.reach if self.plan.columns else h.source

    @property
    def before(self) -> int:
        """Count the rows of a halo tile's source before that of the tile's first pixel."""
        return self.correlation.vertical.reach * self.pitch + self.correlation.horizontal.reach

    @property
    def source_rows(self) -> int:
        """Count the rows of the source in shared memory: the tile's pixels, and those of its halo."""
        if not self.plan.halo:
            return self.plan.pixels
        if self.plan.columns:
            return (self.patch_rows + 2 * self.correlation.vertical.reach) * self.pitch
        return self.plan.pixels + 2 * self.before

    @property
    def source_bytes(self) -> int:
        """Count the bytes of the source in one buffer of shared memory."""
        return self.source_rows * self.plan.row_bytes

    @property
    def weight_bytes(self) -> int:
        """Count the bytes of the weights in one buffer of shared memory."""
        return self.weight_taps * self.plan.outputs * self.plan.row_bytes

    @property
    def steps(self) -> int:
        """Count the steps of a block, at most; a phase may have fewer."""
        taps = self.correlation.taps if self.plan.read == "gather" else self.taps
        return self.chunks * (taps // self.weight_taps)

    @property
    def ahead(self) -> int:
        """Count the steps whose copies are on their way at a time."""
        return min(self.plan.ahead if self.ring else 1, self.steps)

    @property
    def buffers(self) -> int:
        """Count the buffers of shared memory: one is read while `ahead` are filled.

        A warpgroup's products are still reading that of the step before when the next copies begin.
        """
        return min(self.ahead + 1 + self.plan.grouped, self.steps)

    @property
    def source_buffers(self) -> int:
        """Count the buffers that hold a source: a halo's serves all steps of its chunk, where these are several."""
        return min(2, self.chunks) if self.plan.grouped and self.plan.halo else self.buffers

    @property
    def sources_at(self) -> int:
        """Give the byte offset of the first source: behind the weights where these are to be aligned."""
        return self.buffers * self.weight_bytes if self.plan.grouped else 0

    @property
    def weights_at(self) -> int:
        """Give the byte offset of the first weights."""
        return 0 if self.plan.grouped else self.buffers * self.source_bytes

    @property
    def align(self) -> int:
        """Give what the place of shared memory is a multiple of."""
        return wgmma.ALIGN if self.plan.grouped else 128

    @property
    def passes(self) -> int:
        """Count the vectors of a step that a thread brings."""
        return -(-self.source_rows // (self.plan.threads // chunks_of(self.plan.row_bytes)))

    @property
    def own_bytes(self) -> int:
        """Count the bytes of the places that threads have for themselves, for one map and step."""
        return self.passes * self.plan.threads * d.VECTOR_BYTES

    @property
    def own_at(self) -> int:
        """Give the byte offset of those places in shared memory: [set][further map][pass][thread]."""
        return self.source_buffers * self.source_bytes + self.buffers * self.weight_bytes

    @property
    def own_sets(self) -> int:
        """Count the steps that have such places at a time."""
        return 1 if self.plan.grouped and self.plan.halo else self.ahead

    @property
    def zeros_at(self) -> int:
        """Give the byte offset of the row of zeros in shared memory."""
        return self.own_at + (self.own_sets * self.further * self.own_bytes if self.ring else 0)

    @property
    def leading(self) -> int:
        """Count the floats between rows of the accumulators in shared memory.

        8 more than a multiple of 32 avoids conflicts.
        """
        return self.plan.outputs + 8

    @property
    def shared(self) -> int:
        """Count the bytes of shared memory: the operands' or, in their place behind the product, the accumulators'."""
        operands = self.zeros_at + (self.plan.row_bytes if self.plan.halo else 0)
        return max(operands, self.plan.pixels * self.leading * 4)

    @property
    def team(self) -> Team:
        """Lay out the threads over the result: vectors of channels side by side, then pixels."""
        width = vector_width(self.precision)
        across = self.plan.outputs // width
        return Team(across, self.plan.threads // across, width)

    @property
    def pixel_tiles(self) -> int:
        """Count the tiles along the pixels of a phase."""
        return -(-self.correlation.rows // self.plan.pixels)

    @property
    def output_tiles(self) -> int:
        """Count the tiles along the output channels of a group."""
        return -(-self.correlation.outputs // self.plan.outputs)

    @property
    def rows_of_partials(self) -> int:
        """Count the rows of partials, one for each tile of the pixels of each phase."""
        return self.correlation.phases * self.pixel_tiles

    @property
    def grid(self) -> tuple[int, int, int]:
        """Give the grid in blocks: of neighbours, tiles of outputs differ first, then groups, pixels, phases."""
        c = self.correlation
        return c.phases * self.pixel_tiles * self.output_tiles * c.groups, 1, 1

    @property
    def packed_row(self) -> int:
        """Count the elements of one tap of a packed weight's row (or of all taps where they are one axis)."""
        return -(-self.depth // 8) * 8


def tile_of(c: Correlation, plan: TilePlan, precision: str, operand: Operand) -> Tile:
    """Size the tile of a plan. Vectors are copied asynchronously where the operand allows (operand.py)."""
    ring = plan.read != "flat" and can_ring(operand, precision)
    return Tile(c, plan, precision, ring, len(operand.streamed) - 1)
