"""Resample kernels against the numpy reference in float64."""

import numpy as np
import pytest
from resample_case import CASES, LINEAR, described, matrices, operands_of

from bnfuse.opset import reference, spec
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.common.resample import is_one_launch
from bnfuse.runtime.kernels.cpu.resample import resample_backward, resample_forward
from bnfuse.runtime.kernels.kernel import Problem

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

TARGET = resolve("cpu", 2)


def run(name, shape, scales, mode, slots=None):
    op = spec.parse(name)
    rows, columns = matrices(shape, scales, mode)
    operands = operands_of(op, shape, rows, columns, np.random.default_rng(0))
    attributes, tables = described(op, shape, rows, columns)
    expected = reference.run(op, {k: v.astype(np.float64) for k, v in operands.items()}, attributes)
    given = {k: v for k, v in operands.items() if k not in ("rows", "columns")} | tables
    generator = resample_backward if op.is_gradient else resample_forward
    shapes = {k: v.shape for k, v in expected.items()}
    return execute.operator(generator, TARGET, name, given, shapes, attributes, slots), expected


def check(*case, slots=None):
    found, expected = run(*case, slots=slots)
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= 1e-5 * np.abs(value).max(), name


@pytest.mark.parametrize(("name", "shape", "scales", "mode"), CASES)
def test_equals_the_reference(name, shape, scales, mode):
    check(name, shape, scales, mode)


def test_slots_of_wider_buffers():
    check("NormalizeReluResample", (2, 19, 3, 5), (2, 2), LINEAR, slots={"x": (32, 7), "y": (24, 3)})
    check("NormalizeResampleGradReluGradReduce", (2, 19, 3, 5), (2, 2), LINEAR, slots={"dy": (32, 7), "dx": (24, 3)})


@pytest.mark.parametrize(
    ("name", "taps", "launches"),
    [
        ("NormalizeReluResample", (2, 2), 1),
        ("NormalizeReluResample", (4, 4), 2),
        ("NormalizeGeluResample", (1, 1), 1),
        ("NormalizeGeluResample", (2, 2), 2),
        ("NormalizeResampleGradGeluGradReduce", (2, 2), 1),
        ("ResampleGrad", (20, 0), 1),
    ],
)
def test_what_is_one_launch(name, taps, launches):
    problem = Problem(name, ())
    assert (1 if is_one_launch(problem, taps) else 2) == launches
