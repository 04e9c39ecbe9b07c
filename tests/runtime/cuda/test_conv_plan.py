"""How tiles of convolutions are cut up: patches where these have the smaller halo and divide the image."""

from __future__ import annotations

import pytest
from cuda_conv import CudaCase
from cuda_kernels import gpu

from bnfuse.runtime.kernels.cuda import conv_backward, conv_forward
from bnfuse.runtime.kernels.cuda.conv_plan import patch_columns
from bnfuse.runtime.kernels.cuda.correlation import forward_correlation

SAME = {"kernel": (3, 3), "pads": (1, 1, 1, 1)}


@pytest.mark.parametrize(
    ("size", "pixels", "columns"),
    [
        ((224, 224), 256, 16),  # 18 by 18 of the source, for 706
        ((224, 224), 128, 8),  # 18 by 10, as 10 by 18
        ((112, 112), 256, 16),
        ((56, 56), 256, 0),  # 16 does not divide it
        ((56, 56), 64, 8),
        ((32, 32), 256, 0),  # a run has 322
        ((32, 32), 128, 8),
        ((12, 64), 256, 0),  # of those that divide it 4 by 64 has 396 rows, a run 386
    ],
)
def test_the_columns_of_a_patch(size, pixels, columns):
    case = CudaCase("ReluConv", 2, *size, 64, 64, **SAME)
    assert patch_columns(forward_correlation(case.problem(), gpu("bf16")), pixels) == columns


def test_a_window_of_one_row_leaves_a_run():
    case = CudaCase("ReluConv", 2, 64, 64, 64, 64, (1, 3), pads=(0, 1, 0, 1))
    assert patch_columns(forward_correlation(case.problem(), gpu("bf16")), 256) == 0


@pytest.mark.parametrize(
    ("size", "cin", "cout", "grouped", "outputs"),
    [
        (14, 512, 128, True, 128),
        (7, 768, 128, False, 64),  # 25 tiles of warpgroups for 132 multiprocessors
        (7, 512, 2048, True, 256),
        (56, 24, 144, False, 64),  # tiles of 128 have room for 256
        (56, 16, 96, False, 128),
    ],
)
def test_the_tile_of_a_pointwise_convolution(size, cin, cout, grouped, outputs):
    case = CudaCase("NormalizeReluConvStatistics", 64, size, size, cin, cout, (1, 1), dtype="bfloat16")
    first = conv_forward.choices(case.problem(), gpu("bf16", "sm_90", 132))[0].plan
    assert (first.grouped, first.outputs) == (grouped, outputs)


@pytest.mark.parametrize(("cin", "outputs"), [(192, 64), (144, 64), (224, 128), (448, 128), (320, 64)])
def test_the_tile_towards_the_input_of_a_pointwise_convolution(cin, outputs):
    case = CudaCase("BatchNormGradConvGradInputReduce", 64, 56, 56, cin, 128, (1, 1), dtype="bfloat16")
    first, _ = conv_backward.choices(case.problem(), gpu("bf16", "sm_90", 132))[0].plan
    assert (first.grouped, first.outputs) == (False, outputs)
