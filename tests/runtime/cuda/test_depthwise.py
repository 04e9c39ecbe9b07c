"""Depthwise convolutions on a GPU: any geometry against float64, and what the kernels need."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cuda_conv import CudaCase, assert_close, run_case
from cuda_kernels import assert_no_spills, gpu, run_kernel
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError
from bnfuse.opset.spec import parse
from bnfuse.runtime.kernels.cuda.depthwise_backward import depthwise_backward, plan_of
from bnfuse.runtime.kernels.cuda.depthwise_forward import depthwise_forward
from bnfuse.runtime.kernels.cuda.depthwise_forward import plan_of as forward_plan
from bnfuse.runtime.kernels.cuda.depthwise_forward import work_of as forward_work

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
PAD = (1, 1, 1, 1)
FORWARD = "NormalizeClipConvStatistics"
BACKWARD = "BatchNormGradNormalizeClipConvGradBiasGradAddGradientClipGradReduceReduceOtherAccumulate"
FORWARD_OPS = (
    "Conv",
    "ReluConvBiasStatistics",
    "NormalizeConvReluStatistics",
    FORWARD,
    "NormalizeReluAddReluConvStoreInput",
    "NormalizeAddNormalizedReluConvStatistics",
    "NormalizeQuickGeluConvBiasStoreInputStatistics",
    "NormalizeWhereReluConvStatistics",
    "NormalizeReluGateConvStatistics",
    "NormalizeSkipReluAddNormalizedConvStatistics",
)
BACKWARD_OPS = (
    "ConvGrad",
    "ConvGradInputBiasGrad",
    "ConvGradWeightBiasGrad",
    "NormalizeReluConvGradReluGradReduceScale",
    "BatchNormGradNormalizeClipConvGradWeight",
    "BatchNormGradReluConvGrad",
    "NormalizeQuickGeluConvGradInputAddGradientQuickGeluGradReduceAccumulate",
    "NormalizeWhereReluConvGradWhereReluGradReduce",
    "BatchNormGradNormalizeGateClipConvGradAddGradientClipGradReduceOther",
    "GateGradBatchNormGradNormalizeReluGateConvGradAddGatedGradientReduceGated",
    "BatchNormGradReluGradNormalizeConvGradBiasGradAddBatchNormGradReduce",
    "BatchNormGradNormalizeAddNormalizedConvGradBiasGradReduceOther",
    "AddGradReluGradBatchNormGradReluConvGradReluGradAddSkipGradientReduceAddedReluGrad",
    "GateGradAddGradReluGradBatchNormGradNormalizeReluConvGradReluGradReduce",
    BACKWARD,
)


def check(case: CudaCase, multiprocessors: int = 4) -> None:
    generator = depthwise_backward if parse(case.op).is_gradient else depthwise_forward
    target = gpu(PRECISIONS[case.dtype], multiprocessors=multiprocessors)
    found, expected, _ = run_case(case, generator, target)
    assert_close(found, expected, case.dtype, 5e-6)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (op, dtype)
        for i, op in enumerate(FORWARD_OPS + BACKWARD_OPS)
        for dtype in ("float32", ("bfloat16", "float16")[i % 2])
    ],
)
def test_every_operator_pads_with_zeros_after_the_activation(op, dtype):
    check(CudaCase(op, 2, 7, 6, 10, 10, (3, 3), pads=PAD, group=10, slots=2, dtype=dtype))


@pytest.mark.parametrize("op", (FORWARD, BACKWARD))
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CudaCase("", 1, 9, 11, 8, 8, (3, 3), (2, 2), PAD, group=8, dtype="bfloat16"), id="stride-2"),
        pytest.param(CudaCase("", 1, 8, 9, 4, 4, (5, 5), pads=(2, 2, 2, 2), group=4, dtype="bfloat16"), id="5x5"),
        pytest.param(CudaCase("", 1, 8, 9, 5, 5, (5, 5), (2, 2), (2, 2, 2, 2), group=5, slots=1), id="5x5-stride-2"),
        pytest.param(CudaCase("", 2, 5, 7, 3, 3, (1, 1), (2, 3), group=3), id="1x1-strided"),
        pytest.param(CudaCase("", 1, 9, 9, 3, 3, (3, 2), (3, 1), (2, 0, 1, 1), (2, 3), group=3), id="dilated"),
        pytest.param(CudaCase("", 1, 8, 7, 3, 6, (3, 3), (2, 1), PAD, group=3, dtype="float16"), id="multiplier"),
        pytest.param(CudaCase("", 1, 3, 3, 2, 2, (3, 3), (3, 3), (5, 4, 6, 3), group=2), id="windows-in-the-padding"),
        pytest.param(CudaCase("", 1, 4, 5, 200, 200, (3, 3), pads=PAD, group=200), id="many-channels"),
        pytest.param(CudaCase("", 1, 5, 5, 1, 1, (3, 3), pads=PAD, group=1), id="one-channel"),
    ],
)
def test_geometry(op, case):
    check(dataclasses.replace(case, op=op))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CudaCase("ConvStatistics", 4, 4, 4, 116, 116, (3, 3), pads=PAD, group=116), id="116"),
        pytest.param(CudaCase("ConvStatistics", 4, 4, 4, 232, 232, (3, 3), (2, 2), PAD, group=232), id="232"),
        pytest.param(
            CudaCase("ConvStatistics", 2, 2, 2, 464, 464, (3, 3), pads=PAD, group=464, dtype="bfloat16"), id="464-bf16"
        ),
    ],
)
def test_threads_beyond_the_last_channel_write_no_statistics(case):
    target = gpu(PRECISIONS[case.dtype], multiprocessors=132)
    work = forward_work(case.problem())
    plan = forward_plan(case.problem(), work, target)
    assert plan.vectors * plan.lanes * plan.chunks(work) > case.cout
    check(case, multiprocessors=132)


def test_where_windows_do_not_fit_taps_are_gathered():
    case = CudaCase(FORWARD, 1, 9, 19, 2, 2, (3, 17), pads=(6, 8, 6, 8), dilations=(6, 1), group=2)
    target = gpu()
    assert forward_plan(case.problem(), forward_work(case.problem()), target) is None
    check(case)
    case = dataclasses.replace(case, op=BACKWARD)
    assert plan_of(case.problem(), target) is None
    check(case)


@st.composite
def cases(draw: st.DrawFn) -> CudaCase:
    kernel, strides, dilations = (draw(st.tuples(st.integers(1, k), st.integers(1, k))) for k in (5, 3, 2))
    pads = draw(st.tuples(*(st.integers(0, 2),) * 4))
    reach = [(k - 1) * dilation + 1 for k, dilation in zip(kernel, dilations, strict=True)]
    h, w = (max(1, reach[i] - pads[i] - pads[i + 2]) + draw(st.integers(0, 9)) for i in (0, 1))
    n, channels, slots = draw(st.integers(1, 3)), draw(st.integers(2, 40)), draw(st.integers(0, 4))
    op, dtype = draw(st.sampled_from(FORWARD_OPS + BACKWARD_OPS)), draw(st.sampled_from([*PRECISIONS]))
    multiple = draw(st.sampled_from([1, 1, 1, 2]))
    geometry = (kernel, strides, pads, dilations)
    return CudaCase(op, n, h, w, channels, channels * multiple, *geometry, channels, slots, dtype)


@settings(max_examples=15, derandomize=True, deadline=None, database=None)
@given(cases(), st.sampled_from([1, 4, 16]))
def test_any_depthwise_convolution(case: CudaCase, multiprocessors: int) -> None:
    check(case, multiprocessors)


def test_variance_far_from_zero_is_accurate():
    """The mean is 1000 deviations; one channel does not vary at all."""
    case = CudaCase("ConvBiasStatistics", 3, 12, 13, 6, 6, (3, 3), pads=PAD, group=6)
    operands = case.operands()
    operands["weight"] /= 3
    operands["bias"][:] = 1e3
    operands["weight"][3] = 0
    found, expected, _ = run_case(case, depthwise_forward, gpu(), operands)
    moving = np.arange(6) != 3
    np.testing.assert_allclose(found["mean"], expected["mean"], rtol=1e-7)
    np.testing.assert_allclose(found["variance"][moving], expected["variance"][moving], rtol=1e-5)
    assert found["variance"][3] == 0


def test_a_run_that_has_diverged_shows_it():
    case = CudaCase(FORWARD.replace("Clip", "Relu"), 1, 5, 5, 3, 3, (3, 3), pads=PAD, group=3)
    operands = case.operands()
    operands["x"][0, 1, 2, 2] = np.nan
    found, _, _ = run_case(case, depthwise_forward, gpu(), operands)
    assert np.isnan(found["y"][0, 1, 2, 2])
    assert [bool(np.isnan(v)) for v in found["variance"]] == [False, True, False]


def test_dense_convolutions_are_refused():
    case = CudaCase("Conv", 1, 5, 5, 4, 4, (3, 3), group=2)
    with pytest.raises(BnfuseError, match="no depthwise convolution"):
        depthwise_forward(case.problem(), gpu())
    with pytest.raises(BnfuseError, match="no depthwise convolution"):
        depthwise_backward(dataclasses.replace(case, op="ConvGrad").problem(), gpu())


def test_dx_may_be_a_slot_of_the_buffer_that_other_lies_in():
    """Both are read and written through one array, at different offsets."""
    case = CudaCase("ConvGradInputAddGradient", 1, 5, 6, 4, 4, (3, 3), pads=PAD, group=4)
    operands = case.operands()
    alone, _, kernel = run_case(case, depthwise_backward, gpu(), operands)
    wide = {name: dataclasses.replace(kind, stride=8) for name, kind in case.problem().maps if name in ("dx", "other")}
    maps = tuple((name, wide.get(name, kind)) for name, kind in case.problem().maps)
    shared = depthwise_backward(dataclasses.replace(case.problem(), maps=maps), gpu())
    buffer = np.zeros((5, 6, 8), np.float32)
    buffer[..., 4:] = operands["other"][0].transpose(1, 2, 0)
    arrays = {name: operands[name][0].transpose(1, 2, 0).astype(np.float32) for name in ("dy", "x")}
    arrays |= {"weight": operands["weight"].astype(np.float32), "dx": buffer, "other": buffer}
    found = run_kernel(shared, arrays, {"other": 4})["dx"].reshape(5, 6, 8)
    np.testing.assert_array_equal(found[..., :4].transpose(2, 0, 1), alone["dx"][0])
    np.testing.assert_array_equal(found[..., 4:], buffer[..., 4:])
    assert kernel.params[-1].name == "dx"


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "stride", "arch"),
    [
        (144, 56, 3, 1, "sm_80"),
        (96, 112, 3, 2, "sm_90"),
        (240, 28, 5, 1, "sm_90"),
        (672, 14, 5, 2, "sm_80"),
        (10, 9, 7, 1, "sm_90"),
    ],
)
def test_everything_is_in_registers(channels, size, kernel, stride, arch):
    geometry = ((kernel, kernel), (stride, stride), (kernel // 2,) * 4)
    target = gpu("bf16", arch, multiprocessors=132)
    for op, generator in ((FORWARD, depthwise_forward), (BACKWARD.replace("BiasGrad", ""), depthwise_backward)):
        case = CudaCase(op, 64, size, size, channels, channels, *geometry, group=channels, dtype="bfloat16")
        assert_no_spills(generator(case.problem(), target))
