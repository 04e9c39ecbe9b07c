"""What convolutions of well-known networks need in bf16, cut up by the rule: all their values in registers."""

from __future__ import annotations

import pytest
from cuda_conv import CudaCase
from cuda_kernels import ARCHITECTURES, assert_no_spills, gpu

from bnfuse.runtime.kernels.cuda.conv_backward import conv_backward
from bnfuse.runtime.kernels.cuda.conv_forward import conv_forward

FORWARD = "NormalizeReluConvStatistics"
BACKWARD = "BatchNormGradNormalizeReluConvGradReluGradReduceAccumulate"
BATCH, MULTIPROCESSORS = 64, 132

LAYERS = {  # input and output channels, size, window
    "densenet121-1x1": (256, 128, 56, 1),
    "densenet121-3x3": (128, 32, 56, 3),
}


def layer(op: str, name: str, dtype: str) -> CudaCase:
    inputs, outputs, size, window = LAYERS[name]
    return CudaCase(op, BATCH, size, size, inputs, outputs, (window,) * 2, pads=(window // 2,) * 4, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("densenet121-1x1", "sm_80"), ("densenet121-1x1", "sm_90"), ("densenet121-3x3", "sm_90")],
)
def test_forward_convolutions_have_no_spills(name, arch):
    assert_no_spills(conv_forward(layer(FORWARD, name, "bfloat16").problem(), gpu("bf16", arch, MULTIPROCESSORS)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_have_no_spills(name, arch):
    assert_no_spills(conv_backward(layer(BACKWARD, name, "bfloat16").problem(), gpu("bf16", arch, MULTIPROCESSORS)))
