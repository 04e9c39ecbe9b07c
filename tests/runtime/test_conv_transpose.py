"""Transposed convolutions and their gradients against the numpy reference in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conv_case import as_buffer, from_buffer, gradient_operands
from hypothesis import given, settings
from transposed_case import FORWARD, INPUT, WEIGHT, TransposedCase, cases

from bnfuse.opset import reference
from bnfuse.opset.spec import parse
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu.conv_backward import conv_backward
from bnfuse.runtime.kernels.cpu.conv_forward import conv_forward
from bnfuse.runtime.targets.target import CpuTarget

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

Case = TransposedCase
TARGET = dataclasses.replace(resolve("cpu"), threads=2)


def check(case: Case, algorithm: str | None = None, target: CpuTarget = TARGET, tolerance: float = 1e-5) -> None:
    """Compare all results, and see that what lies beside the slot of the map that is made is as it was."""
    spec = parse(case.op)
    make = conv_forward if spec.core == "ConvTransposeGradInput" else conv_backward
    kernel = make(case.problem(), target, algorithm)
    values = gradient_operands(case, np.random.default_rng(0))
    expected = reference.run(spec, values, case.attributes)
    maps = dict(kernel.problem.maps)
    given = {"dx" if name == "acc" else name: value for name, value in values.items()}
    arrays = {n: as_buffer(v, maps[n], case.offset(n)) if n in maps else v for n, v in given.items()}
    found = execute.call(kernel, arrays, {name: case.offset(name) for name in maps})
    for name in spec.results:
        value = found[name].reshape(case.shape(name)) if name not in maps else None
        if value is None:
            kind, start = maps[name], case.offset(name)
            value = from_buffer(found[name], kind, start)
            beside = np.delete(found[name].reshape(kind.pixels, kind.stride), np.s_[start : start + kind.c], axis=1)
            assert np.isnan(beside).all()
        error = np.linalg.norm(value - expected[name]) / max(np.linalg.norm(expected[name]), 1e-3)
        assert error < tolerance, f"{name} of {case}: {error:.1e}"


SIZES = [
    ((2, 4, 4, 24, 40), {"kernel": (4, 4), "strides": (2, 2), "pads": (1, 1, 1, 1)}),  # a generator's
    ((3, 1, 1, 33, 21), {"kernel": (4, 4), "slots": 3}),  # its first one
    ((2, 5, 6, 37, 3), {"kernel": (4, 4), "strides": (2, 2), "pads": (1, 1, 1, 1), "slots": 2}),  # its last one
    ((2, 7, 5, 32, 16), {"kernel": (2, 2), "strides": (2, 2)}),  # of a U-Net
    ((1, 7, 6, 17, 34), {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)}),
    ((2, 7, 6, 17, 34), {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1), "slots": 1}),  # an odd size
    ((2, 6, 7, 18, 20), {"kernel": (3, 3), "strides": (1, 1), "pads": (1, 1, 1, 1), "slots": 2}),
    ((2, 5, 5, 40, 33), {}),
    ((2, 5, 6, 24, 12), {"kernel": (3, 2), "strides": (2, 3), "pads": (0, 1, 2, 0), "group": 3}),
    ((2, 5, 6, 20, 20), {"kernel": (4, 4), "strides": (2, 2), "pads": (1, 1, 1, 1), "group": 20, "slots": 1}),
    (
        (1, 6, 5, 8, 16),
        {"kernel": (3, 3), "dilations": (2, 1), "strides": (2, 2), "output_padding": (1, 0), "group": 8},
    ),
    ((2, 3, 4, 9, 1), {"kernel": (1, 2), "strides": (3, 2), "pads": (0, 0, 0, 1)}),  # rows that nothing reaches
]


@pytest.mark.parametrize("op", [FORWARD[3], INPUT[2], WEIGHT[3]])
@pytest.mark.parametrize(("sizes", "more"), SIZES, ids=str)
def test_operators_of_all_steps(op: str, sizes: tuple[int, ...], more: dict[str, object]) -> None:
    check(Case(op, *sizes, **more))


@pytest.mark.parametrize("op", [*FORWARD, *INPUT, *WEIGHT])
def test_operators(op: str) -> None:
    check(Case(op, 2, 5, 6, 19, 22, (4, 4), (2, 2), (1, 1, 1, 1), slots=2))


@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(cases((*FORWARD, *INPUT, *WEIGHT)))
def test_any_geometry(case: Case) -> None:
    check(case, tolerance=2e-5)


@pytest.mark.parametrize("op", [FORWARD[3], INPUT[3], WEIGHT[3]])
@pytest.mark.parametrize("algorithm", ["winograd", "direct"])
def test_both_algorithms(op: str, algorithm: str) -> None:
    check(Case(op, 2, 7, 9, 33, 37, (3, 3), (1, 1), (1, 1, 1, 1), slots=2), algorithm)


@pytest.mark.parametrize(("mcpu", "lanes"), [("haswell", 8), ("nehalem", 4)])
@pytest.mark.parametrize("op", [FORWARD[3], INPUT[3], WEIGHT[3]])
def test_narrower_vectors(op: str, mcpu: str, lanes: int) -> None:
    check(Case(op, 1, 5, 6, 19, 22, (4, 4), (2, 2), (1, 1, 1, 1)), target=CpuTarget(mcpu, lanes, 2))


@pytest.mark.parametrize("op", [FORWARD[3], INPUT[3], WEIGHT[3]])
def test_more_threads_than_tiles(op: str) -> None:
    check(Case(op, 1, 1, 1, 5, 4, (2, 2)), target=dataclasses.replace(TARGET, threads=3))


def test_statistics_of_values_far_from_zero() -> None:
    """The mean is a thousand deviations: a difference of raw float32 sums would have no digit left."""
    case = Case("ConvTransposeBiasStatistics", 2, 16, 16, 4, 18, (4, 4), (2, 2), (1, 1, 1, 1))
    values = gradient_operands(case, np.random.default_rng(1))
    values["bias"][:] = 4000
    kernel = conv_backward(case.problem(), TARGET)
    arrays = {**values, "x": as_buffer(values["x"], case.map("x"), 0)}
    found = execute.call(kernel, arrays, {"x": 0, "y": 0})
    expected = reference.run(parse(case.op), values, case.attributes)
    np.testing.assert_allclose(found["mean"], expected["mean"], rtol=1e-6)
    np.testing.assert_allclose(found["variance"], expected["variance"], rtol=1e-3)
