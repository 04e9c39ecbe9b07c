"""Forward convolutions of few channels by lines, in the interpreter, against the reference in float64."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from cuda_conv import CudaCase, assert_close, run_case
from cuda_kernels import ARCHITECTURES, assert_no_spills, gpu
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.runtime.kernels.cuda.conv_forward import choices, conv_forward
from bnfuse.runtime.kernels.cuda.conv_sizes import LinePlan, LineTeam, LineTile
from bnfuse.runtime.kernels.cuda.correlation import forward_correlation

TOLERANCE = 5e-5  # of norms, over what rounding the map costs
STEM = {"kernel": (7, 7), "strides": (2, 2), "pads": (3, 3, 3, 3)}
SAME = {"kernel": (3, 3), "pads": (1, 1, 1, 1)}


def offered(case: CudaCase, precision: str = "bf16", arch: str = "sm_90", multiprocessors: int = 4) -> list[LinePlan]:
    found = [choice.plan for choice in choices(case.problem(), gpu(precision, arch, multiprocessors))]
    return [plan for plan in found if isinstance(plan, LinePlan)]


def check(case: CudaCase, plan: LinePlan | None = None, precision: str = "bf16", operands=None) -> None:
    case = dataclasses.replace(case, dtype={"bf16": "bfloat16", "fp16": "float16"}[precision])
    assert offered(case, precision)
    generator = lambda problem, target: conv_forward(problem, target, "tile", plan)  # noqa: E731
    found, expected, _ = run_case(case, generator, gpu(precision), operands)
    assert_close(found, expected, case.dtype_of, TOLERANCE)


CASES = {
    "stem": CudaCase("ConvStatistics", 2, 12, 14, 3, 64, **STEM),
    "stem-of-40": CudaCase("ConvBiasReluStatistics", 1, 11, 18, 3, 40, **STEM),
    "same": CudaCase("ConvBiasRelu", 2, 5, 38, 3, 64, **SAME),
    "same-of-100": CudaCase("ConvBiasStatistics", 1, 4, 20, 3, 100, **SAME),
    "strided": CudaCase("ConvBiasStoreInputStatistics", 1, 9, 36, 3, 32, (3, 3), (2, 2)),
    "strided-by-three": CudaCase("ConvStatistics", 2, 10, 14, 5, 20, (3, 4), (3, 3), (1, 2, 0, 1)),
    "dilated": CudaCase("ConvStatistics", 1, 13, 22, 3, 17, (3, 3), (1, 1), (2, 1, 2, 1), (2, 1)),
    "asymmetric": CudaCase("ConvBias", 1, 6, 10, 2, 7, (2, 3), (1, 2), (1, 0, 0, 3)),
    "one-row-of-the-window": CudaCase("ConvStatistics", 3, 4, 13, 4, 33, (1, 5), pads=(0, 2, 0, 2)),
    "one-column-of-the-window": CudaCase("ConvStatistics", 2, 6, 6, 7, 9, (3, 1), pads=(2, 0, 1, 0)),
    "six-channels": CudaCase("Conv", 1, 5, 13, 6, 8, **SAME),
    "wider-than-the-image": CudaCase("ConvStatistics", 3, 3, 2, 3, 6, (3, 5), (3, 2), (5, 4, 6, 3)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_lines_compute_what_the_reference_does(case):
    check(case)


@pytest.mark.parametrize("name", ["stem", "same"])
def test_fp16(name):
    check(CASES[name], precision="fp16")


@pytest.mark.parametrize("name", ["stem", "same", "strided"])
def test_all_choices_compute_the_same(name):
    plans = offered(dataclasses.replace(CASES[name], dtype="bfloat16"), multiprocessors=2)
    assert len(set(plans)) == len(plans) > 2
    tiles = {dataclasses.replace(plan, min_blocks=1): plan for plan in plans}
    for plan in tiles.values():
        check(CASES[name], plan)


def test_a_map_of_another_type_is_written():
    check(dataclasses.replace(CASES["stem"], others=(("y", "float32"),)))


def test_what_is_not_finite_stays_within_its_windows():
    """A run of elements reaches beyond the window, where weights are zero: zero times infinity is none."""
    for name in ("stem", "same"):
        case = dataclasses.replace(CASES[name], dtype="bfloat16", op="Conv")
        operands = case.operands()
        operands["x"][0, :, 2, 5] = np.inf
        found, expected, _ = run_case(case, conv_forward, gpu("bf16"), operands)
        assert (np.isfinite(found["y"]) == np.isfinite(expected["y"])).all()
        assert not np.isfinite(expected["y"]).all()


@st.composite
def cases(draw: st.DrawFn) -> CudaCase:
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)).filter(lambda window: window != (1, 1)))
    cin, down = draw(st.integers(2, 7)), draw(st.integers(1, 2))
    pads = draw(st.tuples(*(st.integers(0, 3),) * 4))
    h = max(1, down * (kernel[0] - 1) + 1 - pads[0] - pads[2]) + draw(st.integers(0, 6))
    w = max(1, kernel[1] - pads[1] - pads[3]) + draw(st.integers(0, 30))
    w += w * cin % 2
    strides, n = draw(st.tuples(*(st.integers(1, 3),) * 2)), draw(st.integers(1, 2))
    op = draw(st.sampled_from(["ConvStatistics", "ConvBiasRelu", "ConvBiasReluStatistics"]))
    return CudaCase(op, n, h, w, cin, draw(st.integers(1, 70)), kernel, strides, pads, (down, 1), dtype="bfloat16")


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(cases().filter(offered), st.integers(0, 8))
def test_any_convolution(case, number):
    plans = offered(case, multiprocessors=1)  # blocks of several steps
    check(case, plans[number % len(plans)])


@pytest.mark.parametrize(
    "case",
    [
        CudaCase("NormalizeReluConv", 2, 12, 14, 3, 64, **STEM),  # a prologue
        CudaCase("Conv", 2, 12, 14, 3, 64, **STEM, slots=1),  # not dense
        CudaCase("Conv", 2, 12, 13, 3, 64, **STEM),  # lines that begin between two words
        CudaCase("Conv", 2, 12, 14, 6, 64, group=2, **SAME),
        CudaCase("Conv", 2, 12, 14, 3, 64, (3, 3), dilations=(1, 2)),
        CudaCase("Conv", 2, 12, 14, 3, 64, (11, 11), (4, 4)),  # weights that do not fit into registers
        CudaCase("Conv", 2, 12, 14, 8, 64, **SAME),  # not few
    ],
    ids=["prologue", "slots", "odd", "groups", "dilated", "large", "eight"],
)
def test_others_are_read_as_before(case):
    assert not offered(dataclasses.replace(case, dtype="bfloat16"))


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_products_of_32_bits_are_read_as_before(precision):
    assert not offered(CASES["stem"], precision)


NETWORKS = {
    "squeezenet1.0": CudaCase("ConvBiasRelu", 64, 224, 224, 3, 64, (3, 3), (2, 2), dtype="bfloat16"),
    "resnet50": CudaCase("ConvStatistics", 64, 224, 224, 3, 64, **STEM, dtype="bfloat16"),
    "vgg16-without-norms": CudaCase("ConvBiasRelu", 64, 224, 224, 3, 64, **SAME, dtype="bfloat16"),
    "vgg16": CudaCase("ConvStatistics", 64, 224, 224, 3, 64, **SAME, dtype="bfloat16"),
    "mobilenetv2": CudaCase("ConvStatistics", 64, 224, 224, 3, 32, (3, 3), (2, 2), (1, 1, 1, 1), dtype="bfloat16"),
}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("resnet50", LinePlan(64, 2, 2, 396, 3)),  # 14 times 16 pixels for two warps; 88 words of weights
        ("vgg16-without-norms", LinePlan(64, 2, 2, 528, 4)),
        ("vgg16", LinePlan(64, 2, 2, 396, 3)),
        ("mobilenetv2", LinePlan(32, 4, 4, 528, 4)),
        ("squeezenet1.0", LinePlan(64, 2, 3, 660, 5)),  # 111 rows
    ],
)
def test_the_rule(name, plan):
    assert offered(NETWORKS[name], multiprocessors=132)[0] == plan


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", NETWORKS)
def test_no_spills(name, arch):
    assert_no_spills(conv_forward(NETWORKS[name].problem(), gpu("bf16", arch, 132)))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_warp_reads_words_of_different_banks(name):
    """Words that are read at a time are the same or in different ones of the 32 banks."""
    plan = offered(NETWORKS[name], multiprocessors=132)[0]
    tile = LineTile(forward_correlation(NETWORKS[name].problem(), gpu("bf16")), plan, "bf16")
    words = {pixel * tile.apart_words + column for pixel, column in itertools.product(range(8), range(4))}
    assert len({word % 32 for word in words}) == len(words)


def test_threads_are_dealt_as_sums_are():
    team = LineTeam(8, 16, 8)
    assert [(team.vector(tid), team.lane(tid)) for tid in (0, 3, 4, 31, 32, 35, 64)] == [
        (0, 0), (3, 0), (0, 1), (3, 7), (4, 0), (7, 0), (0, 8),
    ]  # fmt: skip
    assert len({(team.vector(tid), team.lane(tid)) for tid in range(team.threads)}) == team.threads
