"""The sizes of a weight gradient's tile (weight_tile.py): how it is cut up, and what follows from that."""

from __future__ import annotations

import dataclasses
from typing import Literal

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.correlation import Correlation
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
class WeightTile:
    """Sizes that follow from the (forward) correlation, the plan and the precision."""

    correlation: Correlation
    plan: WeightPlan
    precision: str
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
    def tap_blocks(self) -> int:
        """Count the blocks that share a tile's taps: one for each tap where x is gathered."""
        return self.correlation.taps if self.plan.read == "gather" else 1

    @property
    def depth(self) -> int:
        """Count the columns of the weight gradient that tiles of `inputs` cut up."""
        c = self.correlation
        return c.vertical.window * c.flat_row if self.plan.read == "flat" else c.inputs

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
    def grid(self) -> tuple[int, int, int]:
        """Give the grid in blocks: of neighbours, tiles of inputs differ first, then taps, outputs, groups, shares."""
        outputs, inputs = self.tiles
        return outputs * inputs * self.tap_blocks * self.correlation.groups * self.shares, 1, 1

    @property
    def row(self) -> int:
        """Count the elements of a share's row, that of an output channel: [tap][input], or flat."""
        return self.depth if self.plan.read == "flat" else self.correlation.taps * self.depth

    @property
    def is_result(self) -> bool:
        """Tell whether the one share there is lies as the weight gradient does: of one tap, all pixels in a block."""
        return self.shares == 1 and self.plan.read != "flat" and self.correlation.taps == 1

    @property
    def elements(self) -> int:
        """Count the elements of a share."""
        return self.correlation.groups * self.correlation.outputs * self.row


def weight_tile_of(c: Correlation, plan: WeightPlan, precision: str, gradient: Operand, source: Operand) -> WeightTile:
    """Size the tile of a plan. Vectors are copied asynchronously where both operands allow (operand.py)."""
    ring = plan.read != "flat" and can_ring(gradient, precision) and can_ring(source, precision)
    return WeightTile(c, plan, precision, ring, (len(gradient.streamed) - 1, len(source.streamed) - 1))
