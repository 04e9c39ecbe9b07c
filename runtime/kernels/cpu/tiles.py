"""The shape of a convolution and the rule that chooses the tiles of its forward kernel (conv_forward.py).

A micro tile is what the vector registers hold: some output pixels times `vectors` vectors of output channels. A tile is
what a thread's second-level cache holds: the activated input of `images` x `rows` x all columns of output, for a block
of `channels` input channels. All numbers are Python integers, fixed when the kernel is built.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from bnfuse.runtime.kernels.common.geometry import convolution_of
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.cpus import vector_registers
from bnfuse.runtime.targets.target import CpuTarget

# The cost rule, all chosen by hand; what it comes to is measured by benchmarks/conv_kernels.py
TILE_BYTES = 384 << 10  # the second-level cache has at least 1 MiB on servers
WEIGHT_BYTES = 192 << 10  # of packed weights that one micro tile sweeps
FLAT_PIXELS = 56  # most pixels of a tile of a 1x1 convolution
TILE_ROWS = 32  # most rows of a tile of any other
FLAT_CHANNELS = 640  # a 1x1 convolution of more input channels reduces in blocks
FLAT_BLOCK = 512  # of at most so many
FLOAT_BYTES = 4
PACK_DIRECT = 4  # cycles to pack a vector of a pixel
WEIGHT_RATE = 24  # bytes of weights that a cycle sweeps


@dataclasses.dataclass(frozen=True)
class ConvShape:
    """A convolution: x [n, h, w, cin], y [n, oh, ow, cout], an r x s window, `groups` blocks of channels."""

    n: int
    h: int
    w: int
    cin: int
    oh: int
    ow: int
    cout: int
    r: int
    s: int
    stride_h: int
    stride_w: int
    top: int
    left: int
    dilation_h: int
    dilation_w: int
    groups: int

    @property
    def group_cin(self) -> int:
        """Count the input channels of a group."""
        return self.cin // self.groups

    @property
    def group_cout(self) -> int:
        """Count the output channels of a group."""
        return self.cout // self.groups

    @property
    def is_depthwise(self) -> bool:
        """Tell whether every group has one input channel (and there are several groups)."""
        return self.groups == self.cin and self.groups > 1

    @property
    def flops(self) -> int:
        """Count the floating-point operations of the direct algorithm, two a multiplication."""
        return 2 * self.n * self.oh * self.ow * self.cout * self.group_cin * self.r * self.s

    # The packed tile leaves out the rows and columns that a window of one row or column steps over.

    @property
    def pack_step_h(self) -> int:
        """Count the input rows from one row of the packed tile to the next."""
        return self.stride_h if self.r == 1 else 1

    @property
    def pack_step_w(self) -> int:
        """Count the input columns from one column of the packed tile to the next."""
        return self.stride_w if self.s == 1 else 1

    @property
    def step_h(self) -> int:
        """Count the packed rows from one output row to the next."""
        return 1 if self.r == 1 else self.stride_h

    @property
    def step_w(self) -> int:
        """Count the packed columns from one output column to the next."""
        return 1 if self.s == 1 else self.stride_w

    def packed_rows(self, rows: int) -> int:
        """Count the rows of the packed tile under `rows` rows of output."""
        return (rows - 1) * self.step_h + (self.r - 1) * self.dilation_h + 1

    @property
    def packed_columns(self) -> int:
        """Count the columns of the packed tile, which is under all columns of output."""
        return (self.ow - 1) * self.step_w + (self.s - 1) * self.dilation_w + 1


def conv_shape(problem: Problem) -> ConvShape:
    """Give the shape of a convolution's problem."""
    c = convolution_of(problem)
    v, h = c.rows, c.columns
    cin, cout = c.cin * c.groups, c.cout * c.groups
    return ConvShape(
        c.n, v.size, h.size, cin, v.out, h.out, cout, v.kernel, h.kernel, v.stride, h.stride, v.pad, h.pad,
        v.dilation, h.dilation, c.groups,
    )  # fmt: skip


