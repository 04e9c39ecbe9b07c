"""Both gradients of 1x1 convolutions of few outputs in one sweep, in the interpreter, against the reference."""

from __future__ import annotations

import dataclasses

import pytest
from cuda_conv import STORED, TOLERANCES, CudaCase, assert_close, run_case
from cuda_kernels import gpu
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.runtime.codegen.tuning import parts_of
from bnfuse.runtime.kernels.cuda.both_sizes import BothPlan
from bnfuse.runtime.kernels.cuda.compile import compile_cuda, compiled_as, cuda_source, resources
from bnfuse.runtime.kernels.cuda.conv_backward import choices, conv_backward

FULL = "BatchNormGradNormalizeReluConvGradReluGradReduceAccumulate"
RESIDUAL = "BatchNormGradConvGradAddGradientReluGradReduceOtherReduceOther"
GATED = "GateGradBatchNormGradNormalizeReluGateConvGradAddGatedGradientReduceGated"
CASES = {
    "64-outputs": CudaCase(FULL, 2, 7, 7, 96, 64, slots=8),
    "128-outputs": CudaCase(FULL, 3, 9, 9, 200, 100, slots=4),
    "256-outputs": CudaCase(FULL, 2, 7, 7, 80, 250, slots=8),
    "one-tile": CudaCase(FULL, 3, 9, 9, 40, 40, slots=4),
    "whole-steps": CudaCase("ConvGrad", 4, 8, 8, 64, 128),
    "residual": CudaCase(RESIDUAL, 2, 8, 8, 64, 256, slots=8),
    "bias": CudaCase("NormalizeClipConvGradBiasGradAddGradientClipGradReduceScale", 2, 6, 8, 72, 40),
    "sums": CudaCase(
        "BatchNormGradReluGradNormalizeAddNormalizedConvGradBiasGradReduceOther", 2, 7, 5, 48, 72, slots=8
    ),
    "gated": CudaCase(GATED, 3, 7, 7, 40, 48, slots=8),
    "even-channels": CudaCase("BatchNormGradNormalizeReluConvGradReluGradReduce", 1, 5, 7, 70, 34, slots=2),
    "one-pixel": CudaCase(FULL, 3, 1, 1, 40, 136 + 64, slots=8),
}


def offered(case: CudaCase, precision: str = "bf16", arch: str = "sm_90"):
    return choices(dataclasses.replace(case, dtype=STORED[precision]).problem(), gpu(precision, arch))


def check(case: CudaCase, precision: str, plan: BothPlan) -> None:
    case = dataclasses.replace(case, dtype=STORED[precision])
    operands = case.operands()
    if "a" in operands:
        operands["a"][0] = 0  # a BN's gamma
    generator = lambda problem, target: conv_backward(problem, target, "tile", (None, plan))  # noqa: E731
    found, expected, kernel = run_case(case, generator, gpu(precision), operands)
    assert_close(found, expected, case.dtype_of, TOLERANCES[precision])
    assert not any(stage.name.endswith("_input") for stage in kernel.build())


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_gradients_are_those_of_the_reference_by_any_plan(case):
    plans = [choice.plan[1] for choice in offered(case)]
    assert len(set(plans)) == len(plans) > 1
    for plan, splits in zip(plans, (2, 1, 3, 2), strict=False):
        check(case, "bf16", dataclasses.replace(plan, splits=splits))


@pytest.mark.parametrize("name", ["128-outputs", "256-outputs"])
def test_in_fp16(name):
    check(CASES[name], "fp16", offered(CASES[name], "fp16")[0].plan[1])


@st.composite
def cases(draw: st.DrawFn) -> CudaCase:
    op = draw(st.sampled_from([FULL, RESIDUAL, GATED, "ConvGrad"]))
    cout = draw(st.sampled_from([17, 20, 32, 60, 64, 97, 100]))
    n, h, w, slots = (draw(st.integers(low, high)) for low, high in ((1, 3), (1, 9), (1, 9), (0, 4)))
    return CudaCase(op, n, h, w, 2 * draw(st.integers(17, 80)), 2 * cout, slots=2 * slots)


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(cases(), st.integers(0, 3), st.integers(1, 4))
def test_of_any_size(case, which, splits):
    plans = [choice.plan[1] for choice in offered(case)]
    if not isinstance(plans[0], BothPlan):
        assert 128 < case.cout <= 192
        return
    check(case, "bf16", dataclasses.replace(plans[which % len(plans)], splits=splits))


@pytest.mark.parametrize(
    ("change", "arch"),
    [
        ({}, "sm_80"),
        ({"cin": 32}, "sm_90"),
        ({"cout": 300}, "sm_90"),
        ({"cout": 160}, "sm_90"),
        ({"strides": (2, 2)}, "sm_90"),
        ({"kernel": (3, 3), "pads": (1, 1, 1, 1)}, "sm_90"),
        ({"group": 2}, "sm_90"),
        ({"op": "BatchNormGradConvGradWeight"}, "sm_90"),
        ({"op": "BatchNormGradConvGradInputReduce"}, "sm_90"),
        ({"cin": 97, "slots": 3}, "sm_90"),  # no copies of four bytes
        ({"others": (("x", "float32"),)}, "sm_90"),
        ({"op": f"{RESIDUAL}ReduceOther"}, "sm_90"),  # a fourth sum
    ],
    ids=str,
)
def test_where_each_gradient_has_a_stage_of_its_own(change, arch):
    case = dataclasses.replace(CASES["64-outputs"], **change)
    assert not any(isinstance(choice.plan[1], BothPlan) for choice in offered(case, arch=arch))
    assert all(isinstance(choice.plan[1], BothPlan) for choice in offered(CASES["64-outputs"]))


def test_a_choice_has_a_part_for_each_gradient():
    """So that what is remembered of tuning has the form it always had."""
    (first, *_) = offered(CASES["128-outputs"])
    assert parts_of(first)[0] is None and len(parts_of(first)) == 2


def test_what_a_step_launches():
    """The sweep, its shares of dweight added, its sums merged."""
    case = dataclasses.replace(CASES["64-outputs"], n=64, dtype="bfloat16")
    stages = conv_backward(case.problem(), gpu("bf16", "sm_90", 132)).build()
    assert [stage.name.rsplit("_", 1)[1] for stage in stages] == ["weight", "shares", "merge"]


SPILLED = 24  # bytes of a thread, at most, where a step is some 500 instructions


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "spilled"),
    [
        (FULL, 256, 128, SPILLED),
        (FULL, 64, 128, SPILLED),
        (RESIDUAL, 512, 128, SPILLED),
        (RESIDUAL, 256, 64, 0),
        (RESIDUAL, 1024, 256, 0),
    ],
)
def test_values_stay_in_registers_and_products_run_on(op, inputs, outputs, spilled):
    """Nor does ptxas let a product wait for the one before."""
    case = CudaCase(op, 64, 28, 28, inputs, outputs, dtype="bfloat16", slots=8)
    kernel = conv_backward(case.problem(), gpu("bf16", "sm_90", 132))
    _, log = compile_cuda(cuda_source(kernel.build()[:1], "sm_90"), compiled_as("sm_90"))
    (found,) = resources(log).values()
    assert found["spills"] <= spilled and "serialized" not in log
