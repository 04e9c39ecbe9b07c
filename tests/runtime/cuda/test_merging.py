"""Groups of a convolution that are multiplied as one: which, and that all tiles compute what the reference says."""

from __future__ import annotations

import dataclasses
import math

import pytest
from cuda_conv import STORED, TOLERANCES, CudaCase, assert_close, run_case
from cuda_kernels import assert_no_spills, gpu

from bnfuse.runtime.kernels.cuda import conv_backward, conv_forward
from bnfuse.runtime.kernels.cuda.conv_sizes import TilePlan
from bnfuse.runtime.kernels.cuda.correlation import forward_correlation
from bnfuse.runtime.kernels.cuda.merging import merged_groups
from bnfuse.runtime.kernels.cuda.weight_sizes import GroupPlan, SlidePlan, WeightPlan

FORWARD = "NormalizeReluConvStatistics"
BACKWARD = "BatchNormGradNormalizeReluConvGradReluGradReduceAccumulate"
WEIGHT = "BatchNormGradNormalizeReluConvGradWeight"
SAME = {"kernel": (3, 3), "pads": (1, 1, 1, 1)}


def check(case: CudaCase, precision: str, plan: object = None, arch: str = "sm_90") -> None:
    case = dataclasses.replace(case, dtype=STORED[precision])
    make = conv_backward.conv_backward if "Grad" in case.op else conv_forward.conv_forward
    generator = lambda problem, target: make(problem, target, "tile", plan)  # noqa: E731
    found, expected, _ = run_case(case, generator, gpu(precision, arch))
    assert_close(found, expected, case.dtype_of, TOLERANCES[precision])


def merged(case: CudaCase, precision: str = "bf16", arch: str = "sm_90") -> int:
    return merged_groups(case.shape("weight"), case.group, gpu(precision, arch))


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups", "expected"),
    [  # on products of warpgroups of 16 bits, of warps of 16 bits, of warps of 32 bits
        (4, 4, 32, (16, 8, 8)),
        (8, 8, 32, (8, 4, 4)),
        (16, 16, 32, (4, 2, 2)),
        (32, 32, 32, (1, 1, 1)),  # each fills a tile of warps
        (64, 64, 32, (1, 1, 1)),
        (24, 24, 14, (2, 1, 1)),
        (24, 24, 37, (1, 1, 1)),  # no number of them divides 37
        (8, 8, 13, (13, 1, 1)),
        (4, 4, 13, (13, 13, 13)),
        (32, 64, 2, (1, 1, 1)),
        (2, 2, 3, (1, 1, 1)),  # six channels: taps and channels are one axis
        (3, 5, 1, (1, 1, 1)),
        (1, 4, 64, (1, 1, 1)),  # depthwise
    ],
)
def test_the_groups_that_are_one(inputs, outputs, groups, expected):
    weight = groups * outputs, inputs, 3, 3
    targets = gpu("bf16", "sm_90"), gpu("bf16", "sm_80"), gpu("fp32", "sm_90")
    assert tuple(merged_groups(weight, groups, target) for target in targets) == expected


CASES = {  # channels of a group; groups that are one
    "4": (CudaCase("", 2, 6, 5, 4 * 9, 4 * 9, group=9, slots=8, **SAME), 9),
    "6": (CudaCase("", 2, 6, 5, 6 * 5, 6 * 5, group=5, slots=6, **SAME), 5),
    "8": (CudaCase("", 1, 7, 6, 8 * 10, 8 * 10, group=10, slots=8, **SAME), 5),  # ragged: 40 of 64
    "16": (CudaCase("", 1, 6, 7, 16 * 8, 16 * 8, group=8, **SAME), 4),
    "24": (CudaCase("", 2, 5, 6, 24 * 4, 24 * 4, group=4, slots=8, **SAME), 2),
    "32": (CudaCase("", 1, 6, 6, 32 * 4, 32 * 4, group=4, **SAME), 1),
    "odd": (CudaCase("", 2, 5, 5, 7 * 6, 9 * 6, group=6, slots=2, **SAME), 6),
    "12-to-20": (CudaCase("", 2, 5, 5, 12 * 4, 20 * 4, group=4, slots=8, **SAME), 4),
    "pointwise": (CudaCase("", 2, 7, 5, 4 * 32, 4 * 32, group=32), 16),
    "pointwise-of-12-to-20": (CudaCase("", 2, 7, 5, 12 * 8, 20 * 8, group=8, slots=2), 4),
}


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
@pytest.mark.parametrize(("case", "count"), CASES.values(), ids=list(CASES))
def test_results_are_those_of_the_reference(case, count, op, stride):
    case = dataclasses.replace(case, op=op, strides=(stride, stride))
    assert merged(case) == count
    check(case, "bf16")


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp32"])
def test_other_precisions(op, precision):
    for case in (CASES["4"][0], CASES["pointwise"][0]):
        case = dataclasses.replace(case, op=op)
        assert merged(case, precision) > 1
        check(case, precision)


