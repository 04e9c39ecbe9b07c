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


def plans(case: CudaCase):
    found = [choice.plan[1] for choice in choices(case.problem(), gpu("bf16", "sm_90", 132))]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(
    ("case", "splits", "also"),
    [
        (LAYER, 16, 32),  # of 16 tiles: 256 blocks for 264 places; 17 shares were 272
        (dataclasses.replace(LAYER, h=7, w=7, cin=512, cout=2048), 4, 8),  # of 64
        (STRIDED, 7, 14),  # of 36
        (dataclasses.replace(STRIDED, cin=512, cout=512), 3, 5),  # of 144: two rounds; five shares take PARTIAL_BYTES
    ],
    ids=["16 tiles", "64 tiles", "36 tiles", "144 tiles"],
)
def test_the_last_block_ends_first(case, splits, also):
    first, second, *_ = plans(case)
    assert (first.outputs, first.inputs, first.min_blocks, first.splits) == (128, 128, 2, splits)
    assert second.splits == also  # what tuning tries beside it
