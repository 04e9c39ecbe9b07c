"""Convolutions on products of warpgroups: which take them, and that all tiles compute what the reference says."""

from __future__ import annotations

import dataclasses

import pytest
from cuda_conv import CudaCase, assert_close, run_case
from cuda_kernels import assert_no_spills, gpu

from bnfuse.runtime.kernels.cuda import conv_backward, conv_forward
from bnfuse.runtime.kernels.cuda.conv_sizes import TilePlan

FORWARD = "NormalizeReluConvStatistics"
BACKWARD = "BatchNormGradNormalizeReluConvGradInputReluGradReduce"
SAME = {"kernel": (3, 3), "pads": (1, 1, 1, 1)}
TOLERANCE = 5e-5  # of norms, over what rounding the map costs

CASES = {
    "halo": CudaCase(FORWARD, 2, 8, 9, 136, 72, **SAME, slots=8),
    "halo-of-ragged-slots": CudaCase(FORWARD, 2, 9, 7, 70, 50, **SAME, slots=2),
    "halo-of-two-maps": CudaCase("NormalizeAddNormalizedReluConvBias", 2, 9, 10, 130, 66, **SAME),
    "halo-behind-a-gate": CudaCase("NormalizeGateConvStatistics", 3, 9, 8, 72, 72, **SAME, slots=8),
    "halo-plain": CudaCase("Conv", 1, 12, 13, 136, 40, **SAME),
    "halo-of-few-taps": CudaCase("ReluConv", 2, 9, 10, 136, 66, (1, 3), pads=(0, 1, 0, 1)),
    "halo-dilated": CudaCase("ReluConv", 1, 9, 9, 72, 40, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
    "patches": CudaCase(FORWARD, 2, 16, 64, 72, 40, **SAME, slots=8),
    "patches-of-two-maps": CudaCase("NormalizeAddNormalizedReluConvBias", 1, 16, 64, 40, 40, (3, 3), pads=(0, 2, 2, 0)),
    "patches-dilated": CudaCase("ReluConv", 1, 16, 64, 40, 40, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
    "pointwise": CudaCase(FORWARD, 2, 9, 8, 200, 70, slots=8),
    "strided": CudaCase(FORWARD, 2, 18, 17, 72, 130, (3, 3), (2, 2), (1, 1, 1, 1)),
    "groups": CudaCase(FORWARD, 2, 6, 6, 144, 96, **SAME, group=2, slots=8),
    "towards-input": CudaCase(BACKWARD, 2, 8, 9, 72, 136, **SAME, slots=8),
    "patches-of-groups": CudaCase(FORWARD, 1, 16, 64, 80, 80, **SAME, group=2, slots=8),
    "patches-towards-input": CudaCase(BACKWARD, 1, 32, 64, 40, 72, **SAME, slots=8),
    "patches-of-a-chunk-towards-input": CudaCase(BACKWARD, 1, 16, 64, 40, 64, **SAME, slots=8),
    "towards-input-strided": CudaCase(BACKWARD, 2, 17, 16, 72, 72, (3, 3), (2, 2), (1, 1, 1, 1)),
    "towards-input-pointwise": CudaCase(BACKWARD, 2, 9, 8, 40, 150, slots=8),
    "towards-gated-and-pooled-input": CudaCase(
        "GateGradAddGradReluGradBatchNormGradNormalizeReluConvGradInputReluGradReduce", 3, 9, 7, 40, 72, **SAME
    ),
}

ALL_PLANS = (("halo", "bf16"), ("patches-of-a-chunk-towards-input", "bf16"))


def made_by(case: CudaCase):
    """The generator of a case's kernel, and its plans, that of the rule first."""
    module = conv_backward if "Grad" in case.op else conv_forward
    generator = conv_backward.conv_backward if "Grad" in case.op else conv_forward.conv_forward
    return generator, lambda problem, target: [choice.plan for choice in module.choices(problem, target)]


def tile_of(plan) -> TilePlan:
    return plan if isinstance(plan, TilePlan) else plan[0]


def grouped_plans(case: CudaCase, precision: str) -> list:
    """The plans on products of warpgroups, but those that differ only in how many blocks are side by side."""
    plans = made_by(case)[1](case.problem(), gpu(precision))
    found = {}
    for plan in plans:
        tile = tile_of(plan)
        if tile.grouped:
            found.setdefault((tile.pixels, tile.outputs, tile.ahead), plan)
    return list(found.values())


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "bf16") for name in CASES), ("halo", "fp16"), ("towards-input", "fp16")]
)
def test_tiles_compute_what_the_reference_says(name, precision):
    dtype = "bfloat16" if precision == "bf16" else "float16"
    case = dataclasses.replace(CASES[name], dtype=dtype)
    plans = grouped_plans(case, precision)
    assert plans
    for plan in plans if (name, precision) in ALL_PLANS else plans[:1]:
        generator = lambda problem, target, plan=plan: made_by(case)[0](problem, target, "tile", plan)  # noqa: E731
        found, expected, _ = run_case(case, generator, gpu(precision))
        assert_close(found, expected, case.dtype_of, TOLERANCE)
        assert ("patches" in name) == (tile_of(plan).columns > 0)


def rule(case: CudaCase, precision: str, arch: str = "sm_90") -> TilePlan:
    return tile_of(made_by(case)[1](case.problem(), gpu(precision, arch, 132))[0])


LAYER = CudaCase(FORWARD, 64, 28, 28, 256, 256, **SAME, dtype="bfloat16")


@pytest.mark.parametrize(
    ("case", "arch", "grouped"),
    [
        (LAYER, "sm_90", True),
        (LAYER, "sm_80", False),
        (LAYER, "sm_100", False),
        (dataclasses.replace(LAYER, op=BACKWARD), "sm_90", True),
        (dataclasses.replace(LAYER, cin=32), "sm_90", False),  # most of a product were zeros
        (dataclasses.replace(LAYER, others=(("x", "float32"),)), "sm_90", False),  # by way of registers
        (dataclasses.replace(LAYER, kernel=(1, 1), pads=(0, 0, 0, 0)), "sm_90", True),
        (dataclasses.replace(LAYER, op=BACKWARD, kernel=(1, 1), pads=(0, 0, 0, 0)), "sm_90", False),  # waits for memory
        (dataclasses.replace(LAYER, strides=(2, 2)), "sm_90", True),
    ],
    ids=[
        "forward",
        "older",
        "newer",
        "backward",
        "narrow",
        "float32-map",
        "pointwise",
        "pointwise-backward",
        "strided",
    ],
)
def test_convolutions_of_many_steps_take_them(case, arch, grouped):
    assert rule(case, "bf16", arch).grouped == grouped


def test_two_blocks_rather_than_steps_ahead_where_the_source_comes_at_once():
    case = dataclasses.replace(LAYER, op=BACKWARD, h=64, w=64, cin=64, cout=64)
    assert (rule(case, "bf16").min_blocks, rule(case, "bf16").ahead) == (2, 1)
    assert rule(dataclasses.replace(case, cout=128), "bf16").ahead > 1


def test_others_have_none():
    assert not any(tile_of(p).grouped for p in made_by(LAYER)[1](LAYER.problem(), gpu("fp32")))


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
def test_all_values_are_in_registers(op):
    case = dataclasses.replace(LAYER, op=op)
    assert_no_spills(made_by(case)[0](case.problem(), gpu("bf16", "sm_90", 132)))
