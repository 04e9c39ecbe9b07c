"""How tiles of convolutions are cut up: a rule by shape, and the choices near it that are worth measuring."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.cuda.conv_sizes import COLUMNS, LinePlan, LineTile, TilePlan, tile_of
from bnfuse.runtime.kernels.cuda.correlation import Correlation
from bnfuse.runtime.kernels.cuda.device import WARP, blocks_beside, shared_limit
from bnfuse.runtime.kernels.cuda.lines import suit
from bnfuse.runtime.kernels.cuda.merging import VECTOR
from bnfuse.runtime.kernels.cuda.operand import Operand, can_ring, element_size
from bnfuse.runtime.kernels.cuda.wgmma import ROW_BYTES
from bnfuse.runtime.targets.target import CudaTarget

Read = Literal["gather", "halo", "flat"]

# The lists of sizes below are the rule: what comes first is taken. They were chosen by hand.
MOST_TAPS = 32  # of a halo tile: a bit each
WARPS = {(256, 64): (8, 1), (256, 32): (8, 1), (128, 128): (4, 2), (128, 64): (4, 2), (128, 32): (4, 1)}
WARPS |= {(64, 128): (2, 4), (64, 64): (2, 2), (64, 32): (2, 2)}
WASTE = 1.15  # channels of large tiles over those of small ones, where the latter are faster
FILLED = 0.7  # of the multiprocessors, with a tile each, are enough
HALF = 0.5  # of them, where a tile is one of several warpgroups
REGISTERS = 1 << 16  # of a multiprocessor
# tiles on products of warpgroups: pixels, outputs, warps, blocks side by side
GROUP_SIZES = (
    *((128, 256, 8, 1), (256, 128, 8, 1), (128, 128, 8, 2), (128, 128, 4, 2), (128, 128, 8, 1)),
    *((256, 64, 8, 2), (256, 64, 8, 1), (128, 64, 8, 2), (128, 64, 4, 3)),
)
NARROW = 32  # channels: fewer leave most of such a product idle
DEEPEST = 4  # steps ahead, at most, and
START = 4096  # elements that a tile could make while it begins and ends: both chosen by hand
GROUP_REGISTERS = 60  # beside the accumulators: an estimate
PATCHES = (8, 16, 32, 64)  # columns
# tiles of lines: warps; output rows of a step; words of weights that a thread has, at most
LINE_WARPS, LINE_ROWS, MOST_WEIGHTS = 4, (1, 2, 3, 4), 112
LINE_REGISTERS, OF_CLASS, OF_STATISTICS, OF_VECTOR = 48, 8, 24, 8  # beside those words: estimates


def read_of(c: Correlation, *, forward: bool) -> Read:
    """Choose how the source is read."""
    if forward and c.taps > 1 and 1 < c.inputs < VECTOR:
        return "flat"
    return "halo" if c.taps > 1 and c.taps <= MOST_TAPS and c.is_same else "gather"


def with_fallback(read: Read) -> tuple[Read, ...]:
    """List the ways to read that are tried, in order.

    The halo of a wide map may not fit into shared memory: gathering, which reads the same weights, always does.
    """
    return ("halo", "gather") if read == "halo" else (read,)


def tile_plans(c: Correlation, operand: Operand, target: CudaTarget, *, forward: bool) -> Iterator[TilePlan]:
    """Yield plans of the forward and the input gradient's tile, that of the rule first; all fit the multiprocessor.

    Forward, and where a source serves several taps, products of warpgroups are faster; else what comes from memory is
    waited for. Their tiles are large: where these are too few, or are gathered for merged groups, smaller ones are
    better (D116, D120).
    """
    reads = with_fallback(read_of(c, forward=forward))
    by_groups = group_plans(c, operand, target, reads)
    by_warps = warp_plans(c, operand, target, reads, forward=forward)
    fills = forward and c.merged == 1 and bool(by_groups) and _fills(c, by_groups[0], target)
    first = bool(by_groups) and (by_groups[0].halo or fills)
    yield from itertools.chain(*((by_groups, by_warps) if first else (by_warps, by_groups)))


def forward_plans(c: Correlation, operand: Operand, target: CudaTarget) -> Iterator[TilePlan | LinePlan]:
    """Yield plans of the forward tile, that of the rule first: lines where they suit the map."""
    yield from line_plans(c, operand, target)
    yield from tile_plans(c, operand, target, forward=True)


def line_plans(c: Correlation, operand: Operand, target: CudaTarget) -> Iterator[LinePlan]:
    """Yield plans of tiles of lines, those first that leave the fewest warps of a step without pixels.

    As many blocks as there is room for at a time share the steps. Tuning tries a block less, and smaller shares.
    """
    if not (read_of(c, forward=True) == "flat" and suit(c, operand, target)):
        return
    across = min(2, -(-c.outputs // COLUMNS))
    ways = LINE_WARPS // across
    epilogue = EpiloguePlan(operand.problem)
    registers = LINE_REGISTERS + OF_STATISTICS * ("Statistics" in operand.problem.spec.epilogue)
    registers += OF_VECTOR * len(epilogue.vectors)
    found: dict[LineTile, float] = {}
    for rows in LINE_ROWS:
        tile = LineTile(c, LinePlan(across * COLUMNS, ways, rows, 1, 1), target.precision)
        neighbours = rows == 1 or (c.vertical.step == 1 and c.vertical.destination % rows == 0)
        fits = tile.weight_words <= MOST_WEIGHTS and tile.shared <= shared_limit(target.architecture)
        if neighbours and fits:
            found[tile] = -(-rows * tile.units // ways) * ways / rows
    plans: dict[LinePlan, None] = {}
    for tile in sorted(found, key=lambda tile: found[tile]):
        room = REGISTERS // (tile.plan.threads * (tile.weight_words + registers + OF_CLASS * tile.classes))
        blocks = max(1, min(room, blocks_beside(target.architecture, tile.shared)))
        for count, waves in ((blocks, 1), (blocks, 2), (max(1, blocks - 1), 1)):
            most = max(1, count * waves * target.multiprocessors // tile.output_tiles)
            plans[dataclasses.replace(tile.plan, splits=min(tile.steps, most), min_blocks=count)] = None
    yield from plans


def warp_plans(
    c: Correlation, operand: Operand, target: CudaTarget, reads: Sequence[Read], *, forward: bool
) -> Iterator[TilePlan]:
    """Yield plans of tiles on products of warps."""
    seen: set[TilePlan] = set()
    for read in reads:
        if seen:
            return
        for plan in _tile_plans(c, target, forward, read):
            tile = tile_of(c, plan, target.precision, operand)
            if not tile.ring or tile.steps == 1:
                plan = dataclasses.replace(plan, ahead=1)
            if plan not in seen and tile.shared <= shared_limit(target.architecture):
                seen.add(plan)
                yield plan


def group_plans(c: Correlation, operand: Operand, target: CudaTarget, reads: Sequence[Read]) -> list[TilePlan]:
    """List plans of tiles on products of warpgroups, the one that fills the multiprocessors best first."""
    if not (target.has_wgmma and min(c.inputs, c.outputs) > NARROW and can_ring(operand, target.precision)):
        return []
    found: dict[TilePlan, float] = {}
    for read in reads:
        if found or read == "flat":
            break
        for pixels, outputs, warps, blocks in GROUP_SIZES:
            columns = patch_columns(c, pixels) if read == "halo" else 0
            wanted = TilePlan(pixels, outputs, ROW_BYTES, (warps, 1), read, blocks, grouped=True, columns=columns)
            plan = _group_plan(c, operand, target, wanted) if outputs < 2 * c.outputs else None
            if plan is not None:
                waves = -(-_tiles(c, pixels, outputs) // target.multiprocessors)
                found[plan] = waves * (pixels * outputs + START)
    return sorted(found, key=lambda plan: found[plan])


def _group_plan(c: Correlation, operand: Operand, target: CudaTarget, plan: TilePlan) -> TilePlan | None:
    """Let as many steps be on their way as there is room for; None where the plan's blocks do not fit."""
    accumulators = plan.pixels * plan.outputs // plan.threads
    if plan.min_blocks * plan.threads * (accumulators + GROUP_REGISTERS) > REGISTERS:
        return None
    for ahead in range(min(DEEPEST, c.taps - 1 if plan.halo else DEEPEST), 0, -1):
        tile = tile_of(c, dataclasses.replace(plan, ahead=ahead), target.precision, operand)
        # a step more ahead is better than a block more, but where the whole source comes at once
        enough = tile.ahead == ahead and (ahead >= min(plan.min_blocks, tile.steps) or tile.source_buffers == 1)
        if enough and tile.shared <= shared_limit(target.architecture) // plan.min_blocks:
            return tile.plan
    return None


