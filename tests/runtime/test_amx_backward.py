"""AMX's tiles in the gradients of convolutions, by emulation, and where they are used."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest
import tiles
from halves import ROUNDING, as_held, rounding
from hypothesis import HealthCheck, given, settings
from source_files import load
from transposed_case import FORWARD, INPUT, WEIGHT, TransposedCase

from bnfuse.runtime.kernels.cpu import amx, amx_backward, tir
from bnfuse.runtime.kernels.cpu.conv_backward import algorithms, conv_backward
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.targets.target import CpuTarget

HERE = pathlib.Path(__file__).parent
gradients, transposed = load(HERE / "test_conv_backward.py"), load(HERE / "test_conv_transpose.py")
Case, FULL = gradients.Case, gradients.FULL
TARGET, emulated = tiles.TARGET, tiles.emulated


@tiles.NEEDS
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("ConvGrad", 2, 7, 7, 70, 24, slots=3), id="1x1"),
        pytest.param(Case("ConvGrad", 2, 7, 7, 24, 70, slots=3), id="1x1-to-more-channels"),
        pytest.param(Case("ConvGradWeight", 3, 5, 7, 35, 34), id="1x1-weights"),
        pytest.param(Case("ConvGrad", 3, 9, 8, 20, 35, (3, 3), pads=(1,) * 4), id="3x3"),
        pytest.param(Case("ConvGrad", 2, 9, 8, 20, 35, (3, 3), (2, 1), (1,) * 4), id="3x3-strided"),
        pytest.param(Case("ConvGrad", 1, 8, 7, 33, 17, (1, 1), (2, 2)), id="1x1-strided"),
        pytest.param(Case("ConvGrad", 1, 6, 70, 70, 34, (2, 3), (1, 3), (3, 0, 1, 4), (2, 3)), id="rectangular"),
        pytest.param(Case("ConvGradInput", 1, 40, 31, 16, 40, (5, 5), pads=(2,) * 4), id="5x5-several-tiles"),
        pytest.param(Case("ConvGradWeight", 1, 70, 67, 16, 40, (5, 5), pads=(2,) * 4), id="5x5-weights"),
        pytest.param(Case("ConvGradWeight", 3, 21, 18, 3, 40, (7, 7), (2, 2), (3,) * 4), id="stem"),
        pytest.param(Case("ConvGradWeight", 2, 9, 11, 4, 33, (3, 3), pads=(1,) * 4), id="few-channels"),
        pytest.param(Case("ConvGradWeight", 1, 90, 61, 3, 17, (11, 11), (4, 3), (2, 1, 0, 5)), id="deep-rows"),
        pytest.param(
            Case("ConvGradWeight", 2, 11, 9, 5, 20, (2, 3), (1, 2), (1, 0, 2, 1), (3, 1)), id="few-rectangular"
        ),
    ],
)
def test_products_are_those_of_rounded_operands_and_sums_float32(emulated, case):
    kernel = conv_backward(case.problem("bfloat16"), TARGET)
    values = as_held(gradients.gradient_operands(case, np.random.default_rng(0)), TARGET)
    if "weight" in values:
        values["weight"] = values["weight"].astype(ml_dtypes.bfloat16).astype(np.float64)
    expected = gradients.reference.run(gradients.parse(case.op), values, case.attributes)
    for name, found in gradients.run(case, kernel, values).items():
        error = np.linalg.norm(found - expected[name]) / np.linalg.norm(expected[name])
        assert error < 1e-6 + rounding(name, found, TARGET), f"{name}: {error:.1e}"


@tiles.NEEDS
@pytest.mark.parametrize(
    "case",
    [
        Case(FULL, 2, 9, 11, 20, 35, (3, 3), (2, 2), (1, 1, 1, 1), slots=2),
        Case(FULL, 3, 5, 7, 70, 21, slots=2),
        Case("BatchNormGradNormalizeReluConvGradWeightBiasGrad", 2, 12, 13, 3, 40, (5, 5), (2, 1), (2,) * 4, slots=2),
        Case(gradients.GATED, 3, 9, 7, 37, 33, (3, 3), pads=(1, 1, 1, 1), slots=2),
        Case("NormalizeClipConvGradBiasGradAddGradientClipGradReduceScale", 2, 6, 8, 19, 21, (3, 2), pads=(0, 1, 2, 0)),
    ],
    ids=str,
)
def test_every_step_of_prologue_and_epilogue(emulated, case):
    gradients.check(case, ROUNDING, TARGET)


@tiles.NEEDS
@pytest.mark.parametrize(
    "case",
    [
        Case(FULL, 2, 5, 4, 100, 35, (3, 3), pads=(1,) * 4, slots=2),
        Case("BatchNormGradNormalizeConvGradBiasGradReduce", 2, 7, 6, 97, 30, (3, 2), (2, 1), (0, 1, 2, 0)),
        Case("ConvGradInput", 1, 5, 6, 70, 33, (3, 3), pads=(1,) * 4),
        Case("ConvGradWeight", 2, 3, 5, 140, 31),
        Case("ConvGrad", 1, 3, 3, 70, 90),
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_that_share_the_input_channels(emulated, monkeypatch, case, threads):
    monkeypatch.setattr(amx_backward, "PARTIAL_BYTES", 0)
    target = dataclasses.replace(TARGET, threads=threads)
    assert by_block(case.problem("bfloat16"), target) is not None
    gradients.check(case, ROUNDING, target)


def by_block(given: Problem, target: CpuTarget):
    return amx_backward.plan_by_block(given, amx_backward.plan_of(given, target), target)


def test_few_weights_are_left_to_tiles_of_the_threads():
    for cin, cout, size, taps in ((128, 32, 28, 9), (992, 128, 7, 1), (64, 64, 56, 9)):
        maps = {
            "dy": MapType(16, size, size, cout, cout, "bfloat16"),
            "x": MapType(16, size, size, cin, cin, "bfloat16"),
        }
        window = (3, 3) if taps == 9 else (1, 1)
        geometry = {
            "dilations": (1, 1),
            "group": 1,
            "kernel_shape": window,
            "pads": (taps // 9,) * 4,
            "strides": (1, 1),
        }
        one = Problem("ConvGrad", (*maps.items(), ("dx", maps["x"])), tuple(geometry.items()), (cout, cin, *window))
        assert by_block(one, RAPIDS) is None
    assert by_block(problem(512, 512, size=7), RAPIDS) is not None


@tiles.NEEDS
@pytest.mark.parametrize(
    "case",
    [
        Case("ConvGrad", 2, 9, 8, 40, 35, (3, 3), (2, 1), (1,) * 4),
        Case("ConvGrad", 2, 7, 7, 70, 34),
    ],
    ids=str,
)
def test_weights_that_do_not_stay_near_the_tiles(emulated, monkeypatch, case):
    monkeypatch.setattr(amx, "NEAR", 0)
    gradients.check(case, ROUNDING, TARGET)


@tiles.NEEDS
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(gradients.cases())
def test_any_convolution(emulated, case):
    wider = dataclasses.replace(case, op="ConvGrad", group=1, cin=case.cin + 15, cout=case.cout + 15)
    gradients.check(wider, ROUNDING, TARGET)


@tiles.NEEDS
def test_wide_vectors_and_more_threads_than_tiles(emulated):
    """As a CPU with tiles has them."""
    case = Case(FULL, 1, 5, 6, 37, 45, (3, 3), pads=(1,) * 4, slots=3)
    gradients.check(case, ROUNDING, dataclasses.replace(TARGET, lanes=16, threads=3))


class Halved(TransposedCase):
    """One whose maps are in 16 bits."""

    def problem(self) -> Problem:
        found = super().problem()
        maps = tuple((name, dataclasses.replace(kind, dtype="bfloat16")) for name, kind in found.maps)
        return dataclasses.replace(found, maps=maps)


@tiles.NEEDS
@pytest.mark.parametrize("op", [FORWARD[3], INPUT[2], WEIGHT[3]])
def test_transposed_convolutions(emulated, op):
    case = Halved(op, 2, 5, 6, 20, 22, (4, 4), (2, 2), (1, 1, 1, 1), slots=2)
    transposed.check(case, target=TARGET, tolerance=2 * ROUNDING)


# -- where they are used -------------------------------------------------------------------------------------------

RAPIDS = CpuTarget("sapphirerapids", 16, 2, "bf16", amx=True)


def problem(
    cin: int = 128, cout: int = 64, group: int = 1, dtype: str = "bfloat16", op: str = "ConvGrad", size: int = 14
) -> Problem:
    x, y = (MapType(4, size, size, channels, channels, dtype) for channels in (cin, cout))
    geometry = {"dilations": (1, 1), "group": group, "kernel_shape": (3, 3), "pads": (1,) * 4, "strides": (1, 1)}
    return Problem(op, (("dy", y), ("x", x), ("dx", x)), tuple(geometry.items()), (cout, cin // group, 3, 3))


def test_the_code_loads_two_tiles_of_either_side_for_four_products():
    for each, zeros in ((problem(), 4), (problem(512, 512, size=7), 8)):  # dx begins with zeros, or dweight too
        executable = tir.compile_function(conv_backward(each, RAPIDS).build(), RAPIDS)
        code = executable.mod.inspect_source("asm")
        count = {
            name: len(re.findall(rf"\t{name}\b", code)) for name in ("tdpbf16ps", "tileloadd", "tilezero", "tilestored")
        }
        assert count["tilezero"] == zeros and count["tdpbf16ps"] >= 8
        assert count["tileloadd"] - count["tdpbf16ps"] == count["tilestored"] - zeros  # others load their sums


@pytest.mark.parametrize(
    ("target", "given", "first"),
    [
        (RAPIDS, problem(), "amx"),
        (RAPIDS, problem(cin=8), "direct"),  # mostly zeros
        (RAPIDS, problem(cin=3, op="ConvGradWeight"), "amx"),  # by rows of the window
        (RAPIDS, problem(cin=2, op="ConvGradWeight"), "direct"),
        (RAPIDS, problem(cout=8), "winograd"),
        (RAPIDS, problem(group=4), "direct"),
        (RAPIDS, problem(dtype="float32"), "winograd"),
        (RAPIDS, problem(op="ConvGradImageReduce"), "winograd"),
        (dataclasses.replace(RAPIDS, amx=False), problem(), "winograd"),
    ],
)
def test_the_rule(target, given, first):
    assert algorithms(given, target)[0] == first


@pytest.mark.parametrize(
    ("size", "cin", "cout", "kernel", "columns", "expected"),
    [
        (56, 64, 256, 1, 896, (1, 1)),
        (56, 64, 64, 3, 56, (1, 28)),
        (14, 256, 256, 3, 14, (2, 14)),
        (7, 512, 512, 3, 7, (4, 7)),
    ],
)
def test_tiles(size, cin, cout, kernel, columns, expected):
    x, y = (MapType(16, size, size, channels, channels, "bfloat16") for channels in (cin, cout))
    pads = (kernel // 2,) * 4
    geometry = {"dilations": (1, 1), "group": 1, "kernel_shape": (kernel,) * 2, "pads": pads, "strides": (1, 1)}
    given = Problem("ConvGrad", (("dy", y), ("x", x), ("dx", x)), tuple(geometry.items()), (cout, cin, kernel, kernel))
    plan = amx_backward.plan_of(given, RAPIDS)
    assert (plan.shape.columns.size, (plan.tiles.images, plan.tiles.rows)) == (columns, expected)
