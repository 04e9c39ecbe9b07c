"""How a weight gradient's pixels are shared out: as many blocks as there are places for, none that waits alone."""

from __future__ import annotations

import dataclasses

import pytest
from cuda_conv import CudaCase
from cuda_kernels import gpu

from bnfuse.runtime.kernels.cuda.conv_backward import choices

OP = "BatchNormGradNormalizeReluConvGradReluGradReduce"
LAYER = CudaCase(OP, 64, 14, 14, 256, 1024, (1, 1), dtype="bfloat16")
STRIDED = CudaCase(OP, 64, 28, 28, 256, 256, (3, 3), (2, 2), (1, 1, 1, 1), dtype="bfloat16")


def plans(case: CudaCase, arch: str = "sm_90"):
    found = [choice.plan[1] for choice in choices(case.problem(), gpu("bf16", arch, 132))]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(
    ("case", "splits", "also"),
    [
        (LAYER, 16, 32),  # of 16 tiles: 256 blocks for 264 places; 17 shares were 272
        (STRIDED, 7, 14),  # of 36
        (dataclasses.replace(STRIDED, cin=512, cout=512), 3, 5),  # of 144: two rounds; five shares take PARTIAL_BYTES
    ],
    ids=["16 tiles", "36 tiles", "144 tiles"],
)
def test_the_last_block_ends_first(case, splits, also):
    first, second, *_ = plans(case)
    assert (first.outputs, first.inputs, first.min_blocks, first.splits) == (128, 128, 2, splits)
    assert second.splits == also  # what tuning tries beside it


@pytest.mark.parametrize(
    ("size", "cin", "cout", "tile"),
    [
        (14, 256, 1024, (128, 128, 64)),  # many elements of the weight: what is read often is read by large tiles
        (7, 512, 2048, (128, 64, 64)),  # few pixels: too few shares of those
        (7, 768, 128, (64, 64, 64)),
        (28, 512, 128, (64, 64, 64)),
        (56, 96, 128, (128, 128, 32)),  # many pixels
        (56, 24, 144, (64, 32, 64)),  # tiles of 128 have room for 256
        (56, 144, 24, (32, 64, 64)),
    ],
)
def test_the_size_of_a_tile_of_warps(size, cin, cout, tile):
    first, *_ = plans(dataclasses.replace(LAYER, h=size, w=size, cin=cin, cout=cout), "sm_80")
    assert (first.outputs, first.inputs, first.pixels) == tile


def test_shares_fill_all_places():
    first, *_ = plans(dataclasses.replace(LAYER, h=28, w=28, cin=512, cout=128), "sm_80")
    assert (first.min_blocks, first.splits) == (4, 33)  # 16 tiles: 528 blocks, all side by side