def patch_columns(c: Correlation, pixels: int) -> int:
    """Choose the columns of a halo tile that is a patch of an image; 0 where a run of pixels has the smaller halo, as
    where no patch of so many pixels divides the image."""
    v, h = c.vertical, c.horizontal
    rows = {0: pixels + 2 * c.halo}
    for columns in PATCHES:
        lines = pixels // columns
        if not (h.source % columns or v.source % lines):
            rows[columns] = (lines + 2 * v.reach) * (columns + 2 * h.reach)
    return min(rows, key=lambda columns: rows[columns])


def _tile_plans(c: Correlation, target: CudaTarget, forward: bool, read: Read) -> Iterator[TilePlan]:
    depth = c.inputs * element_size(target.precision)
    wide = 128 if depth > 64 else 64
    outputs = next((n for n in (32, 64) if c.outputs <= n), 128)
    sizes: list[tuple[int, ...]]
    if read == "halo":
        outputs = min(outputs, 64)
        sizes = [(256, outputs, 64, 1, 8, 1), (128, outputs, 64, 1), (64, outputs, 64, 1), (64, 32, 64, 1)]
        sizes += [(256, outputs, 64, 1, 4, 1), (128, outputs, 64, 1, 2, 1), (128, 32, 64, 1)]
    elif read == "flat":
        sizes = [(128, outputs, 64, 1), (64, outputs, 64, 1)]
    else:
        # an epilogue that reads maps wants more warps, one that only stores larger fragments
        warps = (2, 2) if forward else (4, 2)
        large = [(128, outputs, wide, 1, *warps)] if outputs == 128 else [(128, outputs, wide, 1, 2, outputs // 32)]
        if is_wasteful(c.outputs, outputs):
            large.insert(0, (128, 64, 64, 2, 2, 2))
        sizes = [*large, (64, 64, wide, 2), (64, 32, wide, 2), (128, 128, 64, 3, 2, 2), (128, 128, wide, 1, 2, 2)]
        sizes += [(128, 64, wide, 1, 2, 2), (128, 64, 64, 2, 2, 2), (64, 128, wide, 1, 2, 2), (64, 64, 64, 3)]
    sizes = [size for size in sizes if size[1] < 2 * max(c.outputs, 32)]
    # the rule takes the first that has tiles for most of the multiprocessors, else the one that has the most
    enough = [size for size in sizes if _tiles(c, size[0], size[1]) >= FILLED * target.multiprocessors]
    first = (enough or sorted(sizes, key=lambda size: -_tiles(c, size[0], size[1])))[0]
    for pixels, width, row, ahead, *given in (first, *sizes):
        yield _plan(c, pixels, width, row, read, ahead, (given[0], given[1]) if given else WARPS[pixels, width])


def _fills(c: Correlation, plan: TilePlan, target: CudaTarget) -> bool:
    return _tiles(c, plan.pixels, plan.outputs) >= HALF * target.multiprocessors


def is_wasteful(channels: int, tile: int) -> bool:
    """Tell whether tiles of so many channels hold far more than there are, and tiles of half as many do not."""
    return -(-channels // tile) * tile > WASTE * (-(-channels // (tile // 2)) * (tile // 2))


def _tiles(c: Correlation, pixels: int, outputs: int) -> int:
    return -(-c.rows // pixels) * -(-c.outputs // outputs) * c.groups * c.phases


def _plan(
    c: Correlation, pixels: int, outputs: int, row_bytes: int, read: Read, ahead: int, warps: tuple[int, int]
) -> TilePlan:
    """Let as many blocks lie beside each other as registers allow: a thread's accumulators, and some 60 more."""
    threads = warps[0] * warps[1] * WARP
    accumulators = pixels * outputs // threads
    # 60, and 80 where two operands have prologues: estimates, chosen by hand
    blocks = max(1, min(4, REGISTERS // (threads * (accumulators + 60))))
    columns = patch_columns(c, pixels) if read == "halo" else 0
    return TilePlan(pixels, outputs, row_bytes, warps, read, blocks, ahead, columns=columns)