@pytest.mark.parametrize(
    ("name", "stride", "kinds"),
    [
        ("8", 1, (SlidePlan, WeightPlan)),
        ("16", 2, (GroupPlan, WeightPlan)),
        ("odd", 1, (SlidePlan, WeightPlan)),
        ("pointwise", 1, (GroupPlan, WeightPlan)),
    ],
)
def test_weight_gradients_of_all_tiles(name, stride, kinds):
    """Of one share, which of pointwise ones is the result, and of several."""
    case = dataclasses.replace(CASES[name][0], n=8, op=WEIGHT, strides=(stride, stride), dtype="bfloat16")
    offered = [choice.plan[1] for choice in conv_backward.choices(case.problem(), gpu("bf16"))]
    for kind in kinds:
        plan = next(plan for plan in offered if isinstance(plan, kind))
        for splits in (1, 2):
            planned = None, dataclasses.replace(plan, splits=splits)
            kernel = conv_backward.conv_backward(case.problem(), gpu("bf16"), "tile", planned)
            shares = [param.elements for param in kernel.params if param.name == "weight_partials"]
            assert shares == [splits * math.prod(case.shape("weight"))] or (splits == 1 and not shares)
            check(case, "bf16", planned)


def test_shares_have_no_zeros():
    case = dataclasses.replace(CASES["4"][0], op=WEIGHT, dtype="bfloat16")
    kernel = conv_backward.conv_backward(case.problem(), gpu("bf16"))
    (held,) = (param.elements for param in kernel.params if param.name == "weight_partials")
    assert forward_correlation(case.problem(), gpu("bf16")).inputs == 36
    assert held == 36 * 4 * 9  # of one share


LAYERS = {  # of ResNeXt-50 32x4d and RegNetY-1.6GF: channels, groups, size, stride
    "resnext-128-56": (128, 32, 56, 1),
    "resnext-256-56": (256, 32, 56, 2),
    "resnext-256-28": (256, 32, 28, 1),
    "resnext-512-28": (512, 32, 28, 2),
    "resnext-512-14": (512, 32, 14, 1),
    "regnet-48-112": (48, 2, 112, 2),
    "regnet-48-56": (48, 2, 56, 1),
    "regnet-336-28": (336, 14, 28, 2),
    "regnet-336-14": (336, 14, 14, 1),
}


def layer(name: str, op: str) -> CudaCase:
    channels, groups, size, stride = LAYERS[name]
    sizes = 64, size, size, channels, channels
    return CudaCase(op, *sizes, strides=(stride, stride), group=groups, dtype="bfloat16", **SAME)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_networks_are_tiles_of_64_channels(name):
    """Those that move by strides by warps: measured (D120)."""
    target, by_groups = gpu("bf16", "sm_90", 132), LAYERS[name][3] == 1
    forward = conv_forward.choices(layer(name, FORWARD).problem(), target)[0].plan
    towards_input, of_weight = conv_backward.choices(layer(name, BACKWARD).problem(), target)[0].plan
    for plan in (forward, towards_input):
        assert isinstance(plan, TilePlan)
        assert (plan.outputs, plan.grouped, plan.read) == (64, by_groups, "halo" if by_groups else "gather")
    assert isinstance(of_weight, SlidePlan if by_groups else WeightPlan) and of_weight.inputs == 64


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("resnext-128-56", FORWARD),
        ("resnext-128-56", BACKWARD),
        ("resnext-512-28", WEIGHT),
        ("regnet-336-14", BACKWARD),  # two groups: of each pair of sums an output has one
    ],
)
def test_all_values_are_in_registers(name, op):
    make = conv_forward.conv_forward if op == FORWARD else conv_backward.conv_backward
    assert_no_spills(make(layer(name, op).problem(), gpu("bf16", "sm_90", 132)))
