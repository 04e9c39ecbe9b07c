"""The sizes of a weight gradient's tile (weight_tile.py): how it is cut up, and what follows from that."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda import wgmma
from bnfuse.runtime.kernels.cuda.correlation import Correlation
from bnfuse.runtime.kernels.cuda.lines import Lines
from bnfuse.runtime.kernels.cuda.operand import Operand, can_ring, chunks_of, element_size


@dataclasses.dataclass(frozen=True)
class WeightPlan:
    """`outputs` by `inputs` channels, `pixels` a chunk, warps along both channels; `splits` shares of the pixels."""

    outputs: int
    inputs: int
    pixels: int
    warps: tuple[int, int]
    read: Literal["gather", "halo", "flat"]
    splits: int
    min_blocks: int = 1
    ahead: int = 1  # steps; more than 1 only where vectors can be copied asynchronously

    @property
    def threads(self) -> int:
        """Count the threads of a block."""
        return self.warps[0] * self.warps[1] * d.WARP


@dataclasses.dataclass(frozen=True)
class SlidePlan:
    """64 by 64 channels; `groups` of four warps, one a row of the window (weight_slide.py)."""

    groups: int
    splits: int
    ahead: int

    outputs: ClassVar[int] = wgmma.ROWS
    inputs: ClassVar[int] = wgmma.ROW_BYTES // 2
    read: ClassVar[str] = "slide"
    min_blocks: ClassVar[int] = 1

    @property
    def threads(self) -> int:
        """Count the threads of a block."""
        return self.groups * wgmma.GROUP

    @property
    def pixels(self) -> int:
        """Count the pixels of a chunk: as many as let all threads bring equally many vectors."""
        return max(32 * self.groups, 64)


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Groups of four warps along both channels: 64 outputs each, `inputs` in equal parts (weight_group.py).

    `pixels` a chunk, of a tap; `splits` shares of the pixels.
    """

    groups: tuple[int, int]
    inputs: int
    pixels: int
    splits: int
    ahead: int
    min_blocks: int

    read: ClassVar[str] = "gather"

    @property
    def outputs(self) -> int:
        """Count the output channels."""
        return self.groups[0] * wgmma.ROWS

    @property
    def threads(self) -> int:
        """Count the threads of a block."""
        return self.groups[0] * self.groups[1] * wgmma.GROUP


@dataclasses.dataclass(frozen=True)
class StripPlan:
    """`outputs` by `inputs`, all columns of the flat window; an output row, `pixels`, a chunk (weight_strip.py).

    `rows` warps, one a row of the window, in `ways` along the pixels; `splits` shares of the rows.
    """

    outputs: int
    inputs: int
    pixels: int
    rows: int
    ways: int
    splits: int
    ahead: int
    min_blocks: int

    read: ClassVar[str] = "flat"

    @property
    def threads(self) -> int:
        """Count the threads of a block."""
        return self.rows * self.ways * d.WARP


