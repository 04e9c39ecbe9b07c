"""How the work of a depthwise convolution is cut up for a GPU: windows that slide down a strip of columns.

Plain integers; `depthwise_window.py` has the registers, `depthwise_forward.py` and `depthwise_backward.py` the stages.

Forward, a *unit* is an output and its window the inputs under it. Backward, a unit is the `stride` inputs from
unit*stride on, and its window the outputs that they reach, whatever tap (cpu/conv_backward_shape.py, Axis). A thread
takes E channels of a strip of units side by side and slides their windows down a tile of rows, so that it reads each
row of the source once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from bnfuse.runtime.kernels.common.geometry import Axis
from bnfuse.runtime.kernels.kernel import MapType
from bnfuse.runtime.targets.target import CudaTarget

REGISTERS = 65536  # of a multiprocessor
# Chosen by hand, like the numbers in the rules below: estimates that no script has fitted to measurements.
MOST_REGISTERS = 220  # of a thread, as estimated: 255 are real
MOST_THREADS = 192
WIDEST_STRIP = 8
LOAD = 5  # instructions of an access to memory
LATENCY = 700  # cycles of a read from memory
ISSUE = 2.8  # instructions of a multiprocessor in a cycle, as reached
WARP_ISSUE = 0.2  # instructions of a warp in a cycle
BYTES = 14.0  # that a multiprocessor moves from and to memory in a cycle


@dataclasses.dataclass(frozen=True)
class Line:
    """One axis: the window of unit u is source[first + u*step : first + u*step + extent]."""

    units: int
    source: int
    first: int
    extent: int
    step: int

    @property
    def fresh(self) -> int:
        """Count the sources that the window of the next unit reads and that of this one does not."""
        return min(self.step, self.extent)

    @property
    def lead(self) -> int:
        """Count the slides before the first window is whole."""
        return -(-self.extent // self.step) - 1

    def width(self, units: int) -> int:
        """Count the sources under neighbouring units."""
        return (units - 1) * self.step + self.extent


def forward_line(axis: Axis) -> Line:
    """Cut up an axis of a forward convolution: units are outputs, sources inputs."""
    return Line(axis.out, axis.size, -axis.pad, (axis.kernel - 1) * axis.dilation + 1, axis.stride)


def backward_line(axis: Axis) -> Line:
    """Cut up an axis of a gradient: units are runs of `stride` inputs, sources outputs."""
    return Line(axis.units, axis.out, axis.low, axis.high - axis.low + 1, 1)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a thread does and keeps, for the choice of a plan.

    `stored` are the float32 a channel that stay in registers throughout (coefficients, sums), `raw` the words of a
    channel that are loaded ahead for one source, `unit` the registers of a unit and channel (accumulators, maps of
    the epilogue), `per_source` and `per_unit` the instructions for a source and for a unit, a channel at a time,
    `bytes_per_source` and `bytes_per_unit` what they move from and to memory.
    """

    images: int
    rows: Line
    columns: Line
    channels: int
    taps: int
    stored: int
    raw: float
    unit: float
    per_source: int
    per_unit: int
    bytes_per_source: float
    bytes_per_unit: float
    base: int = 32  # registers for addresses and all else


