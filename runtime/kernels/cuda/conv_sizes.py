"""The sizes of a convolution's tile (conv_tile.py): how it is cut up, and what follows from that."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda import wgmma
from bnfuse.runtime.kernels.cuda.correlation import Correlation
from bnfuse.runtime.kernels.cuda.device import Expr
from bnfuse.runtime.kernels.cuda.lines import Lines
from bnfuse.runtime.kernels.cuda.operand import Operand, can_ring, chunks_of, element_size, vector_width
from bnfuse.runtime.kernels.cuda.partials import Team

DEEP = 16  # pixels of a product, and elements of both of its operands' rows
COLUMNS = 32  # output channels of a warp of a tile of lines: a vector of eight for each of the threads of a pixel


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
class LinePlan:
    """`outputs` channels, COLUMNS a warp, by `rows` output rows a step, `ways` warps along these (conv_lines.py).

    `splits` blocks share the steps, and differ by one step at most.
    """

    outputs: int
    ways: int
    rows: int
    splits: int
    min_blocks: int

    read: ClassVar[str] = "lines"

    @property
    def threads(self) -> int:
        """Count the threads of a block."""
        return self.outputs // COLUMNS * self.ways * d.WARP


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
    def pixels_of_partials(self) -> int:
        """Count the pixels of a row of partials; the last may have fewer."""
        return self.plan.pixels

    @property
    def fewer_pixels(self) -> int:
        """Count those of the last rows of partials: 0, it is the last alone, and has the rest."""
        return 0

    @property
    def grid(self) -> tuple[int, int, int]:
        """Give the grid in blocks: of neighbours, tiles of outputs differ first, then groups, pixels, phases."""
        c = self.correlation
        return c.phases * self.pixel_tiles * self.output_tiles * c.groups, 1, 1

    @property
    def packed_row(self) -> int:
        """Count the elements of one tap of a packed weight's row (or of all taps where they are one axis)."""
        return -(-self.depth // 8) * 8


@dataclasses.dataclass(frozen=True)
class LineTeam(Team):
    """Threads as the sums of products are dealt to them: four have a pixel of a warp, of which eight have a row."""

    def vector(self, tid: Expr) -> Expr:
        """Find the vector of channels of a thread."""
        return tid // d.WARP % (self.across // 4) * 4 + tid % 4

    def lane(self, tid: Expr) -> Expr:
        """Find the lane of a thread: which of the `down` that share its vector it is."""
        return tid // d.WARP // (self.across // 4) * 8 + tid % d.WARP // 4


@dataclasses.dataclass(frozen=True)
class LineTile:
    """Sizes of a tile of output rows. In shared memory lie the lines of x under two steps, then the weights."""

    correlation: Correlation
    plan: LinePlan
    precision: str

    buffers: ClassVar[int] = 2

    @property
    def classes(self) -> int:
        """Count the classes of pixels: those whose runs begin at odd elements have others than their neighbours'."""
        return 1 + self.correlation.horizontal.mult * self.correlation.inputs % 2

    @property
    def shifts(self) -> tuple[int, ...]:
        """Count for each class the elements before a pixel's run, so that it begins at an even one."""
        first = self.correlation.horizontal.phases[0].base * self.correlation.inputs
        return tuple((first + kind) % 2 for kind in range(self.classes))

    @property
    def eights(self) -> int:
        """Count the eights of elements that products take for a row of the window."""
        c = self.correlation
        return -(-(c.horizontal.window * c.inputs + max(self.shifts)) // 8)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """List the eights, (class, number), that reach beyond the window."""
        whole = self.correlation.horizontal.window * self.correlation.inputs
        places = ((kind, eight) for kind in range(self.classes) for eight in range(self.eights))
        return [(k, e) for k, e in places if e * 8 < self.shifts[k] or e * 8 + 8 - self.shifts[k] > whole]

    @property
    def depth(self) -> int:
        """Count the eights of the whole window."""
        return self.correlation.vertical.window * self.eights

    @property
    def runs(self) -> int:
        """Count the products, of two eights each, of the whole window."""
        return -(-self.depth // 2)

    @property
    def weight_words(self) -> int:
        """Count the words of the weights of a thread."""
        return self.classes * self.runs * (COLUMNS // 8) * 2

    @property
    def span(self) -> int:
        """Count the pixels that a warp takes at a time, DEEP of each class."""
        return DEEP * self.classes

    @property
    def units(self) -> int:
        """Count those of an output row."""
        return -(-self.correlation.horizontal.destination // self.span)

    @property
    def lines(self) -> Lines:
        """Lay out the lines of x under a step's output rows."""
        return Lines(self.correlation, self.units * self.span, self.eights * 8, self.plan.rows)

    @property
    def apart_words(self) -> int:
        """Count the words from a pixel to the next of its class."""
        return self.lines.apart * self.classes // 2

    @property
    def weight_row(self) -> int:
        """Count the elements of an output's packed weights."""
        return self.correlation.vertical.window * self.correlation.flat_row

    @property
    def weights_at(self) -> int:
        """Give the byte offset of the weights in shared memory."""
        return self.buffers * self.lines.bytes

    @property
    def shared(self) -> int:
        """Count the bytes of shared memory: the operands' or, in their place behind the last step, the statistics'."""
        return max(self.weights_at + self.plan.outputs * self.weight_row * 2, self.team.statistics_bytes)

    @property
    def warps_across(self) -> int:
        """Count the warps along the outputs."""
        return self.plan.outputs // COLUMNS

    @property
    def team(self) -> LineTeam:
        """Lay out the threads over the result."""
        return LineTeam(4 * self.warps_across, 8 * self.plan.ways, COLUMNS // 4)

    @property
    def steps(self) -> int:
        """Count the steps of all blocks that have the same outputs."""
        return self.correlation.images * self.correlation.vertical.destination // self.plan.rows

    @property
    def output_tiles(self) -> int:
        """Count the tiles along the output channels."""
        return -(-self.correlation.outputs // self.plan.outputs)

    @property
    def share(self) -> int:
        """Count the steps of one of the first blocks, the most that a block has."""
        return -(-self.steps // self.plan.splits)

    @property
    def larger(self) -> int:
        """Count those blocks; the others have a step less."""
        return self.steps - (self.share - 1) * self.plan.splits

    @property
    def rows_of_partials(self) -> int:
        """Count the rows of partials, one for each share of the steps."""
        return self.plan.splits

    @property
    def pixels_of_partials(self) -> int:
        """Count the pixels of one of the first rows of partials."""
        return self.share * self.plan.rows * self.correlation.horizontal.destination

    @property
    def fewer_pixels(self) -> int:
        """Count those of the last ones, where they have fewer."""
        uneven = self.larger < self.plan.splits
        return (self.share - 1) * self.plan.rows * self.correlation.horizontal.destination if uneven else 0

    @property
    def grid(self) -> tuple[int, int, int]:
        """Give the grid in blocks: of neighbours, tiles of outputs differ first."""
        return self.rows_of_partials * self.output_tiles, 1, 1


def tile_of(c: Correlation, plan: TilePlan, precision: str, operand: Operand) -> Tile:
    """Size the tile of a plan. Vectors are copied asynchronously where the operand allows (operand.py)."""
    ring = plan.read != "flat" and can_ring(operand, precision)
    return Tile(c, plan, precision, ring, len(operand.streamed) - 1)
