"""Forward convolutions on tensor cores, in the interpreter, against the reference in float64."""

from __future__ import annotations

import dataclasses

import pytest
from cuda_conv import STORED, TOLERANCES, CudaCase, assert_close, run_case
from cuda_kernels import gpu
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.runtime.kernels.cuda.conv_forward import choices, conv_forward
from bnfuse.runtime.kernels.kernel import Choice

FULL = "NormalizeReluConvStatistics"
PROLOGUES = (
    "",
    "Relu",
    "NormalizeClip",
    "NormalizeQuickGelu",
    "AddRelu",
    "ReluAddNormalized",
    "NormalizeAddNormalizedRelu",
    "NormalizeReluAddRelu",
    "NormalizeWhereRelu",
    "NormalizeHardSwishGate",
    "NormalizeGateAddNormalized",
    "WhereQuickGeluAddRelu",
)
EPILOGUES = ("", "Bias", "Statistics", "BiasStoreInputStatistics", "BiasReluStatistics")


def check(case: CudaCase, precision: str, choice: Choice | None = None, arch: str = "sm_90") -> None:
    case = dataclasses.replace(case, dtype=STORED[precision])
    plan = choice and choice.plan
    generator = lambda problem, target: conv_forward(problem, target, "tile", plan)  # noqa: E731
    found, expected, _ = run_case(case, generator, gpu(precision, arch))
    assert_close(found, expected, case.dtype_of, TOLERANCES[precision])


CASES = {
    "pointwise-with-tails": CudaCase(FULL, 2, 6, 5, 33, 70, slots=3),
    "pointwise-of-many-chunks": CudaCase(FULL, 1, 7, 8, 200, 40),
    "pointwise-strided": CudaCase("NormalizeAddReluConvStoreInputStatistics", 2, 7, 7, 20, 17, strides=(2, 2)),
    "halo": CudaCase(FULL, 2, 8, 9, 70, 36, (3, 3), pads=(1, 1, 1, 1), slots=8),
    "halo-of-odd-slots": CudaCase(FULL, 2, 8, 9, 24, 32, (3, 3), pads=(1, 1, 1, 1), slots=5),
    "halo-dilated": CudaCase("NormalizeReluConv", 2, 9, 9, 18, 20, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
    "asymmetric": CudaCase("ConvBias", 1, 7, 9, 9, 7, (3, 2), (2, 1), (1, 0, 2, 1)),
    "flat": CudaCase("ReluConvStatistics", 1, 12, 13, 6, 9, (5, 5), pads=(2, 2, 2, 2)),
    "flat-stem": CudaCase("NormalizeConvBiasStatistics", 2, 13, 13, 3, 24, (7, 7), (2, 2), (3, 3, 3, 3)),
    "flat-behind-a-gate": CudaCase("NormalizeReluGateConv", 3, 6, 6, 3, 40, (3, 3), pads=(1, 1, 1, 1)),
    "patches": CudaCase(FULL, 2, 16, 64, 24, 20, (3, 3), pads=(1, 1, 1, 1), slots=8),
    "halo-behind-a-gate": CudaCase("NormalizeGateConvStatistics", 3, 9, 8, 24, 40, (3, 3), pads=(1, 1, 1, 1), slots=8),
    "flat-beside-a-wider-map": CudaCase("AddConv", 2, 6, 6, 3, 40, (3, 3), pads=(1, 1, 1, 1), wider=("skip",)),
    "window-as-large-as-the-image": CudaCase("ReluConvStatistics", 5, 4, 3, 10, 36, (4, 3)),
    "dilated-strided": CudaCase("NormalizeReluConv", 2, 9, 9, 18, 20, (3, 3), (2, 2), (2, 1, 2, 1), (2, 3)),
    "windows-in-the-padding": CudaCase(FULL, 2, 3, 3, 8, 6, (3, 3), (3, 3), (5, 4, 6, 3)),
    "groups-of-12": CudaCase(FULL, 2, 6, 6, 24, 24, (3, 3), pads=(1, 1, 1, 1), group=2, slots=8),
    "groups-of-few": CudaCase(FULL, 2, 6, 6, 32, 16, (3, 3), pads=(1, 1, 1, 1), group=8),
    "groups-pointwise": CudaCase(FULL, 2, 6, 6, 32, 32, group=8, slots=8),
    "groups-of-two": CudaCase(FULL, 2, 6, 6, 16, 16, (2, 1), group=8, slots=8),
    "groups-alone-and-flat": CudaCase(FULL, 2, 6, 6, 6, 9, (3, 3), pads=(1, 1, 1, 1), group=3),
    "one-pixel": CudaCase("NormalizeQuickGeluConvBiasStoreInputStatistics", 3, 1, 1, 17, 21),
}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_convolution_is_that_of_the_reference(case, precision):
    check(case, precision)


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
@pytest.mark.parametrize("name", ["pointwise-with-tails", "halo", "flat-stem", "groups-of-12", "dilated-strided"])
def test_other_precisions(name, precision):
    check(CASES[name], precision)


@pytest.mark.parametrize("prologue", PROLOGUES)
def test_every_prologue_pads_with_zeros_after_the_activation_and_stores_what_the_core_reads(prologue):
    check(CudaCase(f"{prologue}ConvStoreInput", 2, 5, 4, 9, 3, (3, 3), pads=(1, 1, 1, 1), slots=2), "bf16")


@pytest.mark.parametrize(
    ("case", "float32"),
    [
        (CudaCase(FULL, 4, 4, 4, 24, 40, (4, 4)), ("y",)),  # down to a pixel
        (CudaCase("NormalizeReluConvStoreInput", 4, 1, 1, 24, 40), ("x", "stored", "y")),
        (CudaCase("ConvStatistics", 2, 9, 9, 3, 16, (3, 3), (2, 2), (1, 1, 1, 1)), ("x",)),  # an image
        (CudaCase("NormalizeAddReluConvStoreInput", 2, 5, 5, 24, 16, (3, 3), pads=(1, 1, 1, 1)), ("skip",)),
    ],
    ids=["to-a-pixel", "of-a-pixel", "image", "skip"],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_maps_of_several_types(case, float32, precision):
    check(dataclasses.replace(case, others=tuple((name, "float32") for name in float32)), precision)


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        (CudaCase(FULL, 1, 12, 11, 40, 70, slots=8), "bf16"),
        (CudaCase(FULL, 2, 9, 8, 24, 40, (3, 3), pads=(1, 1, 1, 1), slots=8), "bf16"),
        (CudaCase("NormalizeConvStatistics", 1, 13, 14, 3, 70, (7, 7), (2, 2), (3, 3, 3, 3)), "fp32"),
    ],
    ids=["pointwise", "halo", "flat"],
)
def test_all_choices_compute_the_same(case, precision):
    problem = dataclasses.replace(case, dtype=STORED[precision]).problem()
    offered = choices(problem, gpu(precision))
    assert len({choice.plan for choice in offered}) == len(offered) > 1
    tiles = {}
    for choice in offered:  # how many blocks are to run side by side does not change what they do
        tiles.setdefault(dataclasses.replace(choice.plan, min_blocks=1), choice)
    for choice in tiles.values():
        check(case, precision, choice)