@dataclasses.dataclass(frozen=True)
class Plan:
    """`lanes` channels of a thread, `strip` units of columns, `rows` units of a tile; a block takes `vectors` of
    channels of `items` tiles at a time; `blocks` share the tiles, `resident` of them to a multiprocessor. `shared`:
    weights are in shared memory."""

    lanes: int
    strip: int
    rows: int
    vectors: int
    items: int
    blocks: int
    resident: int
    shared: bool

    @property
    def threads(self) -> int:
        """Count the threads of a block."""
        return self.vectors * self.items

    def strips(self, work: Work) -> int:
        """Count the strips of an image, from left to right."""
        return -(-work.columns.units // self.strip)

    def tiles(self, work: Work) -> int:
        """Count the tiles of a strip, from top to bottom."""
        return -(-work.rows.units // self.rows)

    def total(self, work: Work) -> int:
        """Count the tiles of all images."""
        return work.images * self.tiles(work) * self.strips(work)

    def rounds(self, work: Work) -> int:
        """Count the tiles that a thread takes one after the other."""
        return -(-self.total(work) // (self.items * self.blocks))

    def chunks(self, work: Work) -> int:
        """Count the blocks side by side for all channels."""
        return -(-work.channels // (self.vectors * self.lanes))


def registers_of(work: Work, lanes: int, strip: int, shared: bool) -> int:
    """Estimate the registers of a thread."""
    width = work.columns.width(strip)
    window = work.rows.extent * width + work.rows.fresh * width * work.raw
    weights = 0 if shared else work.taps
    ahead = 16 if shared else 0  # weights on their way from shared memory
    return work.base + ahead + math.ceil(lanes * (window + weights + work.stored + strip * work.unit))


def instructions(work: Work, lanes: int, strip: int, shared: bool) -> float:
    """Estimate the instructions of a thread and a slide."""
    rows, width = work.rows, work.columns.width(strip)
    sources = rows.fresh * width * (LOAD + lanes * work.per_source)
    moves = (rows.extent - rows.fresh) * width * lanes
    units = strip * (LOAD + lanes * work.per_unit)
    return 20 + sources + moves + units + (work.taps if shared else 0)


def choose_plan(work: Work, target: CudaTarget, size: int) -> Plan | None:
    """Choose the plan that takes the fewest cycles by the estimates; None where nothing fits the registers.

    Channels are of `size` bytes. A thread has at least 4 bytes of them where that fits.
    """
    for lanes in ((4 // size, 8 // size), (1,)):
        found = min(_plans(work, target, lanes, 32 // size), key=lambda found: found[0], default=None)
        if found is not None:
            return found[1]
    return None


def choose_single(work: Work, target: CudaTarget, size: int) -> Plan | None:
    """Choose the plan for threads of one channel; else as `choose_plan`."""
    found = min(_plans(work, target, (1,), 32 // size), key=lambda found: found[0], default=None)
    return found[1] if found else None


def _plans(work: Work, target: CudaTarget, lanes: tuple[int, ...], sector: int) -> Iterator[tuple[float, Plan]]:
    for count in lanes:
        vectors, items = _block(-(-work.channels // count), max(1, sector // count))
        for strip in range(1, min(WIDEST_STRIP, work.columns.units) + 1):
            for shared in (False, True):
                needed = registers_of(work, count, strip, shared)
                if needed > MOST_REGISTERS:
                    continue
                # the compiler counts a block's warps in pairs when it bounds registers
                resident = max(1, REGISTERS // (-(-needed // 8) * 8 * -(-vectors * items // 64) * 64))
                for rows in _heights(work.rows.units):
                    plan = Plan(count, strip, rows, vectors, items, 1, min(resident, 8), shared)
                    yield _cost(work, target, plan)


def _heights(units: int) -> list[int]:
    return sorted({-(-units // parts) for parts in range(1, units + 1)})


def _cost(work: Work, target: CudaTarget, plan: Plan) -> tuple[float, Plan]:
    slots = max(1, target.multiprocessors * plan.resident // plan.chunks(work))
    blocks = min(slots, -(-plan.total(work) // plan.items))
    rounds = -(-plan.total(work) // (blocks * plan.items))
    blocks = -(-plan.total(work) // (rounds * plan.items))  # no block idles in the last round
    plan = dataclasses.replace(plan, blocks=blocks)
    warps = -(-plan.threads // 32) * -(-blocks * plan.chunks(work) // target.multiprocessors)
    issue = instructions(work, plan.lanes, plan.strip, plan.shared) * warps / min(ISSUE, WARP_ISSUE * warps)
    sources = work.rows.fresh * work.columns.step * plan.strip
    moved = sources * work.bytes_per_source + plan.strip * work.bytes_per_unit
    memory = moved * plan.lanes * 32 * warps / BYTES
    slowest = max(LATENCY, issue, memory)
    slide = slowest + 0.2 * (LATENCY + issue + memory - slowest)
    return rounds * (plan.rows + work.rows.lead + 1) * slide, plan


def _block(vectors: int, sector: int) -> tuple[int, int]:
    """Choose a block's vectors of channels and tiles: whole warps, whole sectors of memory, few idle threads."""

    def waste(choice: tuple[int, int]) -> tuple[float, int]:
        count, items = choice
        threads = count * items
        idle = -(-vectors // count) * count / vectors * (-(-threads // 32) * 32 / threads)
        cut = 1.1 if count % sector and count < vectors else 1.0
        return idle * cut * (1 + 2 / count) * (1 + 8 / threads), -threads

    counts = range(1, min(vectors, 96) + 1)
    return min(((c, i) for c in counts for i in range(1, MOST_THREADS // c + 1)), key=waste)


def gathering_plan(work: Work, target: CudaTarget) -> Plan:
    """Plan threads of one channel and one unit at a time, which keep nothing from one to the next."""
    vectors, items = _block(work.channels, 16)
    plan = Plan(1, 1, -(-work.rows.units // min(4, work.rows.units)), vectors, items, 1, 1, False)
    blocks = min(-(-plan.total(work) // items), max(1, 8 * target.multiprocessors // plan.chunks(work)))
    return dataclasses.replace(plan, blocks=blocks)


def words_per_channel(kind: MapType) -> float:
    """Count the words that a channel takes as stored: half a word in 16-bit types."""
    return 0.5 if kind.dtype in ("bfloat16", "float16") else 1.0
