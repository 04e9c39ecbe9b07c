"""Products of bfloat16 in the forward convolution: an instruction that is imitated here, and the code where it is."""

from __future__ import annotations

import pathlib
import re

import ml_dtypes
import numpy as np
import pytest
from halves import HALVES, ROUNDING, as_held, of_stored, rounding
from source_files import load

from bnfuse.runtime.kernels.cpu import products, tir
from bnfuse.runtime.kernels.cpu.conv_forward import conv_forward, conv_shape
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.targets.target import CpuTarget

direct = load(pathlib.Path(__file__).with_name("test_conv_forward.py"))
Case, FULL = direct.Case, direct.FULL
ZEN = CpuTarget("znver4", 16, 2, "bf16")

IMITATION = (
    products.OPENING
    + """
  %pixels = bitcast <{lanes} x i32> %pairs to <{lanes} x i32>
  %both = bitcast <{both} x i16> %weights to <{lanes} x i32>
  %a0 = shl <{lanes} x i32> %pixels, splat (i32 16)
  %b0 = shl <{lanes} x i32> %both, splat (i32 16)
  %a1 = and <{lanes} x i32> %pixels, splat (i32 -65536)
  %b1 = and <{lanes} x i32> %both, splat (i32 -65536)
  %fa0 = bitcast <{lanes} x i32> %a0 to <{lanes} x float>
  %fb0 = bitcast <{lanes} x i32> %b0 to <{lanes} x float>
  %fa1 = bitcast <{lanes} x i32> %a1 to <{lanes} x float>
  %fb1 = bitcast <{lanes} x i32> %b1 to <{lanes} x float>
  %p1 = fmul <{lanes} x float> %fa1, %fb1
  %s1 = fadd <{lanes} x float> %sum, %p1
  %p0 = fmul <{lanes} x float> %fa0, %fb0
  %s0 = fadd <{lanes} x float> %s1, %p0
  ret <{lanes} x float> %s0
}}
"""
)


@pytest.fixture
def imitated(monkeypatch):
    monkeypatch.setattr(products, "is_able", lambda target: True)
    monkeypatch.setattr(products, "INSTRUCTION", IMITATION)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("ConvStatistics", 2, 6, 5, 34, 70, slots=3), id="1x1-with-tails"),
        pytest.param(Case("ConvBias", 1, 7, 8, 700, 40), id="1x1-in-blocks-of-channels"),
        pytest.param(Case("Conv", 2, 9, 9, 24, 36, (3, 3), (2, 2), (1, 1, 1, 1)), id="3x3-strided"),
    ],
)
def test_products_are_those_of_rounded_operands_and_sums_float32(imitated, case):
    operands = as_held(case.operands(np.random.default_rng(0)), HALVES)
    operands["weight"] = operands["weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
    found, expected = direct.run(case, operands, HALVES)
    for name, value in of_stored(expected, found, HALVES).items():
        error = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        assert error < 2e-6 + rounding(name, value, HALVES), f"{name}: {error:.1e}"


def test_activated_pixels_and_weights_are_rounded_for_them(imitated):
    direct.check(Case(FULL, 2, 6, 5, 34, 70, slots=3), HALVES, tolerance=ROUNDING)


def forward(target: CpuTarget, cin: int = 128, group: int = 1) -> Problem:
    maps = (("x", MapType(4, 14, 14, cin, cin, "bfloat16")), ("y", MapType(4, 14, 14, 128, 128, "bfloat16")))
    geometry = {"dilations": (1, 1), "group": group, "kernel_shape": (1, 1), "pads": (0,) * 4, "strides": (1, 1)}
    return Problem("Conv", maps, tuple(geometry.items()), (128, cin // group, 1, 1))


def test_the_code_multiplies_pairs_in_registers():
    executable = tir.compile_function(conv_forward(forward(ZEN), ZEN).build(), ZEN)
    code = executable.mod.inspect_source("asm")
    assert len(re.findall(r"\tvdpbf16ps\t", code)) >= 28
    assert not re.findall(r"\tvdpbf16ps\t.*\(%rsp", code)
    assert products.NAME not in code


@pytest.mark.parametrize(
    ("target", "cin", "group", "taken"),
    [
        (ZEN, 128, 1, True),
        (ZEN, 33, 1, False),  # no whole pairs
        (ZEN, 128, 4, False),
        (CpuTarget("znver4", 16, 2), 128, 1, False),  # float32
        (CpuTarget("znver3", 8, 2, "bf16"), 128, 1, False),
        (CpuTarget("sapphirerapids", 16, 2, "bf16"), 128, 1, False),  # has it, and is slower by it
    ],
)
def test_the_rule(target, cin, group, taken):
    assert products.takes(conv_shape(forward(target, cin, group)), target) is taken