def test_a_map_whose_halo_does_not_fit_is_gathered():
    case = CudaCase(FULL, 1, 1, 1100, 10, 9, (3, 3), pads=(1, 1, 1, 1), dtype="bfloat16")
    offered = choices(case.problem(), gpu("bf16", "sm_86"))
    assert {choice.plan.read for choice in offered} == {"gather"}
    check(case, "bf16", arch="sm_86")


@st.composite
def cases(draw: st.DrawFn) -> CudaCase:
    """Convolutions of any geometry but depthwise ones."""
    group = draw(st.sampled_from([1, 1, 2, 3]))
    kernel, dilations = draw(st.tuples(*(st.integers(1, 4),) * 2)), draw(st.tuples(*(st.integers(1, 2),) * 2))
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = draw(st.tuples(*(st.integers(0, 3),) * 4))
    h, w = (max(1, reach[i] - pads[i] - pads[i + 2]) + draw(st.integers(0, 9)) for i in (0, 1))
    cin, cout = group * draw(st.integers(2, 24)), group * draw(st.integers(1, 24))
    strides, n = draw(st.tuples(*(st.integers(1, 3),) * 2)), draw(st.integers(1, 2))
    op = draw(st.sampled_from(PROLOGUES)) + "Conv" + draw(st.sampled_from(EPILOGUES))
    return CudaCase(op, n, h, w, cin, cout, kernel, strides, pads, dilations, group, draw(st.integers(0, 8)))


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(cases(), st.sampled_from(["bf16", "fp32"]))
def test_any_convolution(case, precision):
    check(case, precision)
