"""Groups of a convolution that are multiplied as one, whose weight has zeros off the blocks of its diagonal.

Tiles have 32 or 64 channels on both sides, and copies 16 bytes. Of groups of a few channels most of a tile is idle, and
each channel is brought for itself. Several groups that fill a tile are as many products as one, and one copy. Packed
weights (weights.py) have the zeros, partials of weight gradients leave them out; tiles see a convolution of fewer
groups. Plans choose between warps and warpgroups otherwise for it (conv_plan.py, weight_plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from bnfuse.runtime.kernels.cuda.wgmma import ROWS
from bnfuse.runtime.targets.target import CudaTarget

VECTOR = 8  # elements of a packed weight that a thread writes at a time; rows are filled up to a multiple of it
OF_WARPS = 32  # channels on both sides of the smallest tile on products of warps
RATE = 2  # products of warpgroups in the time of one of warps, by the tensor cores' own rates


def merged_groups(weight: Sequence[int], group: int, target: CudaTarget) -> int:
    """Choose how many groups of an OIHW weight are one: those that fill tiles with the fewest products, in their time.

    Where several do it is the most, which are copied best. 1 where there is one group, or one input channel in each, or
    where groups fill tiles of warps themselves.
    """
    outputs, inputs = weight[0] // group, weight[1]
    if inputs == 1 or inputs % OF_WARPS == outputs % OF_WARPS == 0:
        return 1
    # a row of taps and channels as one axis (weights.py) has no place for zeros between channels
    counts = [n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * inputs >= VECTOR)]
    return min(counts, key=lambda n: (group // n * _time(n * inputs, n * outputs, target), -n))


def _time(inputs: int, outputs: int, target: CudaTarget) -> int:
    """Give the time of a pixel and tap: its products with tiles filled up, those of warps counted RATE times."""
    by_warps = RATE * _filled(inputs, OF_WARPS) * _filled(outputs, OF_WARPS)
    if not (target.has_wgmma and min(inputs, outputs) > ROWS // 2):
        return by_warps
    return min(by_warps, _filled(inputs, ROWS) * _filled(outputs, ROWS))


def _filled(channels: int, tile: int) -> int:
    return -(-channels // tile) * tile
