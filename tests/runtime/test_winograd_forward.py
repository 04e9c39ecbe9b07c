"""Winograd's forward convolution against the numpy reference in float64, and the rule that chooses it."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np
import pytest
from halves import targets
from hypothesis import given, settings
from hypothesis import strategies as st
from source_files import load

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.conv_forward import algorithms, conv_forward
from bnfuse.runtime.kernels.cpu.tiles import conv_shape
from bnfuse.runtime.kernels.cpu.winograd_forward_shape import (
    FAR_BYTES,
    TILE_BYTES,
    choose_winograd_tiles,
    shares_blocks,
    whole_squares,
)
from bnfuse.runtime.targets.target import CpuTarget

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

direct = load(pathlib.Path(__file__).with_name("test_conv_forward.py"))
Case, FULL, AVX512 = direct.Case, direct.FULL, direct.AVX512
winograd = functools.partial(conv_forward, algorithm="winograd")
WINDOW = (3, 3)
SAME = (1, 1, 1, 1)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(FULL, 2, 14, 14, 64, 32, WINDOW, pads=SAME, slots=5), id="whole-micro-tiles"),
        pytest.param(Case(FULL, 3, 7, 7, 20, 48, WINDOW, pads=SAME, slots=1), id="odd-sizes-several-images"),
        pytest.param(Case(FULL, 1, 60, 50, 40, 36, WINDOW, pads=SAME), id="several-tiles-blocks-and-output-blocks"),
        pytest.param(Case(FULL, 1, 5, 6, 600, 40, WINDOW, pads=SAME), id="many-channels"),
        pytest.param(
            Case("NormalizeReluConvBiasStoreInputStatistics", 2, 9, 30, 7, 5, WINDOW, pads=(1, 0, 0, 1)),
            id="asymmetric",
        ),
        pytest.param(
            Case("NormalizeReluConvStoreInput", 1, 6, 5, 9, 3, WINDOW, pads=(4, 3, 3, 4)), id="squares-in-the-padding"
        ),
        pytest.param(Case("ConvBiasStatistics", 5, 3, 3, 1, 1, WINDOW), id="one-output-an-image"),
        pytest.param(Case("ConvBiasImageStatistics", 5, 3, 3, 9, 17, WINDOW), id="images-of-one-output"),
        pytest.param(Case("ReluConvImageStatistics", 7, 7, 5, 20, 48, WINDOW, pads=SAME, slots=1), id="small-images"),
        pytest.param(Case("ConvReluImageStatistics", 2, 60, 50, 40, 36, WINDOW, pads=SAME), id="images-in-tiles"),
        pytest.param(Case("ConvBiasReluStatistics", 2, 9, 7, 12, 33, WINDOW, pads=SAME), id="before-a-relu"),
    ],
)
def test_convolution_is_that_of_the_reference(case):
    direct.check(case, generator=winograd)


SHARED = [  # far more weights than pixels: threads share the blocks of output channels
    Case(FULL, 3, 2, 2, 37, 69, WINDOW, pads=SAME, slots=5),  # a last block of 5 channels
    Case("NormalizeReluConvBiasStoreInputStatistics", 2, 3, 2, 20, 70, WINDOW, pads=SAME),
    Case("ConvBiasRelu", 1, 4, 3, 130, 80, WINDOW, pads=(1, 0, 0, 1), slots=2),
]


@pytest.mark.parametrize("case", SHARED, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_that_share_channels(case, threads):
    target = CpuTarget("haswell", 8, threads)
    height, width = (size + case.pads[i] + case.pads[i + 2] - 2 for i, size in enumerate((case.h, case.w)))
    asked = direct.problem(case, (height, width))
    assert shares_blocks(asked, conv_shape(asked), target)
    direct.check(case, target, generator=winograd)


@pytest.mark.parametrize("target", [CpuTarget("haswell", 8, 2), CpuTarget("x86-64", 4, 1)], ids=["avx2", "sse"])
def test_other_vector_lengths_and_thread_counts(target):
    direct.check(Case(FULL, 2, 6, 5, 13, 21, WINDOW, pads=SAME), target, generator=winograd)


@st.composite
def cases(draw: st.DrawFn) -> Any:
    pads = draw(st.tuples(*(st.integers(0, 2) for _ in range(4))))
    h = draw(st.integers(max(1, 3 - pads[0] - pads[2]), 17))
    w = draw(st.integers(max(1, 3 - pads[1] - pads[3]), 33))
    cin, cout = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    op = draw(st.sampled_from(direct.PROLOGUES)) + "Conv" + draw(st.sampled_from(direct.EPILOGUES))
    return Case(op, draw(st.integers(1, 3)), h, w, cin, cout, WINDOW, pads=pads, slots=draw(st.integers(0, 17)))


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(cases(), targets)
def test_any_3x3_convolution(case, target):
    direct.check(case, target, tolerance=5e-6, generator=winograd)


def error(case: Any, operands: dict[str, np.ndarray], generator: Any) -> float:
    found, expected = direct.run(case, operands, generator=generator)
    return float(np.linalg.norm(found["y"] - expected["y"]) / np.linalg.norm(expected["y"]))


@pytest.mark.parametrize("offset", [0.0, 1e3], ids=["centred", "far-from-zero"])
def test_error_is_of_the_order_of_that_of_the_direct_algorithm(offset):
    case = Case("ReluConv", 1, 14, 14, 128, 32, WINDOW, pads=SAME)
    operands = case.operands(np.random.default_rng(4))
    operands["x"] += np.float32(offset)
    assert error(case, operands, winograd) < 4 * error(case, operands, conv_forward_direct)


conv_forward_direct = functools.partial(conv_forward, algorithm="direct")


def test_variance_far_from_zero_is_accurate():
    """Against the float64 variance of the float32 map that the kernel stored, where squares hang over."""
    case = Case("ConvBiasStatistics", 3, 9, 11, 16, 33, WINDOW, pads=SAME)
    operands = case.operands(np.random.default_rng(2))
    operands["weight"] /= np.sqrt(np.prod(operands["weight"].shape[1:]))
    operands["bias"] = np.full(case.cout, 1e3, np.float32)
    found, _ = direct.run(case, operands, generator=winograd)
    y = found["y"].astype(np.float64)
    np.testing.assert_allclose(found["mean"], y.mean(axis=(0, 2, 3)), rtol=1e-7)
    np.testing.assert_allclose(found["variance"], y.var(axis=(0, 2, 3)), rtol=1e-5)


def test_inner_loop_is_multiplications_in_registers():
    """14 squares x 2 vectors: 28 FMAs a channel, two loads of weights, no stack; one loop for all 16 places."""
    case = Case(FULL, 1, 28, 28, 64, 128, WINDOW, pads=SAME)
    kernel = conv_forward(direct.problem(case, (28, 28)), AVX512, "winograd")
    assembly = tir.compile_function(kernel.build(), AVX512).mod.inspect_source("asm")
    bodies = [b for b in direct.innermost_loops(assembly) if sum("vfmadd" in line for line in b) >= 20]
    assert len(bodies) == 1
    (body,) = bodies
    unrolled, rest = divmod(sum("vfmadd" in line for line in body), 28)
    assert rest == 0
    assert not [line for line in body if "%rsp" in line]
    assert len(body) <= unrolled * (28 + 14 + 2) + 8


def problem(size: int, cin: int, cout: int, batch: int = 16, **changes: Any) -> Any:
    case = Case(FULL, batch, size, size, cin, cout, WINDOW, **{"pads": SAME, **changes})
    stride = case.strides[0]
    return direct.problem(case, (-(-size // stride),) * 2)


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        ((56, 128, 32), "winograd"),
        ((14, 128, 32), "winograd"),
        ((56, 64, 64), "winograd"),
        ((28, 512, 512), "winograd"),
        ((14, 512, 512), "winograd"),
        ((7, 128, 32), "winograd"),
        ((7, 512, 512), "direct"),
        ((224, 3, 64), "direct"),
    ],
)
def test_rule_chooses_the_faster_algorithm_and_offers_both(shape, first):
    found = algorithms(problem(*shape), AVX512)
    assert found[0] == first
    assert set(found) == {"direct", "winograd"}


def test_threads_share_channels_where_weights_outnumber_maps():
    target = CpuTarget("znver3", 8, 2)

    def shared(*shape: int) -> bool:
        asked = problem(*shape)
        return shares_blocks(asked, conv_shape(asked), target)

    assert shared(2, 512, 512, 32)
    assert algorithms(problem(2, 512, 512, 32), target)[0] == "winograd"
    assert algorithms(problem(2, 512, 512, 4), target)[0] == "direct"  # weights are too many for that
    assert not shared(4, 256, 256, 32)
    assert not shared(7, 512, 512, 16)


@pytest.mark.parametrize("changes", [{"strides": (2, 2)}, {"group": 2}, {"dilations": (2, 2), "pads": (2, 2, 2, 2)}])
def test_other_convolutions_are_direct_and_asking_for_more_is_an_error(changes):
    other = problem(14, 64, 64, **changes)
    assert algorithms(other, AVX512) == ("direct",)
    with pytest.raises(BnfuseError, match="no algorithm 'winograd' for this convolution; choose from direct"):
        conv_forward(other, AVX512, "winograd")


def test_algorithms_make_kernels_of_different_names():
    names = {conv_forward(problem(14, 64, 64), AVX512, name).name for name in ("direct", "winograd")}
    assert len(names) == 2


@pytest.mark.parametrize("shape", [(56, 128, 32), (7, 128, 32), (7, 512, 512), (14, 512, 512), (224, 64, 64)])
def test_tiles_fit_the_cache(shape):
    convolution = conv_shape(problem(*shape))
    even, tiles = whole_squares(convolution), choose_winograd_tiles(convolution, AVX512)
    assert tiles.packed_bytes(even) <= TILE_BYTES
    assert tiles.patch_bytes <= FAR_BYTES
    assert tiles.block % tiles.micro == 0
    assert 8 <= tiles.micro <= 14
    assert tiles.rows % 2 == 0
