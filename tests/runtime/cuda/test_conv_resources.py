"""What convolutions of well-known networks need, cut up by the rule: all their values in registers."""

from __future__ import annotations

import dataclasses

import pytest
from cuda_conv import CudaCase
from cuda_kernels import ARCHITECTURES, assert_no_spills, gpu

from bnfuse.runtime.kernels.cuda.compile import compile_cuda, compiled_as, cuda_source, resources
from bnfuse.runtime.kernels.cuda.conv_backward import choices, conv_backward
from bnfuse.runtime.kernels.cuda.conv_forward import conv_forward
from bnfuse.runtime.kernels.cuda.weight_sizes import GroupPlan, SlidePlan, StripPlan

FORWARD = "NormalizeReluConvStatistics"
BACKWARD = "BatchNormGradNormalizeReluConvGradReluGradReduceAccumulate"
BATCH, MULTIPROCESSORS = 64, 132

WEIGHT = "BatchNormGradNormalizeReluConvGradWeight"
LAYERS = {  # input and output channels, size, window
    "densenet121-1x1": (256, 128, 56, 1),
    "densenet121-3x3": (128, 32, 56, 3),
}
OTHERS = {"vgg16-3x3": (256, 256, 56, 3), "resnet50-3x3": (64, 64, 56, 3), "stem": (3, 64, 224, 7)}


def layer(op: str, name: str, dtype: str) -> CudaCase:
    inputs, outputs, size, window = (LAYERS | OTHERS)[name]
    return CudaCase(op, BATCH, size, size, inputs, outputs, (window,) * 2, pads=(window // 2,) * 4, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("densenet121-1x1", "sm_80"), ("densenet121-1x1", "sm_90"), ("densenet121-3x3", "sm_90")],
)
def test_forward_convolutions_have_no_spills(name, arch):
    assert_no_spills(conv_forward(layer(FORWARD, name, "bfloat16").problem(), gpu("bf16", arch, MULTIPROCESSORS)))


@pytest.mark.parametrize(
    ("name", "op"),
    [("vgg16-3x3", WEIGHT), ("resnet50-3x3", f"ReluGrad{WEIGHT}"), ("stem", "BatchNormGradConvGradWeight")],
)
def test_weight_gradients_have_no_spills(name, op):
    case = dataclasses.replace(layer(op, name, "bfloat16"), strides=(1 + (name == "stem"),) * 2)
    target = gpu("bf16", "sm_90", MULTIPROCESSORS)
    offered = [choice.plan for choice in choices(case.problem(), target)]
    plan = next(plan for plan in offered if isinstance(plan[1], SlidePlan | StripPlan))
    kernel = conv_backward(case.problem(), target, "tile", plan)
    assert_no_spills(kernel)


@pytest.mark.parametrize(
    "case",
    [
        CudaCase(WEIGHT, BATCH, 14, 14, 1024, 256, dtype="bfloat16"),
        CudaCase(WEIGHT, BATCH, 14, 14, 512, 512, (3, 3), (2, 2), (1,) * 4, dtype="bfloat16"),
        CudaCase(WEIGHT, BATCH, 56, 56, 256, 64, dtype="bfloat16"),
    ],
    ids=["1x1", "3x3", "64-outputs"],
)
def test_weight_gradients_of_warpgroups_have_no_spills(case):
    """Nor does ptxas let a product wait for the one before."""
    target = gpu("bf16", "sm_90", MULTIPROCESSORS)
    offered = [choice.plan for choice in choices(case.problem(), target) if isinstance(choice.plan[1], GroupPlan)]
    assert len(offered) > 1
    for plan in offered:
        made = conv_backward(case.problem(), target, "tile", plan)
        _, log = compile_cuda(cuda_source(made.build()[:1], "sm_90"), compiled_as("sm_90"))
        (found,) = resources(log).values()
        assert (found["spills"], found["stack"]) == (0, 0) and "serialized" not in log


@pytest.mark.parametrize(
    ("name", "arch"),  # 1x1 windows on sm_90 have both gradients in one stage (test_weight_both.py)
    [(name, arch) for name in LAYERS for arch in ARCHITECTURES if (name, arch) != ("densenet121-1x1", "sm_90")],
)
def test_gradients_have_no_spills(name, arch):
    assert_no_spills(conv_backward(layer(BACKWARD, name, "bfloat16").problem(), gpu("bf16", arch, MULTIPROCESSORS)))


def test_gradients_of_float32_have_no_spills():
    """Three products for one, whose sums are added to the accumulators."""
    assert_no_spills(
        conv_backward(layer(BACKWARD, "densenet121-1x1", "float32").problem(), gpu("fp32", "sm_90", MULTIPROCESSORS))
    )
