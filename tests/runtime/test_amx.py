"""AMX's tiles in convolutions: their numbers by emulation, the instructions in the code, where they are used."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest
import tiles
from halves import ROUNDING, as_held, of_stored, rounding
from hypothesis import HealthCheck, given, settings
from source_files import load

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cpu import permission
from bnfuse.runtime.backends.cpu.backend import CpuBackend
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu import amx, tir
from bnfuse.runtime.kernels.cpu.amx_forward import AmxTiles, choose_amx_tiles
from bnfuse.runtime.kernels.cpu.conv_forward import algorithms, conv_forward, seen
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.targets import cpus
from bnfuse.runtime.targets.target import CpuTarget

direct = load(pathlib.Path(__file__).with_name("test_conv_forward.py"))
Case, FULL = direct.Case, direct.FULL
TARGET, emulated = tiles.TARGET, tiles.emulated


@tiles.NEEDS
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("ConvStatistics", 2, 6, 5, 34, 70, slots=3), id="1x1-with-tails"),
        pytest.param(Case("ConvBias", 1, 7, 8, 700, 40), id="1x1-deep"),
        pytest.param(Case("ReluConvStoreInput", 2, 9, 9, 24, 12, (3, 3), (2, 2), (1, 1, 1, 1)), id="3x3-strided"),
        pytest.param(Case("Conv", 5, 7, 7, 40, 36, (3, 3), (1, 1), (1, 1, 1, 1)), id="3x3-images"),
        pytest.param(Case("ConvBiasRelu", 1, 40, 31, 16, 9, (5, 5), pads=(2, 2, 2, 2)), id="5x5-several-tiles"),
        pytest.param(Case("ConvStatistics", 2, 21, 18, 3, 40, (7, 7), (2, 2), (3, 3, 3, 3), slots=2), id="stem"),
        pytest.param(Case("ConvBiasRelu", 3, 9, 11, 4, 9, (3, 3), pads=(1, 1, 1, 1)), id="3x3-few-channels"),
        pytest.param(Case("ConvStatistics", 2, 23, 29, 3, 33, (11, 11), (4, 3), (2, 1, 0, 5)), id="11x11-deep-rows"),
        pytest.param(Case("ReluConv", 1, 11, 9, 5, 20, (2, 3), (1, 2), (1, 0, 2, 1), (3, 1)), id="few-rectangular"),
        pytest.param(Case("ConvBias", 1, 17, 19, 16, 7, (3, 2), (2, 1), (1, 0, 2, 1), (2, 3)), id="rectangular"),
    ],
)
def test_products_are_those_of_rounded_operands_and_sums_float32(emulated, case):
    operands = as_held(case.operands(np.random.default_rng(0)), TARGET)
    operands["weight"] = operands["weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
    found, expected = direct.run(case, operands, TARGET)
    for name, value in of_stored(expected, found, TARGET).items():
        error = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        assert error < 2e-6 + rounding(name, value, TARGET), f"{name}: {error:.1e}"


@tiles.NEEDS
def test_every_step_of_prologue_and_epilogue(emulated):
    for op in ("NormalizeAddReluConvStoreInputStatistics", "NormalizeHardSwishGateConvBiasReluStatistics"):
        direct.check(Case(op, 2, 9, 8, 20, 35, (3, 3), (2, 1), (1, 1, 1, 1), slots=3), TARGET, tolerance=ROUNDING)


@tiles.NEEDS
def test_wide_vectors_and_more_threads_than_tiles(emulated):
    """As a CPU with tiles has them."""
    case = Case(FULL, 1, 5, 6, 37, 45, (3, 3), pads=(1,) * 4, slots=3)
    direct.check(case, dataclasses.replace(TARGET, lanes=16, threads=3), tolerance=ROUNDING)


@tiles.NEEDS
def test_weights_that_do_not_stay_near_the_tiles(emulated, monkeypatch):
    monkeypatch.setattr(amx, "NEAR", 0)
    direct.check(Case("ConvStatistics", 5, 7, 7, 40, 70, (3, 3), pads=(1,) * 4), TARGET, tolerance=ROUNDING)


@tiles.NEEDS
def test_the_emulator_gives_the_bits_of_the_instruction(monkeypatch):
    """Where the processor has it; of a sum of 300 terms, so that their order shows."""
    if cpus.missing_features(cpus.AMX) or not permission.is_granted():
        pytest.skip("this processor, or Linux, has no AMX")
    case = Case("ConvStatistics", 2, 6, 5, 300, 70)
    operands = as_held(case.operands(np.random.default_rng(0)), TARGET)
    found, _ = direct.run(case, operands, TARGET)
    tiles.emulate(monkeypatch)
    expected, _ = direct.run(case, operands, TARGET)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@tiles.NEEDS
def test_statistics_are_of_y_as_it_is_stored_far_from_zero(emulated):
    case = Case("ConvBiasStatistics", 2, 12, 12, 32, 32)
    operands = as_held(case.operands(np.random.default_rng(0)), TARGET)
    operands["bias"] += 1000
    found, expected = direct.run(case, operands, TARGET)
    stored = of_stored(expected, found, TARGET)
    np.testing.assert_allclose(found["mean"], stored["mean"], rtol=1e-6)
    np.testing.assert_allclose(found["variance"], stored["variance"], rtol=1e-5)


@tiles.NEEDS
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(direct.cases())
def test_any_convolution(emulated, case):
    case = dataclasses.replace(case, group=1, cin=case.cin + 15)
    direct.check(case, TARGET, tolerance=ROUNDING)


def problem(cin: int = 128, cout: int = 128, group: int = 1, dtype: str = "bfloat16", op: str = "Conv") -> Problem:
    maps = (("x", MapType(4, 14, 14, cin, cin, dtype)), ("y", MapType(4, 14, 14, cout, cout, dtype)))
    geometry = {"dilations": (1, 1), "group": group, "kernel_shape": (3, 3), "pads": (1,) * 4, "strides": (1, 1)}
    return Problem(op, maps, tuple(geometry.items()), (cout, cin // group, 3, 3))


RAPIDS = CpuTarget("sapphirerapids", 16, 2, "bf16", amx=True)


def test_the_code_loads_two_tiles_of_either_side_for_four_products():
    executable = tir.compile_function(conv_forward(problem(), RAPIDS).build(), RAPIDS)
    code = executable.mod.inspect_source("asm")
    names = ("tdpbf16ps", "tileloadd", "tilezero", "tilestored", "ldtilecfg", "tilerelease")
    count = {name: len(re.findall(rf"\t{name}\b", code)) for name in names}
    assert count["tdpbf16ps"] == count["tileloadd"] >= 4
    assert count["tilezero"] == count["tilestored"] == 4
    assert count["ldtilecfg"] == count["tilerelease"] == 1


@pytest.mark.parametrize(
    ("target", "given", "first"),
    [
        (RAPIDS, problem(), "amx"),
        (RAPIDS, problem(cin=8), "amx"),  # by rows of the window
        (RAPIDS, problem(cin=2), "direct"),  # mostly zeros
        (RAPIDS, problem(group=4), "direct"),
        (RAPIDS, problem(dtype="float32"), "winograd"),
        (RAPIDS, problem(op="ConvImageStatistics"), "winograd"),
        (dataclasses.replace(RAPIDS, amx=False), problem(), "winograd"),
        (CpuTarget("sapphirerapids", 16, 2), problem(dtype="float32"), "winograd"),
    ],
)
def test_the_rule(target, given, first):
    assert algorithms(given, target)[0] == first


@pytest.mark.parametrize(
    ("size", "cin", "kernel", "expected"),
    [
        (56, 64, 1, AmxTiles(1, 896)),
        (56, 64, 3, AmxTiles(1, 14)),
        (14, 256, 3, AmxTiles(4, 14)),
        (7, 512, 3, AmxTiles(4, 7)),
    ],
)
def test_tiles(size, cin, kernel, expected):
    maps = (("x", MapType(16, size, size, cin, cin, "bfloat16")), ("y", MapType(16, size, size, cin, cin, "bfloat16")))
    pads = (kernel // 2,) * 4
    geometry = {"dilations": (1, 1), "group": 1, "kernel_shape": (kernel,) * 2, "pads": pads, "strides": (1, 1)}
    shape = seen(Problem("Conv", maps, tuple(geometry.items()), (cin, cin, kernel, kernel)))
    assert choose_amx_tiles(shape, RAPIDS) == expected


# -- where it is used ----------------------------------------------------------------------------------------------


def test_a_cpu_that_is_named_has_it_where_llvm_says_so():
    assert resolve("cpu:sapphirerapids", 2, "bf16").amx
    assert resolve("cpu:graniterapids", 2, "bf16").amx
    assert not resolve("cpu:sapphirerapids", 2).amx
    assert not resolve("cpu:icelake-server", 2, "bf16").amx
    assert not resolve("cpu:znver4", 2, "bf16").amx


@pytest.mark.parametrize(
    ("features", "granted", "amx"), [(cpus.AMX, True, True), (cpus.AMX, False, False), ((), True, False)]
)
def test_the_host_has_it_where_its_processor_and_linux_say_so(monkeypatch, features, granted, amx):
    monkeypatch.setattr(cpus, "host_cpu", lambda: "sapphirerapids")
    monkeypatch.setattr(cpus, "host_features", lambda: frozenset(features))
    monkeypatch.setattr(permission, "is_granted", lambda: granted)
    assert CpuBackend().resolve("", 1, "bf16").amx is amx


def test_code_with_tiles_asks_for_the_cpu_and_for_the_permission(monkeypatch):
    backend = CpuBackend()
    assert {*cpus.AMX} <= {*backend.features(RAPIDS)}
    assert not {*cpus.AMX} & {*backend.features(dataclasses.replace(RAPIDS, amx=False))}
    monkeypatch.setattr(cpus, "host_features", lambda: frozenset(backend.features(RAPIDS)))
    monkeypatch.setattr(permission, "is_granted", lambda: False)
    with pytest.raises(BnfuseError, match="sapphirerapids uses AMX, for which Linux gives this process no permission"):
        backend.check(RAPIDS, backend.features(RAPIDS), None)


def test_linux_is_asked_once():
    permission.is_granted.cache_clear()
    assert permission.is_granted() in (True, False)
    assert permission.is_granted.cache_info().misses == 1