def flatten(shape: ConvShape, whole_batch: bool = True) -> ConvShape:
    """See a convolution that looks at single pixels as one of a list of them: one image, one column, n*h*w rows.

    Without `whole_batch` images stay apart: n of them, of h*w rows.
    """
    pointwise = (shape.r, shape.s, shape.stride_h, shape.stride_w, shape.top, shape.left) == (1, 1, 1, 1, 0, 0)
    if not pointwise or (shape.oh, shape.ow) != (shape.h, shape.w):
        return shape
    if not whole_batch:
        return dataclasses.replace(shape, h=shape.h * shape.w, w=1, oh=shape.h * shape.w, ow=1)
    pixels = shape.n * shape.h * shape.w
    return dataclasses.replace(shape, n=1, h=pixels, w=1, oh=pixels, ow=1)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of the micro tile (vectors; micro_images x micro_rows x micro_columns pixels) and of the tile."""

    vectors: int
    micro_images: int
    micro_rows: int
    micro_columns: int
    images: int
    rows: int
    channels: int  # input channels of a reduction block; all of them (of all groups) where groups > 1
    row_stride: int  # elements between pixels of the packed tile

    @property
    def micro(self) -> tuple[int, int, int]:
        """Give images, rows and columns of the micro tile."""
        return self.micro_images, self.micro_rows, self.micro_columns


def micro_pixels(vectors: int, target: CpuTarget) -> int:
    """Give the most pixels of a micro tile: accumulators, one row of weights and two registers for pixels must fit."""
    return (vector_registers(target) - vectors - 2) // vectors


def balanced(total: int, most: int) -> int:
    """Give the size, at most `most`, of the pieces when `total` is cut into as few and as even pieces as it goes."""
    return math.ceil(total / math.ceil(total / most))


def choose_vectors(cout: int, target: CpuTarget) -> int:
    """Choose the vectors of output channels in a micro tile: two, where one or three do not waste fewer lanes.

    Two read the fewest operands per multiplication (14 + 2 loads for 28); one and three cost about a tenth more.
    """
    # what a multiplication costs, 1 with two vectors; chosen by hand
    penalty = {1: 1.12, 2: 1.0, 3: 1.08}
    return min(penalty, key=lambda v: math.ceil(cout / (v * target.lanes)) * v * penalty[v])


def micro_tile(shape: ConvShape, most: int) -> tuple[int, int, int]:
    """Choose images, rows and columns of a micro tile of at most `most` pixels: whole rows and images where small."""
    if shape.ow * 2 > most:
        return 1, 1, balanced(shape.ow, most)
    rows = most // shape.ow
    if shape.oh * 2 > rows:
        return 1, balanced(shape.oh, rows), shape.ow
    return balanced(shape.n, rows // shape.oh), shape.oh, shape.ow


def reduction_block(shape: ConvShape, vectors: int, target: CpuTarget) -> int:
    """Choose the input channels of a sweep: their weights for one micro tile and their pixels share the cache."""
    if shape.groups > 1:
        return shape.cin
    if shape.r * shape.s == 1:
        most = FLAT_BLOCK if shape.cin > FLAT_CHANNELS else shape.cin
    else:
        most = WEIGHT_BYTES // (FLOAT_BYTES * shape.r * shape.s * vectors * target.lanes)
    most = max(most // target.lanes, 2) * target.lanes
    if shape.cin <= most:
        return shape.cin
    blocks = math.ceil(shape.cin / most)
    return math.ceil(shape.cin / blocks / target.lanes) * target.lanes


def row_stride(shape: ConvShape, channels: int, target: CpuTarget) -> int:
    """Give one vector more than the channels, in elements.

    Strides of whole pages would fall on a few lines of the first-level cache. Fewer channels than lanes lie side by
    side.
    """
    if channels < target.lanes:
        return channels
    return math.ceil(channels / target.lanes) * target.lanes + target.lanes


def choose_tiles(shape: ConvShape, target: CpuTarget) -> Tiles:
    """Choose the cheapest tiles by the cost rule."""
    return ranked_tiles(shape, target)[0]


def ranked_tiles(shape: ConvShape, target: CpuTarget, vectors: int | None = None) -> list[Tiles]:
    """Rank all tiles that fit the cache for one number of vectors (that of the rule by default), the cheapest first."""
    vectors = vectors or choose_vectors(shape.group_cout, target)
    micro = micro_tile(shape, micro_pixels(vectors, target))
    channels = reduction_block(shape, vectors, target)
    stride = row_stride(shape, channels, target)
    options = [Tiles(vectors, *micro, *block, channels, stride) for block in _blocks(shape, micro)]
    fitting = [t for t in options if tile_bytes(shape, t) <= TILE_BYTES] or options[:1]
    return sorted(fitting, key=lambda t: cost(shape, t, target))


def alternatives(shape: ConvShape, target: CpuTarget) -> list[Tiles]:
    """List tiles that may beat the rule's where it misjudges: the next in its order, and other numbers of vectors."""
    ranked = ranked_tiles(shape, target)
    most = math.ceil(shape.group_cout / target.lanes)
    others = [v for v in (1, 2, 3) if v != ranked[0].vectors and v <= most]
    return ranked[1:3] + [ranked_tiles(shape, target, vectors)[0] for vectors in others]


def _blocks(shape: ConvShape, micro: tuple[int, int, int]) -> Iterator[tuple[int, int]]:
    """List images and rows of possible tiles, the smallest first: rows of one image, then several whole images.

    A tile is a whole number of micro tiles, or all rows (images) there are.
    """
    images, rows, _ = micro
    if images == 1:
        most = FLAT_PIXELS if shape.ow == 1 else TILE_ROWS
        for count in range(rows, min(shape.oh - 1, max(rows, most)) + 1, rows):
            yield 1, count
        if shape.oh > max(rows, most):
            return
    for count in range(images, max(images, min(shape.n, FLAT_PIXELS)) + 1, images):
        yield count, shape.oh


def tile_bytes(shape: ConvShape, tiles: Tiles) -> int:
    """Count the bytes that a tile keeps in cache: its input and half of the sums between blocks of channels.

    The sums are swept once a block, with the weights; the input is swept for every vector of output channels.
    """
    packed = tiles.images * shape.packed_rows(tiles.rows) * shape.packed_columns * tiles.row_stride
    if tiles.channels >= shape.cin:
        return FLOAT_BYTES * packed
    return FLOAT_BYTES * packed + 2 * tiles.images * tiles.rows * shape.ow * shape.cout


def cost(shape: ConvShape, tiles: Tiles, target: CpuTarget) -> float:
    """Estimate the busiest thread's cycles: multiplications, packing, and the sweep over the weights of each tile."""
    count = math.ceil(shape.n / tiles.images) * math.ceil(shape.oh / tiles.rows)
    width = tiles.vectors * target.lanes
    blocks = math.ceil(shape.group_cout / width) * shape.groups
    taps = shape.group_cin * shape.r * shape.s
    multiply = tiles.images * tiles.rows * shape.ow * taps * blocks * tiles.vectors / 2
    pack = tiles.images * shape.packed_rows(tiles.rows) * shape.packed_columns * shape.cin * PACK_DIRECT / target.lanes
    weights = blocks * taps * width * FLOAT_BYTES / WEIGHT_RATE
    return math.ceil(count / target.threads) * (multiply + pack + weights)
