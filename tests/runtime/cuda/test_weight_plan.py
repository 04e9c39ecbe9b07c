"""How a weight gradient's pixels are shared out: as many blocks as there are places for, none that waits alone."""

from __future__ import annotations

import dataclasses

import pytest
from cuda_conv import CudaCase
from cuda_kernels import gpu

from bnfuse.runtime.kernels.cuda.conv_backward import choices
from bnfuse.runtime.kernels.cuda.weight_sizes import GroupPlan

OP = "BatchNormGradNormalizeReluConvGradWeight"
LAYER = CudaCase(OP, 64, 14, 14, 256, 1024, (1, 1), dtype="bfloat16")
STRIDED = CudaCase(OP, 64, 28, 28, 256, 256, (3, 3), (2, 2), (1, 1, 1, 1), dtype="bfloat16")


def plans(case: CudaCase, arch: str = "sm_90"):
    found = [choice.plan[1] for choice in choices(case.problem(), gpu("bf16", arch, 132))]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (LAYER, 16),  # of 8 tiles: 128 blocks for 132 places; 17 shares were 136
        (dataclasses.replace(LAYER, h=7, w=7, cin=512, cout=2048), 4),  # of 32
        (STRIDED, 7),  # of 18
        (dataclasses.replace(STRIDED, cin=512, cout=512), 3),  # of 72: two rounds
    ],
    ids=["8 tiles", "32 tiles", "18 tiles", "72 tiles"],
)
def test_the_last_block_ends_first(case, splits):
    first = next(plan for plan in plans(case) if isinstance(plan, GroupPlan))
    assert (first.outputs, first.inputs, first.min_blocks, first.splits) == (128, 256, 1, splits)


@pytest.mark.parametrize(
    ("cin", "cout", "groups", "inputs"),
    [
        (224, 128, (2, 1), 256),
        (320, 128, (2, 1), 192),  # twice, where 256 twice were 512
        (144, 192, (2, 1), 192),
        (96, 128, (2, 1), 128),
        (64, 256, (2, 1), 64),
        (256, 64, (1, 2), 256),  # both groups have the same outputs
        (64, 64, (1, 1), 64),
    ],
)
def test_dy_is_brought_for_as_many_inputs_as_there_are(cin, cout, groups, inputs):
    offered = plans(dataclasses.replace(LAYER, cin=cin, cout=cout))
    found = [plan for plan in offered if isinstance(plan, GroupPlan)]
    first = found[0]
    assert (first.groups, first.inputs, first.pixels) == (groups, inputs, 64)
    sizes = [(plan.inputs, plan.pixels) for plan in found]
    assert len(set(sizes)) == len(sizes) == (4 if inputs > 128 else 2)


@pytest.mark.parametrize(
    ("case", "grouped"),
    [
        (dataclasses.replace(LAYER, cin=1024, cout=256), True),  # dy, which goes through two maps, is the smaller side
        (LAYER, False),
        (dataclasses.replace(LAYER, cin=928, cout=128), False),
        (STRIDED, True),
    ],
)
def test_where_products_of_warpgroups_come_first(case, grouped):
    first, *_ = plans(case)
    assert isinstance(first, GroupPlan) == grouped


@pytest.mark.parametrize(
    ("case", "splits", "also"),
    [
        (LAYER, 16, 32),  # of 16 tiles: 256 blocks for 264 places; 17 shares were 272
        (STRIDED, 7, 14),  # of 36
        (dataclasses.replace(STRIDED, cin=512, cout=512), 3, 5),  # of 144: two rounds; five shares take PARTIAL_BYTES
    ],
    ids=["16 tiles", "36 tiles", "144 tiles"],
)
def test_with_products_of_warps_too(case, splits, also):
    first, second, *_ = plans(case, "sm_80")
    assert (first.outputs, first.inputs, first.min_blocks, first.splits) == (128, 128, 2, splits)
    assert second.splits == also  # what tuning tries beside it


@pytest.mark.parametrize(
    ("size", "cin", "cout", "tile"),
    [
        (14, 256, 1024, (128, 128, 64)),  # many elements of the weight: what is read often is read by large tiles
        (7, 512, 2048, (128, 64, 64)),  # few pixels: too few shares of those
        (7, 768, 128, (64, 64, 64)),
        (28, 512, 128, (128, 64, 64)),
        (56, 96, 128, (128, 64, 64)),
        (56, 24, 144, (64, 32, 64)),  # tiles of 128 have room for 256
        (56, 144, 24, (32, 64, 64)),
    ],
)
def test_the_size_of_a_tile_of_warps(size, cin, cout, tile):
    first, *_ = plans(dataclasses.replace(LAYER, h=size, w=size, cin=cin, cout=cout), "sm_80")
    assert (first.outputs, first.inputs, first.pixels) == tile


def test_shares_fill_all_places():
    first, *_ = plans(dataclasses.replace(LAYER, h=28, w=28, cin=512, cout=128), "sm_80")
    assert (first.min_blocks, first.splits) == (3, 49)  # 8 tiles: 392 blocks for 396 places
