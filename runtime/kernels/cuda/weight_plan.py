"""How tiles of weight gradients are cut up: a rule by shape, and the choices near it that are worth measuring."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan
from bnfuse.runtime.kernels.cuda import wgmma
from bnfuse.runtime.kernels.cuda.both_sizes import BothPlan, BothTile, both_tile_of
from bnfuse.runtime.kernels.cuda.conv_plan import REGISTERS, Read, is_wasteful, read_of, with_fallback
from bnfuse.runtime.kernels.cuda.correlation import Correlation
from bnfuse.runtime.kernels.cuda.device import blocks_beside, shared_limit
from bnfuse.runtime.kernels.cuda.lines import suit
from bnfuse.runtime.kernels.cuda.operand import Operand, can_ring, element_size
from bnfuse.runtime.kernels.cuda.weight_sizes import (
    GroupPlan,
    GroupTile,
    Plan,
    Shares,
    SlidePlan,
    SlideTile,
    StripPlan,
    StripTile,
    WeightPlan,
    WeightTile,
    weight_tile_of,
)
from bnfuse.runtime.kernels.kernel import Problem
from bnfuse.runtime.targets.target import CudaTarget

# The lists of sizes below are the rule: what comes first is taken. Their order, MANY, LARGE, FEW_PIXELS, SMALL_SIDE and
# MANY_TIMES were set by measurement (benchmarks/gpu_kernels.py times all choices of a problem); the rest was chosen by
# hand.
MANY = 100_000  # pixels: from there on a weight gradient's shares are better smaller
LARGE, FEW_PIXELS = 100_000, 4096  # elements of a weight; pixels that are few for a pointwise one of so many
SMALL_SIDE, MANY_TIMES = 128, 4  # outputs; inputs over outputs
PARTIAL_BYTES = 48 << 20  # of a weight gradient's shares, at most
SHARE = 1  # steps that a share takes while it begins and ends
FEW = 3  # shares are considered even where fewer make enough blocks
MOST_SLID = 3  # rows and columns of a window that slides: its sums fill the registers
FEW_CHANNELS = 32  # of either side: products of warpgroups have 64
GRADIENT_COST = 2  # of a channel of dy, which is made of two maps, where one of x is 1
MOST_OF_BOTH, BOTH_THREADS = 256, 512  # outputs of a tile of both gradients; its threads that have registers enough
MOSTLY_ZEROS = range(129, 193)  # outputs: more than 128, which leave a quarter or more of 256 empty
MOST_TOTALS, MOST_MAPS = 3, 4  # of the epilogue of such a tile
MOST_ROWS, MOST_SUMS = 8, 80  # of a window whose rows are warps; of a thread's sums there


def weight_plans(c: Correlation, problem: Problem, target: CudaTarget) -> Iterator[Plan]:
    """Yield plans of the weight gradient's tile, that of the rule first; all fit the multiprocessor."""
    operands = Operand(problem, True), Operand(problem, False)
    sliding = list(_slide_plans(c, target, operands))
    fits = min(c.outputs, c.inputs) > SlidePlan.outputs // 2  # else most of its products are of zeros
    if fits:
        yield from sliding
    yield from _strip_plans(c, target, operands)
    grouped, by_warps = _group_plans(c, target, operands), _warp_plans(c, target, operands)
    yield from itertools.chain(*((grouped, by_warps) if _suits_groups(c) else (by_warps, grouped)))
    if not fits:
        yield from sliding


