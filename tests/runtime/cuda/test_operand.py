"""Gates and coefficients of each sample beside operands that are copied asynchronously, in the interpreter."""

from __future__ import annotations

import dataclasses

import pytest
from cuda_conv import CudaCase, assert_close, run_case
from cuda_kernels import gpu

from bnfuse.runtime.kernels.cuda.conv_backward import conv_backward
from bnfuse.runtime.kernels.cuda.conv_forward import conv_forward
from bnfuse.runtime.kernels.cuda.operand import Operand, can_ring

GATED = "NormalizeHardSwishGateConvStatistics"
POOLED = "GateGradAddGradReluGradBatchNormGradNormalizeReluConvGradReluGradReduce"
BOTH_GATED = "GateGradBatchNormGradNormalizeReluGateConvGradAddGatedGradientReduceGated"
SAMPLES = "BatchNormGradNormalizeReluConvGradReluGrad"
WINDOW = {"kernel": (3, 3), "pads": (1, 1, 1, 1)}
CASES = {
    "pointwise": CudaCase(GATED, 3, 6, 5, 40, 72, slots=8),
    "pointwise-strided": CudaCase(GATED, 3, 7, 6, 40, 24, strides=(2, 2), slots=8),
    "halo-of-tails": CudaCase("NormalizeReluGateConv", 3, 5, 7, 24, 40, slots=8, **WINDOW),
    "of-each-sample": CudaCase("NormalizeReluConvStatistics", 3, 6, 6, 24, 40, slots=8, by_sample=True, **WINDOW),
    "gradient": CudaCase(POOLED, 3, 7, 7, 40, 24, slots=8),
    "gradient-of-many-chunks": CudaCase(POOLED, 2, 5, 5, 24, 136, slots=8),
    "gradient-halo": CudaCase(POOLED, 3, 9, 7, 40, 32, slots=8, **WINDOW),
    "gradient-strided": CudaCase(POOLED, 3, 7, 7, 40, 24, (3, 3), (2, 2), (1, 1, 1, 1), slots=8),
    "both-sides": CudaCase(BOTH_GATED, 3, 7, 7, 40, 24, slots=8),
    "both-of-each-sample": CudaCase(SAMPLES, 3, 6, 7, 40, 24, slots=8, by_sample=True, **WINDOW),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_they_are_read_beside_the_ring(case):
    case = dataclasses.replace(case, dtype="bfloat16")
    problem = case.problem()
    sides = (False, True) if problem.spec.is_gradient else (False,)
    operands = [Operand(problem, side) for side in sides]
    assert all(can_ring(operand, "bf16") for operand in operands)
    assert any(operand.by_image for operand in operands)
    generator = conv_backward if problem.spec.is_gradient else conv_forward
    found, expected, _ = run_case(case, generator, gpu("bf16"))
    assert_close(found, expected, case.dtype_of, 5e-5)


@pytest.mark.parametrize(
    ("case", "precision", "rings"),
    [
        (CudaCase(GATED, 2, 6, 6, 24, 40, slots=8, dtype="bfloat16"), "bf16", True),
        (CudaCase(GATED, 2, 6, 6, 24, 40, slots=3, dtype="bfloat16"), "bf16", False),  # two bytes at a time
        (CudaCase(GATED, 2, 6, 6, 24, 40, slots=1), "fp32", True),
        (CudaCase(GATED, 2, 6, 6, 24, 40, slots=8, dtype="bfloat16", others=(("x", "float32"),)), "bf16", False),
        (CudaCase(GATED, 2, 1, 1, 24, 40, slots=8, dtype="bfloat16"), "bf16", False),  # the gate is a map like x
    ],
)
def test_what_can_be_copied_asynchronously(case, precision, rings):
    assert can_ring(Operand(case.problem(), False), precision) == rings
