"""How tiles of convolutions are cut up: a rule by shape, and the choices near it that are worth measuring."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from bnfuse.runtime.kernels.cuda.conv_tile import TilePlan, tile_of
from bnfuse.runtime.kernels.cuda.correlation import Correlation
from bnfuse.runtime.kernels.cuda.device import shared_limit
from bnfuse.runtime.kernels.cuda.operand import Operand, element_size
from bnfuse.runtime.kernels.cuda.weight_tile import WeightPlan, WeightTile, weight_tile_of
from bnfuse.runtime.kernels.cuda.weights import VECTOR
from bnfuse.runtime.kernels.kernel import Problem, Target

Read = Literal["gather", "halo", "flat"]

MOST_TAPS = 32  # of a halo tile: a bit each
WARPS = {(256, 64): (8, 1), (256, 32): (8, 1), (128, 128): (4, 2), (128, 64): (4, 2), (128, 32): (4, 1)}
WARPS |= {(64, 128): (2, 4), (64, 64): (2, 2), (64, 32): (2, 2)}
PARTIAL_BYTES = 48 << 20  # of a weight gradient's shares, at most


def read_of(c: Correlation, *, forward: bool) -> Read:
    """How the source is read."""
    if forward and c.taps > 1 and 1 < c.inputs < VECTOR:
        return "flat"
    return "halo" if c.taps > 1 and c.taps <= MOST_TAPS and c.is_same else "gather"


def tile_plans(c: Correlation, operand: Operand, target: Target, *, forward: bool) -> Iterator[TilePlan]:
    """Plans of the forward and the input gradient's tile, that of the rule first; all fit the multiprocessor."""
    seen = set()
    for plan in _tile_plans(c, target, forward):
        tile = tile_of(c, plan, target.precision, operand)
        if not tile.ring or tile.steps == 1:
            plan = dataclasses.replace(plan, ahead=1)
        if plan not in seen and tile.shared <= shared_limit(target.mcpu):
            seen.add(plan)
            yield plan


def _tile_plans(c: Correlation, target: Target, forward: bool) -> Iterator[TilePlan]:
    read = read_of(c, forward=forward)
    depth = c.inputs * (c.taps if read == "flat" else 1) * element_size(target.precision)
    wide = 128 if depth > 64 else 64
    outputs = next((n for n in (32, 64) if c.outputs <= n), 128)
    if read == "halo":
        outputs, wide = min(outputs, 64), 64
    pixels = 128
    # a small map has few tiles: smaller ones, until each multiprocessor has one
    while _tiles(c, pixels, outputs) < target.threads and (pixels, outputs) != (64, 32):
        if outputs > 32 and outputs >= pixels:
            outputs //= 2
        elif pixels > 64:
            pixels //= 2
        else:
            outputs //= 2
    if read == "halo":
        sizes = [(pixels, outputs, 64, 1), (256, outputs, 64, 1), (128, outputs, 64, 1), (64, outputs, 64, 1)]
        sizes += [(*size[:3], 2) for size in sizes]
        sizes += [(128, 32, 64, 1), (64, 32, 64, 1)]
    elif read == "flat":
        sizes = [(pixels, outputs, 64, 1), (64, outputs, 64, 1), (128, outputs, 64, 1)]
    else:
        sizes = [(pixels, outputs, 64, 3), (pixels, outputs, 64, 2), (pixels, outputs, wide, 2)]
        sizes += [(128, 128, 64, 3), (128, 128, 128, 1), (128, 64, 64, 3), (128, 64, 128, 2), (64, 128, 64, 3)]
        sizes += [(64, 128, 128, 2), (64, 64, 64, 3), (64, 64, 128, 2), (64, 64, 128, 3), (64, 32, 128, 2)]
    for size in sizes:
        if size[1] < 2 * max(c.outputs, 32) and size[2] <= wide:
            yield _plan(*size[:3], read, size[3])


def _tiles(c: Correlation, pixels: int, outputs: int) -> int:
    return -(-c.rows // pixels) * -(-c.outputs // outputs) * c.groups * c.phases


def _plan(pixels: int, outputs: int, row_bytes: int, read: Read, ahead: int) -> TilePlan:
    warps = WARPS[pixels, outputs]
    return TilePlan(pixels, outputs, row_bytes, warps, read, 2 if warps[0] * warps[1] == 8 else 3, ahead)


def weight_plans(c: Correlation, problem: Problem, target: Target) -> Iterator[WeightPlan]:
    """Plans of the weight gradient's tile, that of the rule first."""
    seen = set()
    for plan in _weight_plans(c, target):
        tile = weight_tile_of(c, plan, target.precision, Operand(problem, True), Operand(problem, False))
        if not tile.ring:
            plan = dataclasses.replace(plan, ahead=1)
        if plan not in seen and tile.shared <= shared_limit(target.mcpu):
            seen.add(plan)
            yield plan


def _weight_plans(c: Correlation, target: Target) -> Iterator[WeightPlan]:
    read = read_of(c, forward=True)
    narrow = element_size(target.precision) == 2
    pixels = 64 if narrow else 32
    outputs = next((n for n in (32, 64) if c.outputs <= n), 128)
    depth = c.inputs * (c.taps if read == "flat" else 1)
    if read == "halo":
        out = 32 if outputs == 32 else 64
        sizes = [(out, 32, pixels, 1), (out, 32, pixels, 2), (out, 32, 2 * pixels, 1), (out, 32, pixels // 2, 2)]
    elif read == "flat":
        sizes = [(64, 64, pixels // 2, 1), (64, 64, pixels, 1), (64, 32, pixels, 1)]
    else:
        inputs = next((n for n in (32, 64) if depth <= n), 128)
        half = min(inputs, 64)
        sizes = [(outputs, half, pixels, 1), (outputs, half, pixels // 2, 2), (outputs, half, pixels // 2, 3)]
        sizes += [(outputs, inputs, pixels // 2, 2), (outputs, inputs, pixels, 1)]
        sizes += [(min(outputs, 64), half, pixels, 1), (min(outputs, 64), half, pixels, 2)]
    for out, inner, chunk, ahead in sizes:
        for waves in (2, 4):
            warps = _weight_warps(out, inner, read)
            made = WeightPlan(out, inner, chunk, warps, read, 1, ahead=ahead)
            made = with_splits(c, target, made, waves)
            few = out * inner * (c.taps if read == "halo" else 1) < 128 * 128
            yield dataclasses.replace(made, min_blocks=(2 if few else 1) if made.threads == 256 else 2)


def _weight_warps(outputs: int, inputs: int, read: Read) -> tuple[int, int]:
    if read == "halo":
        return {(32, 32): (2, 2), (64, 32): (4, 2)}[outputs, inputs]
    return min(outputs // 32, 4), 2


def with_splits(c: Correlation, target: Target, plan: WeightPlan, waves: int) -> WeightPlan:
    """As many shares of the pixels as make `waves` blocks for each multiprocessor, if there are enough pixels."""
    tile = WeightTile(c, plan, target.precision, False, (0, 0))
    outputs, inputs = tile.tiles
    blocks = outputs * inputs * tile.tap_blocks * c.groups
    most = max(1, PARTIAL_BYTES // (tile.elements * 4))
    splits = max(1, min(-(-waves * target.threads // blocks), tile.steps, most))
    return dataclasses.replace(plan, splits=splits)
