"""Resamples on a GPU: in the interpreter against the numpy reference in float64, and as compiled."""

import numpy as np
import pytest
from cuda_kernels import assert_no_spills, gpu
from cuda_operator import operator, rounded
from resample_case import CASES, LINEAR, described, matrices, operands_of

from bnfuse.opset import reference, spec
from bnfuse.runtime.kernels.cuda.resample import resample_backward, resample_forward
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.lowering.layout import stored_dtype

TOLERANCE = {"fp32": 2e-6, "bf16": 2**-8, "fp16": 2**-11}


def check(name, shape, scales, mode, precision="fp32", slots=None):
    op, target = spec.parse(name), gpu(precision)
    held = lambda v: rounded(v, stored_dtype(v.shape, "float32", target))  # noqa: E731
    rows, columns = matrices(shape, scales, mode)
    operands = {k: held(v) for k, v in operands_of(op, shape, rows, columns, np.random.default_rng(0)).items()}
    attributes, tables = described(op, shape, rows, columns)
    expected = reference.run(op, operands, attributes)
    if "Statistics" in op.epilogue:
        expected["mean"], expected["variance"] = reference.statistics(held(expected["y"]))
    given = {k: v for k, v in operands.items() if k not in ("rows", "columns")} | tables
    generator = resample_backward if op.is_gradient else resample_forward
    found = operator(generator, target, name, given, {k: v.shape for k, v in expected.items()}, attributes, slots)
    for result, value in expected.items():
        tolerance = TOLERANCE[precision] if result in ("y", "dx") else 1e-5
        if result in ("mean", "variance") and precision != "fp32":
            tolerance = 5e-4  # an element of y may be rounded the other way
        assert np.abs(found[result] - value).max() <= tolerance * np.abs(value).max() + 1e-7, result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "shape", "scales", "mode"), CASES)
def test_equals_the_reference(name, shape, scales, mode, precision):
    check(name, shape, scales, mode, precision)


def test_slots_of_wider_buffers():
    check("NormalizeReluResample", (2, 19, 3, 5), (2, 2), LINEAR, slots={"x": (32, 7), "y": (24, 3)})
    check("NormalizeResampleGradReluGradReduce", (2, 19, 3, 5), (2, 2), LINEAR, slots={"dy": (32, 7), "dx": (24, 3)})


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "float32"), ("sm_90", "bfloat16")])
def test_compiles_without_spills(arch, dtype):
    small, large = MapType(4, 28, 28, 64, 64, dtype, 8), MapType(4, 56, 56, 64, 64, dtype, 8)
    for taps, weighted in ((1, False), (2, True), (6, True)):
        axes = tuple(
            (f"{name}_{what}", value)
            for name in ("row", "column")
            for what, value in (("taps", taps), ("weighted", weighted))
        )
        forward = Problem("NormalizeReluResampleStatistics", (("x", small), ("y", large)), axes)
        maps = (("dy", large), ("x", small), ("grad_x", large), ("dx", small))
        assert_no_spills(resample_forward(forward, gpu(arch=arch)))
        backward = Problem("BatchNormGradNormalizeResampleGradReluGradReduce", maps, axes)
        assert_no_spills(resample_backward(backward, gpu(arch=arch)))
