"""Backward convolution kernels against the numpy reference in float64."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from conv_case import ConvCase, as_buffer, from_buffer, gradient_operands
from halves import HALVES, as_held, rounding, targets
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError
from bnfuse.opset import reference
from bnfuse.opset.spec import (
    MAPS_LIKE_DY,
    MAPS_LIKE_X,
    is_numbered_map,
    is_of_images,
    parse,
)
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.conv_backward import conv_backward
from bnfuse.runtime.kernels.cpu.conv_backward_shape import choose_tiles, conv_shape
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Problem, is_gate
from bnfuse.runtime.targets.target import CpuTarget

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

TARGET = dataclasses.replace(resolve("cpu"), threads=2)
MAP_OF_DY = MAPS_LIKE_DY
CHANNELS_OF_DY = ("grad_a", "grad_b", "grad_p", "grad_q", "grad_w")
FULL = "BatchNormGradNormalizeReluConvGradReluGradReduceAccumulate"

POOLED = "GateGradAddGradReluGradBatchNormGradNormalizeReluConvGradReluGradReduce"
ADDED = "BatchNormGradReluGradNormalizeAddNormalizedConvGradBiasGradReduceOther"
SKIPPED = "NormalizeReluSkipHardSwishSkipGateAddNormalizedConvGradAddGradientReduce"
ACTIVATED = "BatchNormGradNormalizeGateClipConvGradAddGradientClipGradReduceOther"
GATED = "GateGradBatchNormGradNormalizeReluGateConvGradAddGatedGradientReduceGated"


@dataclasses.dataclass(frozen=True)
class Case(ConvCase):
    """`slots` widens every map's buffer and moves it inside."""

    @property
    def ranges(self) -> dict[str, int]:
        return {"acc_start": 0, "acc_stop": self.cin}

    @property
    def out(self) -> tuple[int, int]:
        return reference.window_counts((self.h, self.w), self.attributes)

    def channels(self, name: str) -> int:
        return self.cout if name in (*MAP_OF_DY, *CHANNELS_OF_DY, "grad_gate", "dbias") else self.cin

    def shape(self, name: str) -> tuple[int, ...]:
        if name in ("weight", "dweight"):
            return (self.cout, self.cin // self.group, *self.kernel)
        if name == "grad_other" and "GateGradAddGrad" in self.op:  # what a pooling passes back
            return (self.n, self.cout, 1, 1)
        if name in MAP_OF_DY:
            return (self.n, self.cout, *self.out)
        if name in (*MAPS_LIKE_X, "dx", "acc") or is_numbered_map(name):
            return (self.n, self.cin, self.h, self.w)
        if is_gate(name):
            return (self.n, self.channels(name), 1, 1)
        return (self.n, self.cin) if is_of_images(name) else (self.channels(name),)

    def offset(self, name: str) -> int:
        """Each map in a slot of its own, so that no two are at the same place."""
        return 1 + len(name) if self.slots else 0

    def map(self, name: str) -> MapType:
        n, c, h, w = self.shape(name)
        return MapType(n, h, w, c, c + (self.slots and self.slots + self.offset(name)))

    def problem(self, dtype: str = "float32") -> Problem:
        """Maps of more than one pixel are of this type."""
        spec = parse(self.op)
        names = [*spec.operands, *spec.results]
        kinds = [(name, self.map(name)) for name in names if len(self.shape(name)) == 4 and name not in WEIGHTS + ACC]
        maps = tuple((name, dataclasses.replace(k, dtype=dtype if k.h * k.w > 1 else k.dtype)) for name, k in kinds)
        return Problem(self.op, maps, tuple(self.attributes.items()), self.shape("weight"))


WEIGHTS = ("weight", "dweight")
ACC = ("acc",)


def run(case: Case, kernel: Kernel, values: dict[str, np.ndarray], function: Any = None) -> dict[str, np.ndarray]:
    """The kernel's results, NCHW, after checking that what lies beside the slot of dx is as it was."""
    maps = dict(kernel.problem.maps)
    given = {"dx": values["acc"]} if "acc" in values else {}
    given |= {name: value for name, value in values.items() if name != "acc"}
    arrays = {n: as_buffer(v, maps[n], case.offset(n)) if n in maps else v for n, v in given.items()}
    offsets = {name: case.offset(name) for name in maps}
    found = execute.call(kernel, arrays, offsets, function=function)
    if "dx" in maps:
        kind, start = maps["dx"], case.offset("dx")
        beside = np.delete(found["dx"].reshape(kind.pixels, kind.stride), np.s_[start : start + kind.c], axis=1)
        assert np.isnan(beside).all()
    results = parse(case.op).results
    return {
        n: from_buffer(found[n], maps[n], case.offset(n)) if n in maps else found[n].reshape(case.shape(n))
        for n in results
    }


def check(case: Case, tolerance: float = 1e-5, target: CpuTarget = TARGET, seed: int = 0) -> None:
    kernel = conv_backward(case.problem(target.map_dtype), target)
    values = as_held(gradient_operands(case, np.random.default_rng(seed)), target)
    expected = reference.run(parse(case.op), values, case.attributes)
    for name, found in run(case, kernel, values).items():
        error = np.linalg.norm(found - expected[name]) / np.linalg.norm(expected[name])
        assert error < tolerance + rounding(name, found, target), f"{name} of {case}: {error:.1e}"


CASES = [
    Case(FULL, 2, 7, 7, 40, 24, slots=3),
    Case("ConvGrad", 1, 5, 9, 3, 5, (3, 3), pads=(1, 1, 1, 1)),
    Case(FULL, 3, 9, 7, 37, 33, (3, 3), pads=(1, 1, 1, 1), slots=5),
    Case(FULL, 2, 14, 14, 64, 32, (3, 3), pads=(1, 1, 1, 1)),
    Case(FULL, 2, 9, 11, 20, 35, (3, 3), (2, 2), (1, 1, 1, 1), slots=2),
    Case(FULL, 2, 8, 7, 33, 17, (1, 1), (2, 2)),
    Case("BatchNormGradConvGradWeight", 1, 23, 21, 3, 64, (7, 7), (2, 2), (3, 3, 3, 3)),
    Case("ConvGradWeightBiasGrad", 2, 23, 24, 3, 20, (11, 11), (4, 4), (2, 2, 2, 2)),
    Case("ConvGradBiasGrad", 1, 19, 18, 3, 7, (11, 11), (4, 4), (2, 2, 2, 2)),
    Case("NormalizeClipConvGradBiasGradAddGradientClipGradReduceScale", 2, 6, 8, 9, 11, (3, 2), (2, 1), (0, 1, 2, 0)),
    Case("NormalizeQuickGeluConvGradQuickGeluGrad", 1, 8, 8, 18, 16, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
    Case(
        "BatchNormGradNormalizeWhereReluConvGradAddGradientWhereReluGradReduce",
        2,
        7,
        7,
        18,
        20,
        (3, 3),
        pads=(1, 1, 1, 1),
    ),
    Case("NormalizeWhereQuickGeluConvGradWhereQuickGeluGradReduce", 2, 7, 7, 37, 20, slots=2),
    Case("NormalizeWhereReluConvGradWhereReluGrad", 2, 9, 9, 19, 19, (3, 3), (2, 2), (1, 1, 1, 1), group=19, slots=1),
    Case("ConvGradInputAddGradientReluGradReduceReduceOtherReduceOther", 2, 7, 6, 36, 34, (3, 3), (1, 1), (1, 1, 1, 1)),
    Case("NormalizeReluConvGradReluGradReduce", 2, 6, 6, 24, 36, (3, 3), (1, 1), (1, 1, 1, 1), group=3),
    Case("NormalizeReluConvGradReluGradReduce", 2, 9, 9, 19, 19, (3, 3), (2, 2), (1, 1, 1, 1), group=19, slots=1),
    Case(FULL, 2, 8, 9, 70, 70, (3, 3), (2, 2), (1, 1, 1, 1), group=70, slots=2),
    Case("NormalizeClipConvGradBiasGradClipGradReduceScale", 1, 14, 13, 130, 130, (5, 5), pads=(2, 2, 2, 2), group=130),
    Case("ConvGradInput", 1, 9, 8, 16, 16, (7, 7), (1, 2), (3, 3, 2, 4), group=16),
    Case("ConvGradWeight", 2, 17, 15, 16, 16, (7, 7), (1, 2), (3, 3, 3, 3), (2, 1), group=16),
    Case("BatchNormGradConvGradAddGradientReduceOther", 1, 7, 7, 6, 18, (5, 5), (1, 1), (2, 2, 2, 2), group=6),
    Case("ConvGrad", 1, 6, 10, 70, 34, (2, 3), (1, 3), (3, 0, 1, 4), (2, 3)),
    Case("GateGradBatchNormGradNormalizeHardSwishGateConvGradReduceGatedReduceOther", 3, 7, 7, 40, 24, slots=3),
    Case(GATED, 3, 9, 7, 37, 33, (3, 3), pads=(1, 1, 1, 1), slots=2),
    Case(GATED, 2, 8, 7, 33, 17, (1, 1), (2, 2)),
    Case(
        "BatchNormGradNormalizeReluConvGradAddGradientReluGradReducePartReduceOther",
        2,
        7,
        6,
        36,
        34,
        (3, 3),
        (2, 2),
        (1,) * 4,
    ),
    Case("BatchNormGradConvGradReduceReluGradPartReduceQuickGeluGrad", 2, 7, 6, 36, 34, slots=3),
    Case(
        "BatchNormGradConvGradReduceReluGradPartReduceQuickGeluGrad", 2, 9, 9, 19, 19, (3, 3), pads=(1,) * 4, group=19
    ),
    Case(ACTIVATED, 3, 7, 7, 40, 24, slots=2),
    Case(ACTIVATED, 3, 9, 9, 19, 19, (3, 3), (2, 2), (1, 1, 1, 1), group=19),
    Case(ACTIVATED, 2, 14, 14, 64, 32, (3, 3), pads=(1, 1, 1, 1)),
    Case(GATED, 3, 9, 9, 19, 19, (3, 3), (2, 2), (1, 1, 1, 1), group=19, slots=1),
    Case("GateGradConvGradInputAddGatedGradientReluGradReduceReduceGated", 2, 14, 14, 64, 32, (3, 3), pads=(1,) * 4),
    Case("NormalizeReluConvGradAddBatchNormGradReluGradAddSkipGradientReduce", 2, 7, 7, 12, 20, (3, 3), slots=2),
    Case("BatchNormGradConvGradAddGradientAddBatchNormGradReduceOther", 1, 6, 5, 17, 9, (1, 1)),
    Case("ReluGradBatchNormGradNormalizeReluConvGradAddGradientReduceReluGrad", 2, 7, 6, 18, 20, (3, 3), slots=2),
    Case("BatchNormGradQuickGeluGradConvGradBiasGradReduceOther", 1, 7, 5, 33, 17, (1, 1)),
    Case("BatchNormGradReluGradNormalizeConvGradBiasGradAddBatchNormGradReduce", 2, 7, 6, 19, 19, (3, 3), group=19),
    Case("AddGradReluGradBatchNormGradConvGradAddGradientReduceReluGradReduceAddedReluGrad", 2, 7, 6, 17, 9, (3, 3)),
    Case("ReluGradBatchNormGradConvGradReduceReluGrad", 2, 6, 6, 19, 19, (3, 3), pads=(1, 1, 1, 1), group=19),
    Case("ReluConvGradInputAddBatchNormGradReluGradReduceOther", 2, 6, 6, 19, 19, (3, 3), pads=(1, 1, 1, 1), group=19),
    Case("BatchNormGradNormalizeHardSwishGateConvGradImageGateHardSwish", 3, 7, 7, 40, 24, slots=3),
    Case("NormalizeReluGateConvGradReduceOtherImageGateRelu", 5, 3, 4, 37, 9),
    Case("GateGradConvGradAddGradientReluGradReduceImageGate", 3, 9, 7, 20, 33, (3, 3), (2, 2), (1, 1, 1, 1), slots=2),
    Case("NormalizeReluConvGradReluGradImageReduce", 2, 9, 8, 34, 12, (3, 2), pads=(1, 1, 1, 0), group=2),
    Case("ConvGradInputImageReduce", 4, 2, 3, 19, 40),
    Case(POOLED, 3, 5, 4, 20, 24, slots=2),
    Case(POOLED, 2, 9, 9, 19, 19, (3, 3), (2, 2), (1, 1, 1, 1), group=19),
    Case(POOLED, 2, 14, 14, 64, 32, (3, 3), pads=(1, 1, 1, 1)),
    Case("GateGradAddGradBatchNormGradReluConvGradReduceOther", 3, 5, 4, 20, 24),
    Case(ADDED, 3, 7, 7, 40, 24, slots=3),
    Case(ADDED, 2, 9, 9, 19, 19, (3, 3), (2, 2), (1, 1, 1, 1), group=19, slots=1),
    Case(SKIPPED, 2, 9, 7, 37, 33, (3, 3), pads=(1, 1, 1, 1), slots=2),
    Case("ConvGradInputAccumulate", 2, 5, 5, 16, 16, (1, 1), (1, 1), (1, 1, 1, 1)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of(case: Case) -> None:
    check(case)


EPILOGUES = (
    "ConvGrad",
    "ConvGradBiasGradReluGradScale",
    "NormalizeReluConvGradAddGradientReluGradReduceReduceOtherAccumulate",
    "BatchNormGradNormalizeClipConvGradClipGradReduce",
    GATED,
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Convolutions of any geometry that has at least one output."""
    group = draw(st.sampled_from((1, 1, 1, 2, 3)))
    kernel, strides, dilations = (draw(st.tuples(st.integers(1, k), st.integers(1, k))) for k in (4, 3, 2))
    pads = draw(st.tuples(*(st.integers(0, 3),) * 4))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    h, w = (max(1, reach[i] - pads[i] - pads[i + 2]) + draw(st.integers(0, 11)) for i in (0, 1))
    cin, cout = (group * draw(st.integers(1, 40)) for _ in "io")
    op, n = draw(st.sampled_from(EPILOGUES)), draw(st.integers(1, 3))
    return Case(op, n, h, w, cin, cout, kernel, strides, pads, dilations, group, draw(st.integers(0, 3)))


@settings(max_examples=8, derandomize=True, deadline=None, database=None)
@given(cases(), targets)
def test_gradients_of_any_convolution(case: Case, target: CpuTarget) -> None:
    check(case, tolerance=2e-5, target=target)


@pytest.mark.parametrize(
    "case",
    [
        Case(FULL, 2, 7, 7, 40, 24, slots=3),
        Case("BatchNormGradConvGradWeight", 1, 23, 21, 3, 64, (7, 7), (2, 2), (3, 3, 3, 3)),
        Case("NormalizeReluConvGradReluGradReduce", 2, 6, 6, 24, 36, (3, 3), (1, 1), (1, 1, 1, 1), group=3),
        Case(FULL, 2, 8, 9, 70, 70, (3, 3), (2, 2), (1, 1, 1, 1), group=70, slots=2),
        Case(GATED, 3, 9, 7, 37, 33, (3, 3), pads=(1, 1, 1, 1), slots=2),
    ],
    ids=str,
)
def test_gradients_of_maps_of_16_bits(case: Case) -> None:
    check(case, target=HALVES)


@pytest.mark.parametrize(("mcpu", "lanes"), [("haswell", 8), ("nehalem", 4)])
def test_narrower_vectors(mcpu: str, lanes: int) -> None:
    check(Case(FULL, 2, 7, 9, 21, 18, (3, 3), (1, 1), (1, 1, 1, 1), slots=2), target=CpuTarget(mcpu, lanes, 2))
    check(Case(FULL, 1, 7, 9, 21, 21, (3, 3), (1, 1), (1, 1, 1, 1), group=21), target=CpuTarget(mcpu, lanes, 2))


def test_more_threads_than_tiles() -> None:
    check(Case(FULL, 1, 3, 3, 5, 4, (3, 3), pads=(1, 1, 1, 1)), target=dataclasses.replace(TARGET, threads=3))


def test_a_bn_whose_gamma_is_zero_still_has_its_gradients() -> None:
    """a = 0 and a positive b: the activation passes everything on, and dgamma cannot be had from it."""
    case = Case("NormalizeReluConvGradReluGradReduce", 2, 6, 6, 17, 8, (3, 3), pads=(1, 1, 1, 1))
    values = gradient_operands(case, np.random.default_rng(3))
    values["a"][:], values["b"][:] = 0, 0.5
    found = run(case, conv_backward(case.problem(), TARGET), values)
    expected = reference.run(parse(case.op), values, case.attributes)
    assert np.abs(expected["dgamma"]).min() > 0.01
    np.testing.assert_allclose(found["dgamma"], expected["dgamma"], rtol=1e-4, atol=1e-4)


def test_sums_keep_their_digits_over_many_pixels() -> None:
    """One float32 chain over 25088 values of one sign would lose 1e-4 of dbeta."""
    case = Case("ConvGradReduce", 2, 112, 112, 4, 3)
    values = gradient_operands(case, np.random.default_rng(5))
    values["dy"], values["weight"] = np.abs(values["dy"]), np.abs(values["weight"])
    found = run(case, conv_backward(case.problem(), TARGET), values)
    expected = reference.run(parse(case.op), values, case.attributes)
    for name in ("dbeta", "dgamma", "dweight"):
        scale = np.abs(expected[name]).max()
        assert np.abs(found[name] - expected[name]).max() < 2e-6 * scale, name


def test_accumulate_adds_to_what_is_there_and_is_one_parameter() -> None:
    kernel = conv_backward(Case("ConvGradAccumulate", 1, 4, 4, 8, 8).problem(), TARGET)
    assert [p.name for p in kernel.params] == ["dy", "x", "weight", "acc_p", "dx", "dweight"]
    assert {p.name: p.access for p in kernel.params}["dx"] == "inout"


def test_other_operators_are_refused() -> None:
    maps = (("dy", MapType(1, 4, 4, 8, 8)), ("dx", MapType(1, 4, 4, 8, 8)))
    with pytest.raises(BnfuseError, match="PointwiseGrad is not the gradient of a convolution"):
        conv_backward(Problem("PointwiseGrad", maps), TARGET)


WIDE = CpuTarget("sapphirerapids", 16, 2)


@pytest.mark.parametrize(
    ("case", "tiles"),
    [
        # images, rows; micro-tile images x rows x columns
        (Case(FULL, 16, 28, 28, 480, 128), (1, 1, (1, 1, 14))),  # 112 pixels regrouped into a row
        (Case(FULL, 16, 56, 56, 128, 32, (3, 3), pads=(1, 1, 1, 1)), (1, 8, (1, 1, 14))),
        (Case(FULL, 16, 7, 7, 128, 32, (3, 3), pads=(1, 1, 1, 1)), (8, 7, (2, 1, 7))),  # two images fill a micro-tile
        (Case(FULL, 16, 56, 56, 128, 128, (3, 3), (2, 2), (1, 1, 1, 1)), (1, 14, (1, 1, 14))),
        (Case(FULL, 1, 5, 5, 3, 4, (3, 3), pads=(1, 1, 1, 1)), (1, 3, (1, 1, 5))),
    ],
    ids=str,
)
def test_tiles(case: Case, tiles: tuple[int, int, tuple[int, int, int]]) -> None:
    found = choose_tiles(conv_shape(case.problem(), 2), WIDE)
    assert (found.images, found.rows, (found.micro_images, found.micro_rows, found.micro_columns)) == tiles


def test_inner_loops_keep_their_sums_in_registers() -> None:
    """The loops over k (28 sums) and over pixels (16 sums): nothing but loads of operands and multiply-adds."""
    case = Case(FULL, 2, 14, 14, 64, 64, (3, 3), pads=(1, 1, 1, 1))
    executable = tir.compile_function(conv_backward(case.problem(), WIDE, "direct").build(), WIDE)
    blocks = re.split(r"\n(?=\.\w+:)", executable.mod.inspect_source("asm"))
    loops = [block for block in blocks if block.count("vfmadd") in (16, 28) and re.search(r"\tj\w+\t", block)]
    tight = [body for body in (loop[: re.search(r"\tj\w+\t", loop).start()] for loop in loops) if "zmm" in body]
    counts = {body.count("vfmadd") for body in tight if "rsp" not in body and not re.search(r"zmm\d+, \S*\(", body)}
    assert counts == {16, 28}