@dataclasses.dataclass(frozen=True)
class Shares:
    """How a weight gradient and the pixels that it sums over are cut up, by the (forward) correlation and the plan."""

    correlation: Correlation
    plan: WeightPlan | SlidePlan | GroupPlan | StripPlan
    precision: str

    @property
    def depth(self) -> int:
        """Count the columns of the weight gradient that tiles of `inputs` cut up."""
        c = self.correlation
        return c.vertical.window * c.flat_row if self.plan.read == "flat" else c.inputs

    @property
    def tap_blocks(self) -> int:
        """Count the blocks that share a tile's taps: one for each tap where x is gathered."""
        return self.correlation.taps if self.plan.read == "gather" else 1

    @property
    def tiles(self) -> tuple[int, int]:
        """Count the tiles along outputs and inputs of a group."""
        return -(-self.correlation.outputs // self.plan.outputs), -(-self.depth // self.plan.inputs)

    @property
    def steps(self) -> int:
        """Count the chunks of pixels, all of them."""
        return -(-self.correlation.rows // self.plan.pixels)

    @property
    def share(self) -> int:
        """Count the chunks of a block; the last share may have fewer."""
        return -(-self.steps // self.plan.splits)

    @property
    def shares(self) -> int:
        """Count the shares of the pixels, none of which is empty."""
        return -(-self.steps // self.share)

    @property
    def blocks(self) -> int:
        """Count the blocks of a share."""
        outputs, inputs = self.tiles
        return outputs * inputs * self.tap_blocks * self.correlation.groups

    @property
    def grid(self) -> tuple[int, int, int]:
        """Give the grid in blocks: of neighbours, tiles of inputs differ first, then taps, outputs, groups, shares."""
        return self.blocks * self.shares, 1, 1

    @property
    def row(self) -> int:
        """Count the elements of a share's row, that of an output channel: [tap][input of its group], or flat."""
        return self.depth if self.plan.read == "flat" else self.correlation.taps * self.correlation.own_inputs

    @property
    def is_result(self) -> bool:
        """Tell whether the one share there is lies as the weight gradient does: of one tap, all pixels in a block."""
        return self.shares == 1 and self.plan.read != "flat" and self.correlation.taps == 1

    @property
    def elements(self) -> int:
        """Count the elements of a share."""
        return self.correlation.groups * self.correlation.outputs * self.row


@dataclasses.dataclass(frozen=True)
class WeightTile(Shares):
    """Sizes of a tile whose products are those of warps."""

    plan: WeightPlan
    ring: bool  # whether vectors are copied asynchronously
    further: tuple[int, int]  # maps of dy's and of x's operand beside the first that are copied so

    @property
    def ahead(self) -> int:
        """Count the steps whose copies are on their way at a time."""
        return min(self.plan.ahead if self.ring else 1, self.share)

    @property
    def taps(self) -> int:
        """Count the taps that a block serves."""
        return self.correlation.taps if self.plan.read == "halo" else 1

    @property
    def halo(self) -> int:
        """Count the pixels that taps reach before and behind a chunk; 0 where x is not read with a halo."""
        return self.correlation.halo if self.plan.read == "halo" else 0

    @property
    def source_rows(self) -> int:
        """Count the rows of x in shared memory: the pixels of a chunk, and those of its halo."""
        return self.plan.pixels + 2 * self.halo

    @property
    def gradient_row(self) -> int:
        """Count the bytes of a row of dy in shared memory."""
        return self.plan.outputs * element_size(self.precision)

    @property
    def source_row(self) -> int:
        """Count the bytes of a row of x in shared memory."""
        return self.plan.inputs * element_size(self.precision)

    @property
    def gradient_bytes(self) -> int:
        """Count the bytes of dy in one buffer of shared memory."""
        return self.plan.pixels * self.gradient_row

    @property
    def source_bytes(self) -> int:
        """Count the bytes of x in one buffer of shared memory."""
        return self.source_rows * self.source_row

    @property
    def buffers(self) -> int:
        """Count the buffers of shared memory: one is read while `ahead` are filled."""
        return min(self.ahead + 1, self.share)

    @property
    def own_bytes(self) -> tuple[int, int]:
        """Count the bytes of the places that threads have for themselves, for one map and step.

        They are those of a map of dy's operand, and of one of x's.
        """
        sizes = (self.plan.pixels, self.gradient_row), (self.source_rows, self.source_row)
        return tuple(  # type: ignore[return-value]
            -(-rows // (self.plan.threads // chunks_of(row))) * self.plan.threads * d.VECTOR_BYTES
            for rows, row in sizes
        )

    @property
    def own_at(self) -> int:
        """Give the byte offset of those: [step]([further map of dy] [further map of x])[pass][thread]."""
        return self.buffers * (self.gradient_bytes + self.source_bytes)

    @property
    def own_step(self) -> int:
        """Count the bytes of those places for one step."""
        return sum(count * size for count, size in zip(self.further, self.own_bytes, strict=True)) if self.ring else 0

    @property
    def zeros_at(self) -> int:
        """Give the byte offset of the row of zeros in shared memory."""
        return self.own_at + self.ahead * self.own_step

    @property
    def shared(self) -> int:
        """Count the bytes of shared memory."""
        return self.zeros_at + (self.source_row if self.plan.read == "halo" else 0)


@dataclasses.dataclass(frozen=True)
class SlideTile(Shares):
    """Sizes of a tile that slides over the pixels, with products of warpgroups.

    In shared memory lie x, `ring` chunks one behind the other and then the first rows again, dy, `buffers` chunks, the
    masks of two chunks, the coefficients of the tile's channels, and chunks of dy's further maps, then of x's.
    """

    plan: SlidePlan
    further: tuple[int, int]  # maps of dy's and of x's operand beside the first
    vectors: tuple[int, int]  # of coefficients

    row_bytes: ClassVar[int] = wgmma.ROW_BYTES

    @property
    def chunk_bytes(self) -> int:
        """Count the bytes of a chunk of one map."""
        return self.plan.pixels * self.row_bytes

    @property
    def ahead(self) -> int:
        """Count the steps whose copies are on their way at a time."""
        return min(self.plan.ahead, self.share)

    @property
    def lead(self) -> int:
        """Count the chunks of x that a block has to have before its first step's, which hold what taps reach."""
        return -(-2 * self.correlation.halo // self.plan.pixels)

    @property
    def ring(self) -> int:
        """Count the chunks of x: those on their way, those that a step reads, and the first of the step before, which
        products may still read."""
        return self.ahead + self.lead + 2

    @property
    def again(self) -> int:
        """Count the first rows of x that lie behind the last, too: those that the products of a row of the window reach
        from the last row of the ring on, in eights."""
        h = self.correlation.horizontal
        return -(-(wgmma.DEPTH + (h.window - 1) * h.step) // 8) * 8

    @property
    def buffers(self) -> int:
        """Count the chunks of dy: one is read while `ahead` are filled."""
        return self.ahead + 1

    @property
    def gradient_at(self) -> int:
        """Give the byte offset of dy."""
        return self.ring * self.chunk_bytes + self.again * self.row_bytes

    @property
    def masks_at(self) -> int:
        """Give the byte offset of the masks: [chunk's parity][row of the window][pixel, as products take them], a byte
        whose highest bits say which of the row's taps have a pixel."""
        return self.gradient_at + self.buffers * self.chunk_bytes

    @property
    def mask_bytes(self) -> int:
        """Count the bytes of a chunk's masks."""
        return self.correlation.vertical.window * self.plan.pixels

    @property
    def coefficients_at(self) -> tuple[int, int]:
        """Give the byte offsets of the coefficients of dy and of x: [vector][channel]."""
        first = self.masks_at + 2 * self.mask_bytes
        return first, first + self.vectors[0] * self.plan.outputs * 4

    @property
    def own_at(self) -> tuple[int, int]:
        """Give the byte offsets of the chunks of dy's and of x's further maps: [step][map][pixel]."""
        first = self.coefficients_at[1] + self.vectors[1] * self.plan.inputs * 4
        return first, first + self.ahead * self.further[0] * self.chunk_bytes

    @property
    def shared(self) -> int:
        """Count the bytes of shared memory."""
        return self.own_at[1] + (self.ahead + self.lead) * self.further[1] * self.chunk_bytes


@dataclasses.dataclass(frozen=True)
class GroupTile(Shares):
    """Sizes of a tile whose products are those of warpgroups, each with 64 outputs.

    In shared memory lie x, [buffer][64 channels][pixel], dy likewise, further maps of dy and of x, as the threads
    bring them, and the coefficients of the tile's channels.
    """

    plan: GroupPlan
    further: tuple[int, int]  # maps of dy's and of x's operand beside the first
    vectors: tuple[int, int]  # of coefficients

    row_bytes: ClassVar[int] = wgmma.ROW_BYTES

    @property
    def ahead(self) -> int:
        """Count the steps whose copies are on their way at a time."""
        return min(self.plan.ahead, self.share)

    @property
    def buffers(self) -> tuple[int, int]:
        """Count the steps of dy and of x: one is read while `ahead` are filled, and products may still read x of the
        one before."""
        return self.ahead + 1, self.ahead + 2

    @property
    def chunk_bytes(self) -> int:
        """Count the bytes of 64 channels of a step's pixels."""
        return self.plan.pixels * self.row_bytes

    @property
    def columns(self) -> tuple[int, int]:
        """Count the 64 channels of dy and of x."""
        width = self.row_bytes // 2
        return self.plan.outputs // width, self.plan.inputs // width

    @property
    def bytes(self) -> tuple[int, int]:
        """Count the bytes of a step of one map of dy, and of x."""
        outputs, inputs = self.columns
        return outputs * self.chunk_bytes, inputs * self.chunk_bytes

    @property
    def at(self) -> tuple[int, int]:
        """Give the byte offsets of dy and of x."""
        return self.buffers[1] * self.bytes[1], 0

    @property
    def own_at(self) -> tuple[int, int]:
        """Give the byte offsets of dy's and of x's further maps: [step][map][pass][thread]."""
        first = self.at[0] + self.buffers[0] * self.bytes[0]
        return first, first + self.ahead * self.further[0] * self.bytes[0]

    @property
    def coefficients_at(self) -> tuple[int, int]:
        """Give the byte offsets of the coefficients of dy and of x: [vector][channel]."""
        first = self.own_at[1] + self.ahead * self.further[1] * self.bytes[1]
        return first, first + self.vectors[0] * self.plan.outputs * 4

    @property
    def shared(self) -> int:
        """Count the bytes of shared memory."""
        return self.coefficients_at[1] + self.vectors[1] * self.plan.inputs * 4


@dataclasses.dataclass(frozen=True)
class StripTile(Shares):
    """Sizes of a tile of output rows. In shared memory lie `buffers` of dy's, the lines of x under each, and the places
    that threads have for dy's further maps."""

    plan: StripPlan
    further: int  # maps of dy's operand beside the first

    @property
    def ahead(self) -> int:
        """Count the output rows whose copies are on their way at a time."""
        return min(self.plan.ahead, self.share)

    @property
    def buffers(self) -> int:
        """Count the output rows in shared memory: one is read while `ahead` are filled."""
        return self.ahead + 1

    @property
    def rows(self) -> int:
        """Count the pixels of an output row in shared memory, filled up to whole products."""
        return -(-self.plan.pixels // 16) * 16

    @property
    def gradient_row(self) -> int:
        """Count the bytes of a pixel of dy."""
        return self.plan.outputs * 2

    @property
    def gradient_bytes(self) -> int:
        """Count the bytes of an output row of dy."""
        return self.rows * self.gradient_row

    @property
    def lines(self) -> Lines:
        """Lay out the lines of x under an output row."""
        return Lines(self.correlation, self.rows, self.correlation.flat_row)

    @property
    def lines_at(self) -> int:
        """Give the byte offset of the lines of x: [output row][line]."""
        return self.buffers * self.gradient_bytes

    @property
    def lines_bytes(self) -> int:
        """Count the bytes of the lines of all output rows."""
        return self.buffers * self.lines.bytes

    @property
    def own_at(self) -> int:
        """Give the byte offset of the places that threads have for themselves: [row][further map][pass][thread]."""
        return self.lines_at + self.lines_bytes

    @property
    def own_bytes(self) -> int:
        """Count the bytes of those for one map and output row."""
        at_once = self.plan.threads // chunks_of(self.gradient_row)
        return -(-self.rows // at_once) * self.plan.threads * d.VECTOR_BYTES

    @property
    def shared(self) -> int:
        """Count the bytes of shared memory."""
        return self.own_at + self.ahead * self.further * self.own_bytes

    @property
    def shares(self) -> int:
        """Count the shares: those of blocks, in `ways` each."""
        return super().shares * self.plan.ways

    @property
    def grid(self) -> tuple[int, int, int]:
        """Give the grid in blocks: of neighbours, tiles of outputs differ first."""
        return self.blocks * super().shares, 1, 1


Plan = WeightPlan | SlidePlan | GroupPlan | StripPlan
Sized = WeightTile | SlideTile | GroupTile | StripTile


def weight_tile_of(c: Correlation, plan: Plan, precision: str, gradient: Operand, source: Operand) -> Sized:
    """Size the tile of a plan. Vectors are copied asynchronously where both operands allow (operand.py)."""
    further, vectors = brought_beside(gradient, source)
    if isinstance(plan, SlidePlan):
        return SlideTile(c, plan, precision, further, vectors)
    if isinstance(plan, GroupPlan):
        return GroupTile(c, plan, precision, further, vectors)
    if isinstance(plan, StripPlan):
        return StripTile(c, plan, precision, further[0])
    ring = plan.read != "flat" and can_ring(gradient, precision) and can_ring(source, precision)
    return WeightTile(c, plan, precision, ring, further)


def brought_beside(gradient: Operand, source: Operand) -> tuple[tuple[int, int], tuple[int, int]]:
    """Count what comes beside the first map of dy's and of x's operand: further maps, and vectors of coefficients."""
    further = len(gradient.streamed) - 1, len(source.streamed) - 1
    return further, (len(gradient.vectors), len(source.vectors))
