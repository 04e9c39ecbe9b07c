"""Gradients of convolutions on tensor cores, in the interpreter, against the reference in float64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from cuda_conv import STORED, TOLERANCES, CudaCase, assert_close, run_case
from cuda_kernels import gpu
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.runtime.kernels.cuda.conv_backward import choices, conv_backward
from bnfuse.runtime.kernels.cuda.weight_sizes import GroupPlan, SlidePlan, StripPlan
from bnfuse.runtime.kernels.kernel import Choice

FULL = "BatchNormGradNormalizeReluConvGradReluGradReduceAccumulate"
CLIP = "NormalizeClipConvGradBiasGradAddGradientClipGradReduceScale"
ADDED = "BatchNormGradReluGradNormalizeAddNormalizedConvGradBiasGradReduceOther"
SKIPPED = "NormalizeReluSkipHardSwishSkipGateAddNormalizedConvGradAddGradientReduce"
ACTIVATED = "BatchNormGradNormalizeGateClipConvGradAddGradientClipGradReduceOther"
SUMS = (
    "ReluGradBatchNormGradNormalizeReluConvGradAddGradientAddBatchNormGradReluGradAddSkipGradientReduceReduceReluGrad"
)
READ = "AddGradReluGradBatchNormGradConvGradReduceAddedReluGradReduceReluGrad"
GATED = "GateGradBatchNormGradNormalizeReluGateConvGradAddGatedGradientReduceGated"
POOLED = "GateGradAddGradReluGradBatchNormGradNormalizeReluConvGradReluGradReduce"
OTHERS = "ConvGradInputAddGradientReluGradReduceReduceOtherReduceOther"


def check(case: CudaCase, precision: str, choice: Choice | None = None, arch: str = "sm_90") -> None:
    case = dataclasses.replace(case, dtype=STORED[precision])
    plan = choice and choice.plan
    operands = case.operands()
    if "a" in operands:
        operands["a"][0] = 0  # a BN's gamma
    generator = lambda problem, target: conv_backward(problem, target, "tile", plan)  # noqa: E731
    found, expected, _ = run_case(case, generator, gpu(precision, arch), operands)
    assert_close(found, expected, case.dtype_of, TOLERANCES[precision])


CASES = {
    "pointwise": CudaCase(FULL, 2, 7, 7, 40, 24, slots=3),
    "pointwise-of-many-chunks": CudaCase(FULL, 2, 9, 9, 40, 150),
    "pointwise-strided": CudaCase(FULL, 2, 8, 7, 33, 17, (1, 1), (2, 2)),
    "pointwise-padded": CudaCase("ConvGradInputAccumulate", 2, 5, 5, 16, 16, (1, 1), (1, 1), (1, 1, 1, 1)),
    "halo": CudaCase(FULL, 2, 8, 8, 64, 32, (3, 3), pads=(1, 1, 1, 1), slots=8),
    "halo-of-odd-slots": CudaCase(FULL, 3, 9, 7, 37, 33, (3, 3), pads=(1, 1, 1, 1), slots=5),
    "patches": CudaCase(FULL, 1, 16, 64, 24, 20, (3, 3), pads=(1, 1, 1, 1), slots=8),
    "halo-dilated": CudaCase(
        "NormalizeQuickGeluConvGradQuickGeluGrad", 1, 8, 8, 18, 16, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)
    ),
    "halo-of-some-channels": CudaCase(
        "BatchNormGradNormalizeWhereReluConvGradAddGradientWhereReluGradReduce",
        2,
        7,
        7,
        18,
        20,
        (3, 3),
        pads=(1, 1, 1, 1),
    ),
    "pointwise-of-some-channels": CudaCase("NormalizeWhereReluConvGradWhereReluGradReduce", 2, 7, 7, 40, 24, slots=3),
    "halo-input-alone": CudaCase(OTHERS, 2, 7, 6, 36, 34, (3, 3), (1, 1), (1, 1, 1, 1)),
    "strided": CudaCase(FULL, 2, 9, 11, 20, 35, (3, 3), (2, 2), (1, 1, 1, 1), slots=2),
    "asymmetric": CudaCase(CLIP, 2, 6, 8, 9, 11, (3, 2), (2, 1), (0, 1, 2, 0)),
    "phases-without-taps": CudaCase("ConvGrad", 1, 6, 10, 70, 34, (2, 3), (1, 3), (3, 0, 1, 4), (2, 3)),
    "few-channels": CudaCase("ConvGrad", 1, 5, 9, 3, 5, (3, 3), pads=(1, 1, 1, 1)),
    "stem": CudaCase("BatchNormGradConvGradWeight", 1, 13, 11, 3, 24, (7, 7), (2, 2), (3, 3, 3, 3)),
    "stem-with-bias": CudaCase("ConvGradWeightBiasGrad", 2, 23, 24, 3, 20, (11, 11), (4, 4), (2, 2, 2, 2)),
    "bias-behind-a-norm": CudaCase("BatchNormGradConvGradBiasGrad", 1, 19, 18, 3, 7, (11, 11), (4, 4), (2, 2, 2, 2)),
    "gated-and-pooled": CudaCase(POOLED, 3, 7, 7, 40, 24, slots=3),
    "halo-gated-and-pooled": CudaCase(POOLED, 3, 9, 7, 37, 33, (3, 3), pads=(1, 1, 1, 1), slots=5),
    "gated": CudaCase(GATED, 3, 7, 7, 40, 24, slots=3),
    "halo-gated": CudaCase(GATED, 3, 9, 7, 37, 33, (3, 3), pads=(1, 1, 1, 1), slots=5),
    "few-channels-gated": CudaCase(GATED, 2, 5, 9, 3, 5, (3, 3), pads=(1, 1, 1, 1)),
    "parts": CudaCase(
        "BatchNormGradNormalizeReluConvGradAddGradientReluGradReducePartReduceOther",
        2,
        7,
        7,
        18,
        20,
        (3, 3),
        pads=(1,) * 4,
    ),
    "pointwise-parts": CudaCase("BatchNormGradConvGradReduceReluGradPartReduceQuickGeluGrad", 2, 7, 7, 40, 24, slots=3),
    "activated-behind-a-gate": CudaCase(ACTIVATED, 3, 7, 7, 40, 24, slots=3),
    "groups-of-8": CudaCase(
        "NormalizeReluConvGradReluGradReduce", 2, 6, 6, 24, 36, (3, 3), (1, 1), (1, 1, 1, 1), group=3
    ),
    "groups-of-few": CudaCase(FULL, 2, 6, 6, 32, 16, (3, 3), (1, 1), (1, 1, 1, 1), group=8),
    "groups-pointwise": CudaCase(FULL, 2, 6, 6, 32, 32, group=8, slots=8),
    "groups-alone-and-flat": CudaCase(FULL, 2, 6, 6, 6, 9, (3, 3), pads=(1, 1, 1, 1), group=3),
    "groups-weight-alone": CudaCase("ConvGradWeight", 2, 7, 5, 32, 16, (3, 3), (1, 2), (3, 3, 3, 3), (2, 1), group=8),
    "one-pixel": CudaCase(FULL, 3, 1, 1, 17, 21),
    "sums": CudaCase(SUMS, 2, 7, 7, 40, 24, slots=3),
    "halo-sums": CudaCase(SUMS, 2, 8, 8, 33, 32, (3, 3), pads=(1, 1, 1, 1)),
    "sums-made-where-they-are-read": CudaCase(READ, 2, 7, 6, 37, 33, (3, 3), pads=(1, 1, 1, 1), slots=5),
    "few-channels-read-so": CudaCase(READ, 2, 5, 9, 3, 5, (3, 3), pads=(1, 1, 1, 1)),
    "a-sum": CudaCase(ADDED, 3, 7, 7, 40, 24, slots=8),
    "a-sum-of-odd-slots": CudaCase(ADDED, 2, 7, 5, 37, 24, slots=3),
    "halo-a-sum": CudaCase(SKIPPED, 2, 8, 7, 33, 32, (3, 3), pads=(1, 1, 1, 1), slots=5),
    "few-channels-of-a-sum": CudaCase(SKIPPED, 2, 5, 9, 3, 5, (3, 3), pads=(1, 1, 1, 1)),
    "an-activation-first": CudaCase("BatchNormGradQuickGeluGradConvGradBiasGradReduceOther", 2, 7, 7, 40, 24),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_gradients_are_those_of_the_reference(case):
    check(case, "bf16")


# one of each way to read, and of each kind of epilogue: what is done to a map depends on its type nowhere else
FLOAT32 = (
    *("pointwise", "pointwise-strided", "halo", "halo-of-odd-slots", "halo-input-alone", "strided", "asymmetric"),
    *("few-channels", "stem", "groups-of-8", "groups-weight-alone", "one-pixel", "sums", "halo-gated-and-pooled"),
)
OTHER_PRECISIONS = ("pointwise", "halo", "asymmetric", "stem", "groups-of-few")


@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, "fp32") for name in FLOAT32] + [(n, precision) for precision in ("fp16", "tf32") for n in OTHER_PRECISIONS],
)
def test_other_precisions(name, precision):
    check(CASES[name], precision)


@pytest.mark.parametrize(
    ("case", "float32"),
    [
        (CudaCase(FULL, 3, 4, 4, 24, 20, (4, 4)), ("dy", "grad_x")),  # up from a pixel
        (CudaCase(FULL, 3, 1, 1, 24, 20), ("x", "dx", "acc", "dy", "grad_x")),
        (CudaCase("BatchNormGradConvGradWeight", 1, 9, 9, 3, 16, (3, 3), (2, 2), (1, 1, 1, 1)), ("x",)),  # of an image
        (CudaCase(OTHERS, 2, 5, 5, 24, 16, (3, 3), pads=(1, 1, 1, 1)), ("other", "x_1")),
    ],
    ids=["from-a-pixel", "of-a-pixel", "image", "others"],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_maps_of_several_types(case, float32, precision):
    check(dataclasses.replace(case, others=tuple((name, "float32") for name in float32)), precision)


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        (CudaCase(FULL, 1, 9, 8, 40, 70, slots=8), "bf16"),
        (CudaCase("BatchNormGradConvGradInputReduce", 1, 7, 6, 24, 36, (3, 3), pads=(1, 1, 1, 1), slots=8), "bf16"),
        (CudaCase("BatchNormGradConvGradWeight", 1, 7, 6, 24, 36, (3, 3), pads=(1, 1, 1, 1), slots=8), "bf16"),
        (CudaCase("ConvGradInputReduce", 1, 7, 6, 34, 40, (3, 3), (2, 2), (1, 1, 1, 1)), "fp32"),
        (CudaCase("NormalizeConvGradWeight", 1, 7, 6, 34, 40, (3, 3), (2, 2), (1, 1, 1, 1)), "fp32"),
        (CudaCase("BatchNormGradConvGradWeight", 1, 13, 14, 3, 70, (7, 7), (2, 2), (3, 3, 3, 3)), "bf16"),
    ],
    ids=["pointwise", "halo-input", "halo-weight", "strided-input", "strided-weight", "flat"],
)
def test_all_choices_compute_the_same(case, precision):
    problem = dataclasses.replace(case, dtype=STORED[precision]).problem()
    offered = choices(problem, gpu(precision))
    assert len({choice.plan for choice in offered}) == len(offered) > 1
    tiles = {}
    for choice in offered:  # how many blocks are to run side by side does not change what they do
        tiles.setdefault(tuple(plan and alone(plan) for plan in choice.plan), choice)
    for choice in tiles.values():
        check(case, precision, choice)


def alone(plan):
    return dataclasses.replace(plan, min_blocks=1) if hasattr(plan, "warps") else plan


WEIGHT = "BatchNormGradNormalizeReluConvGradWeight"
SLIDING = {
    "ragged": CudaCase(WEIGHT, 2, 9, 7, 70, 66, (3, 3), pads=(1,) * 4, slots=8),
    "plain": CudaCase("ConvGradWeight", 7, 14, 14, 64, 64, (3, 3), pads=(1,) * 4),  # more chunks than the ring has
    "wide": CudaCase(WEIGHT, 2, 9, 60, 24, 40, (3, 3), pads=(1,) * 4),
    "dilated": CudaCase(WEIGHT, 3, 9, 9, 40, 40, (3, 3), pads=(2,) * 4, dilations=(2, 2)),
    "a-row": CudaCase(WEIGHT, 2, 12, 9, 40, 48, (1, 3), pads=(0, 1, 0, 1)),
    "a-column": CudaCase("ConvGradWeight", 2, 12, 9, 40, 48, (3, 1), pads=(1, 0, 1, 0)),
    "even": CudaCase(WEIGHT, 3, 9, 9, 40, 40, (2, 3), pads=(1, 1, 0, 1)),
    "gated": CudaCase(
        "GateGradBatchNormGradNormalizeReluGateConvGradWeight", 3, 9, 8, 40, 40, (3, 3), pads=(1,) * 4, slots=8
    ),
    "groups": CudaCase(WEIGHT, 2, 12, 9, 80, 96, (3, 3), pads=(1,) * 4, group=2, slots=8),
}


def sliding(case, precision):
    offered = choices(dataclasses.replace(case, dtype=STORED[precision]).problem(), gpu(precision))
    return next(choice.plan[1] for choice in offered if isinstance(choice.plan[1], SlidePlan))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", SLIDING.values(), ids=list(SLIDING))
def test_tiles_that_slide(case, splits):
    plan = sliding(case, "bf16")
    assert plan.threads == 128 * case.kernel[0]
    check(case, "bf16", Choice("tile", (None, dataclasses.replace(plan, splits=splits))))


def test_a_tile_that_slides_in_fp16():
    check(SLIDING["ragged"], "fp16", Choice("tile", (None, sliding(SLIDING["ragged"], "fp16"))))


GROUPED = {
    "ragged": CudaCase(WEIGHT, 2, 9, 7, 70, 134, slots=8),
    "odd": CudaCase("NormalizeReluConvGradWeight", 1, 6, 7, 34, 38, slots=2),
    "even-shares": CudaCase("ConvGradWeight", 6, 8, 8, 64, 64),  # no pixel needs a mask; more steps than buffers
    "exact-and-wide": CudaCase(WEIGHT, 6, 8, 8, 256, 128),
    "strided": CudaCase(WEIGHT, 3, 9, 11, 40, 66, (1, 1), (2, 2), slots=8),
    "three-columns": CudaCase(WEIGHT, 2, 9, 7, 150, 72),
    "strided-3x3": CudaCase(WEIGHT, 2, 9, 10, 300, 40, (3, 3), (2, 2), (1,) * 4),
    "plain-3x3": CudaCase("ConvGradWeight", 3, 13, 8, 40, 40, (3, 3), (2, 1), (1, 0, 1, 2)),
    "dilated": CudaCase(WEIGHT, 2, 9, 11, 40, 40, (2, 3), (2, 1), (0, 1, 1, 0), (1, 2)),
    "gated": CudaCase("GateGradBatchNormGradNormalizeReluGateConvGradWeight", 3, 9, 8, 40, 40, slots=8),
    "gated-3x3": CudaCase("NormalizeReluGateConvGradWeight", 3, 9, 8, 40, 40, (3, 3), (2, 2), (1,) * 4),
    "groups": CudaCase(WEIGHT, 2, 6, 7, 2 * 42, 2 * 70, (3, 3), (2, 2), (1,) * 4, group=2, slots=8),
    "one-pixel": CudaCase(WEIGHT, 1, 1, 1, 72, 80),
    "several-maps": CudaCase("BatchNormGradReluGradNormalizeAddNormalizedConvGradWeight", 2, 9, 8, 72, 40),
}


def grouped(case, precision):
    """One of each size, in one share."""
    offered = choices(dataclasses.replace(case, dtype=STORED[precision]).problem(), gpu(precision))
    plans = [choice.plan[1] for choice in offered]
    found = [plan for plan in plans if isinstance(plan, GroupPlan)]
    assert found
    return list(dict.fromkeys(dataclasses.replace(plan, splits=1, min_blocks=1) for plan in found))


@pytest.mark.parametrize("case", GROUPED.values(), ids=list(GROUPED))
def test_tiles_of_warpgroups(case):
    for plan, splits in zip(grouped(case, "bf16"), itertools.cycle((2, 1, 3)), strict=False):
        check(case, "bf16", Choice("tile", (None, dataclasses.replace(plan, splits=splits))))


@pytest.mark.parametrize("name", ["ragged", "strided-3x3"])
def test_tiles_of_warpgroups_in_fp16(name):
    check(GROUPED[name], "fp16", Choice("tile", (None, grouped(GROUPED[name], "fp16")[0])))


def test_tiles_of_warpgroups_need_products_of_warpgroups_and_channels_that_fill_them():
    case = GROUPED["ragged"]
    for unfit, arch in ((case, "sm_80"), (dataclasses.replace(case, cin=32), "sm_90")):
        offered = choices(dataclasses.replace(unfit, dtype="bfloat16").problem(), gpu("bf16", arch))
        assert not any(isinstance(choice.plan[1], GroupPlan) for choice in offered)


STRIPS = {
    "7x7": CudaCase("BatchNormGradConvGradWeight", 2, 14, 12, 3, 24, (7, 7), (2, 2), (3, 3, 3, 3)),
    "3x3": CudaCase("ConvGradWeight", 2, 6, 20, 3, 70, (3, 3), pads=(1,) * 4),  # every second run of pixels a warp
    "uneven": CudaCase("BatchNormGradConvGradWeight", 2, 9, 20, 2, 24, (5, 4), (1, 3), (0, 2, 1, 1)),
    "without-pads": CudaCase("ConvGradWeight", 1, 9, 36, 5, 20, (3, 3), (2, 2)),
    "dilated": CudaCase("ConvGradWeight", 1, 9, 10, 6, 20, (3, 2), pads=(2, 0, 2, 0), dilations=(2, 1)),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", STRIPS.values(), ids=list(STRIPS))
def test_tiles_of_output_rows(case, precision):
    problem = dataclasses.replace(case, dtype=STORED[precision]).problem()
    offered = [choice for choice in choices(problem, gpu(precision)) if isinstance(choice.plan[1], StripPlan)]
    assert offered == list(choices(problem, gpu(precision)))[: len(offered)]
    assert len({choice.plan for choice in offered}) == len(offered) == 2
    for choice in offered:
        check(case, precision, choice)


def test_a_map_whose_halo_does_not_fit_is_gathered():
    case = CudaCase(FULL, 1, 1, 1100, 10, 9, (3, 3), pads=(1, 1, 1, 1), dtype="bfloat16")
    offered = choices(case.problem(), gpu("bf16", "sm_86"))
    assert {plan.read for choice in offered for plan in choice.plan} == {"gather"}
    check(case, "bf16", arch="sm_86")


EPILOGUES = (
    "ConvGrad",
    "ConvGradBiasGradReluGradScale",
    "NormalizeReluConvGradAddGradientReluGradReduceReduceOtherAccumulate",
    "BatchNormGradNormalizeClipConvGradClipGradReduce",
    GATED,
)


@st.composite
def cases(draw: st.DrawFn) -> CudaCase:
    """Convolutions of any geometry but depthwise ones."""
    group = draw(st.sampled_from([1, 1, 2, 3]))
    kernel, strides, dilations = (draw(st.tuples(*(st.integers(1, k),) * 2)) for k in (4, 3, 2))
    pads = draw(st.tuples(*(st.integers(0, 3),) * 4))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    h, w = (max(1, reach[i] - pads[i] - pads[i + 2]) + draw(st.integers(0, 8)) for i in (0, 1))
    cin, cout = group * draw(st.integers(2, 20)), group * draw(st.integers(1, 20))
    op, n = draw(st.sampled_from(EPILOGUES)), draw(st.integers(1, 2))
    return CudaCase(op, n, h, w, cin, cout, kernel, strides, pads, dilations, group, draw(st.integers(0, 8)))


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(cases(), st.sampled_from(["bf16", "fp32"]))
def test_gradients_of_any_convolution(case, precision):
    check(case, precision)