def both_plans(c: Correlation, problem: Problem, target: CudaTarget) -> Iterator[BothPlan]:
    """Yield the plans of tiles of both gradients, that of the rule first: 1x1 windows of few outputs, which a block has
    all of, and epilogues whose sums and maps registers have room for beside dweight's (D124)."""
    epilogue = EpiloguePlan(problem)
    if len(epilogue.totals) > MOST_TOTALS or len(epilogue.maps) > MOST_MAPS:
        return
    operands = Operand(problem, True), Operand(problem, False)
    copies = all(can_ring(operand, target.precision) for operand in operands)
    fits = min(c.outputs, c.inputs) > FEW_CHANNELS and c.outputs <= MOST_OF_BOTH and c.outputs not in MOSTLY_ZEROS
    is_one = c.is_pointwise and c.groups == 1 and c.merged == 1
    if not (problem.spec.core == "ConvGrad" and target.has_wgmma and copies and fits and is_one):
        return
    down = 1 if c.outputs <= wgmma.ROWS else 2
    deep = -(-c.outputs // (wgmma.ROWS * down))
    widths = [128, 64] if down == 2 else [64, 128]
    if deep > 1 or c.inputs <= 64:
        widths = [64]
    for inputs, ahead in itertools.product(widths, (1, 2)):
        groups = down, inputs // (BothTile.own_inputs * down)
        plan = BothPlan(groups, inputs, wgmma.ROWS, 1, ahead, 1, deep)
        tile = both_tile_of(c, plan, target.precision, *operands)
        blocks = min(blocks_beside(target.architecture, tile.shared), BOTH_THREADS // plan.threads)
        if not blocks:
            continue
        places = target.multiprocessors * blocks
        splits = even_splits(tile, places, max(-(-places // tile.blocks), FEW))
        yield dataclasses.replace(plan, min_blocks=blocks, splits=splits)


def _suits_groups(c: Correlation) -> bool:
    """Tell whether products of warpgroups are the faster ones of a tap: of several taps, or where dy, as the smaller
    side, has to be brought for many inputs, which their tiles have more of. Else several blocks beside each other, of
    warps, wait less: of merged groups as well, which are one tile of 64 by 64. Measured by a layer of each kind (D117,
    D120)."""
    return (c.taps > 1 and c.merged == 1) or (c.outputs > SMALL_SIDE and c.inputs >= MANY_TIMES * c.outputs)


def _slide_plans(c: Correlation, target: CudaTarget, operands: tuple[Operand, Operand]) -> Iterator[SlidePlan]:
    """Yield the plans of a tile that slides over the pixels, with products of warpgroups: small windows of stride 1."""
    windows = c.vertical.window, c.horizontal.window
    copies = all(can_ring(operand, target.precision) for operand in operands)
    if not (target.has_wgmma and copies and c.is_same and c.taps > 1 and max(windows) <= MOST_SLID):
        return
    for ahead in (3, 2):
        one = SlideTile(c, SlidePlan(windows[0], 1, ahead), target.precision, (0, 0), (0, 0))
        splits = even_splits(one, target.multiprocessors, target.multiprocessors)
        plan = dataclasses.replace(one.plan, splits=splits)
        if weight_tile_of(c, plan, target.precision, *operands).shared <= shared_limit(target.architecture):
            yield plan


def _group_plans(c: Correlation, target: CudaTarget, operands: tuple[Operand, Operand]) -> Iterator[GroupPlan]:
    """Yield the plans of tiles of a tap with products of warpgroups: 1x1 windows, and those that move by strides."""
    copies = all(can_ring(operand, target.precision) for operand in operands)
    many = min(c.outputs, c.inputs) > FEW_CHANNELS and read_of(c, forward=True) == "gather"
    if not (target.has_wgmma and copies and many):
        return
    down = 1 if c.outputs <= wgmma.ROWS else 2
    sizes_of_x = (256, 192, 128, 64) if down == 2 else (256, 128, 64)
    widths = [n for n in sizes_of_x if n == 64 or n - 64 < c.inputs]

    def cost(width: int) -> int:
        return -(-c.inputs // width) * (width + GRADIENT_COST * down * wgmma.ROWS)

    wide = min(widths, key=cost)
    sizes = [(wide, 64, 2), (wide, 32, 3), (min(wide, 128), 32, 3), (min(wide, 128), 64, 2)]
    seen: set[GroupPlan] = set()
    for inputs, pixels, ahead in sizes:
        groups = down, 2 if down == 1 and inputs > 64 else 1
        plan = GroupPlan(groups, inputs, pixels, 1, ahead, 1)
        tile = weight_tile_of(c, plan, target.precision, *operands)
        assert isinstance(tile, GroupTile)
        # a thread's sums, and what else it holds
        held = plan.threads * (inputs // groups[1] // 2 + 64)
        blocks = min(blocks_beside(target.architecture, tile.shared), REGISTERS // held, 2)
        if not blocks:
            continue
        places = target.multiprocessors * blocks
        splits = even_splits(tile, places, max(-(-places // tile.blocks), FEW))
        plan = dataclasses.replace(plan, min_blocks=blocks, splits=splits)
        if plan not in seen:
            seen.add(plan)
            yield plan


def _strip_plans(c: Correlation, target: CudaTarget, operands: tuple[Operand, Operand]) -> Iterator[StripPlan]:
    """Yield the plans of tiles of output rows: of an image, or what else has few channels, lies densely and as products
    of 16 bits take it."""
    gradient, source = operands
    flat = read_of(c, forward=True) == "flat" and c.vertical.window <= MOST_ROWS
    if not (flat and suit(c, source, target) and can_ring(gradient, target.precision)):
        return
    outputs, inputs = 64 if c.outputs > 32 else 32, c.vertical.window * c.flat_row
    if outputs // 16 * (c.flat_row // 8) * 4 > MOST_SUMS:
        return
    ways = max(1, 8 // c.vertical.window)
    for ahead, blocks in ((2, 2), (1, 2)):
        plan = StripPlan(outputs, inputs, c.horizontal.destination, c.vertical.window, ways, 1, ahead, blocks)
        one = StripTile(c, plan, target.precision, 0)
        most = min(one.steps, target.multiprocessors * blocks // one.blocks, PARTIAL_BYTES // (one.elements * 4 * ways))
        plan = dataclasses.replace(plan, splits=max(1, most))
        tile = weight_tile_of(c, plan, target.precision, *operands)
        if blocks_beside(target.architecture, tile.shared) >= blocks:
            yield plan


def even_splits(tile: Shares, places: int, most: int) -> int:
    """Cut the pixels into as many shares, `most` or less, as let the last block end first, where there are `places` for
    blocks at a time: fewest where several do."""
    counts = range(1, min(most, most_splits(tile)) + 1)
    return min(counts, key=lambda n: -(-tile.blocks * n // places) * (-(-tile.steps // n) + SHARE))


def most_splits(tile: Shares) -> int:
    """Count the shares that there are pixels for, and room (PARTIAL_BYTES)."""
    return max(1, min(tile.steps, PARTIAL_BYTES // (tile.elements * 4)))


def _warp_plans(c: Correlation, target: CudaTarget, operands: tuple[Operand, Operand]) -> Iterator[WeightPlan]:
    """Yield the plans of tiles with products of warps."""
    seen: set[WeightPlan] = set()
    for read in with_fallback(read_of(c, forward=True)):
        if seen:
            return
        for plan in _weight_plans(c, target, read):
            tile = weight_tile_of(c, plan, target.precision, *operands)
            if isinstance(tile, WeightTile) and not tile.ring:
                plan = dataclasses.replace(plan, ahead=1)
            if plan not in seen and tile.shared <= shared_limit(target.architecture):
                seen.add(plan)
                yield plan


def _weight_plans(c: Correlation, target: CudaTarget, read: Read) -> Iterator[WeightPlan]:
    narrow = element_size(target.precision) == 2
    pixels = 64 if narrow else 32
    outputs = next((n for n in (32, 64) if c.outputs <= n), 128)
    sizes: list[tuple[int, ...]]
    first_waves = 2
    if read == "halo":
        out = min(outputs, 64)
        first_waves = 4 if c.rows > MANY else 2
        sizes = [(32, 32, 2 * pixels, 1, 1, 2), (32, 32, 2 * pixels, 1, 2, 2), (out, 64, 2 * pixels, 1, 1, 4)]
        if out == 64:
            sizes += [(64, 32, 2 * pixels, 1, 2, 2), (64, 32, pixels, 1, 2, 2), (64, 64, pixels, 1, 2, 4)]
    elif read == "flat":
        first_waves = 4
        sizes = [(64, 64, pixels // 2, 1, 2, 2), (64, 64, pixels, 1, 2, 2), (64, 32, pixels, 1, 2, 2)]
    else:
        inputs = next((n for n in (32, 64) if c.inputs <= n), 128)
        half, low, down = min(inputs, 64), min(outputs, 64), max(outputs // 64, 1)
        sizes = [(outputs, half, pixels, 1, down, 2), (low, half, pixels, 1, low // 32, 2)]
        sizes += [(outputs, inputs, pixels // 2, 2, down, 2), (outputs, inputs, pixels, 1, down, 2)]
        sizes += [(outputs, half, pixels // 2, 2, down, 2)]
        few, large = c.taps == 1 and c.rows <= FEW_PIXELS, c.inputs * c.outputs * c.taps >= LARGE
        if large and not few:  # large tiles read both maps less often
            sizes.insert(0, sizes[3])
        elif is_wasteful(c.outputs, outputs) or (few and not large):
            sizes.insert(0, sizes[1])
    for out, inner, chunk, ahead, rows, columns in sizes:
        plan = WeightPlan(out, inner, chunk, (rows, columns), read, 1, ahead=ahead)
        accumulators = out * inner * (c.taps if read == "halo" else 1) // plan.threads
        blocks = max(1, min(4, REGISTERS // (plan.threads * (accumulators + 80))))
        tile = WeightTile(c, plan, target.precision, False, (0, 0))
        places = target.multiprocessors * blocks
        most = max(-(-max(first_waves * target.multiprocessors, places) // tile.blocks), FEW)
        splits = even_splits(tile, places, most)
        for count in (splits, min(2 * splits, most_splits(tile))):
            yield dataclasses.replace(plan, min_blocks=blocks, splits=count)
