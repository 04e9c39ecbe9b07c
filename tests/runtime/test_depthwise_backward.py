"""The depthwise backward kernel: any geometry, its tiles, and what its inner loop keeps in registers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from halves import as_held, rounding
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.opset import reference
from bnfuse.opset.spec import parse
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.conv_backward import conv_backward
from bnfuse.runtime.kernels.cpu.conv_backward_shape import conv_shape
from bnfuse.runtime.kernels.cpu.depthwise_backward import choose_tiles
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.targets.cpus import features_of, missing_features
from bnfuse.runtime.targets.target import CpuTarget

pytestmark = pytest.mark.usefixtures("optimized")

WIDE = CpuTarget("sapphirerapids", 16, 2)
LANES = (8,) if missing_features(features_of("skylake-avx512")) else (8, 16)
OPS = (
    "ConvGradBiasGrad",
    "NormalizeReluConvGradInputReluGradReduce",
    "BatchNormGradNormalizeClipConvGradWeight",
    "BatchNormGradNormalizeClipConvGradClipGradReduce",
)


def problem(op: str, n: int, size: tuple[int, int], channels: int, kernel: tuple[int, int], **geometry) -> Problem:
    attributes = {
        "dilations": geometry.get("dilations", (1, 1)),
        "group": channels,
        "kernel_shape": kernel,
        "pads": geometry.get("pads", (kernel[0] // 2, kernel[1] // 2) * 2),
        "strides": geometry.get("strides", (1, 1)),
        "min": -0.5,
        "max": 0.75,
    }
    out = reference.window_counts(size, attributes)
    x, y = (MapType(n, h, w, channels, channels) for h, w in (size, out))
    spec = parse(op)
    kinds = {"dy": y, "grad_x": y, "x": x, "dx": x}
    maps = tuple((name, kinds[name]) for name in (*spec.operands, *spec.results) if name in kinds)
    used = tuple((name, attributes[name]) for name in spec.attributes)
    return Problem(op, maps, used, (channels, 1, *kernel))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Depthwise convolutions, also of more taps than registers, with tails of vectors, rows and columns."""
    kernel, strides, dilations = (draw(st.tuples(st.integers(1, k), st.integers(1, k))) for k in (7, 3, 2))
    pads = draw(st.tuples(*(st.integers(0, 3),) * 4))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    size = tuple(max(1, reach[i] - pads[i] - pads[i + 2]) + draw(st.integers(0, 9)) for i in (0, 1))
    op, n, channels = draw(st.sampled_from(OPS)), draw(st.integers(1, 2)), draw(st.integers(2, 40))
    return problem(op, n, size, channels, kernel, strides=strides, dilations=dilations, pads=pads)


@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(problems(), st.sampled_from(LANES), st.sampled_from(("fp32", "bf16")))
def test_gradients_of_any_depthwise_convolution(p: Problem, lanes: int, precision: str) -> None:
    target = CpuTarget({8: "haswell", 16: "skylake-avx512"}[lanes], lanes, 2, precision)
    rng, spec = np.random.default_rng(0), parse(p.op)
    shapes = {name: (k.n, k.c, k.h, k.w) for name, k in p.maps} | {"weight": p.weight, "dweight": p.weight}
    channels = (p.map("x").c,)
    values = {
        name: rng.standard_normal(shapes.get(name, channels)).astype(np.float32).astype(np.float64)
        for name in spec.operands
    }
    values = as_held(values, target)
    expected = reference.run(spec, values, dict(p.attributes))
    results = {name: expected[name].shape for name in spec.results}
    found = execute.operator(conv_backward, target, p.op, values, results, dict(p.attributes))
    for name in spec.results:
        error = np.linalg.norm(found[name] - expected[name])
        bound = 2e-5 + rounding(name, expected[name], target)
        assert error < bound * np.linalg.norm(expected[name]) + 1e-6, (name, p)


@pytest.mark.parametrize(
    ("size", "channels", "kernel", "stride", "tiles"),
    [
        # rows, strip, block, taps
        (112, 96, 3, 2, (14, 1, 96, 9)),
        (14, 576, 3, 1, (7, 4, 576, 9)),
        (28, 240, 5, 1, (7, 2, 240, 25)),
        (14, 2048, 7, 1, (1, 1, 1024, 21)),  # too many taps: three rows of the kernel a pass
    ],
)
def test_tiles(size: int, channels: int, kernel: int, stride: int, tiles: tuple[int, ...]) -> None:
    p = problem(OPS[-1], 16, (size, size), channels, (kernel, kernel), strides=(stride, stride))
    found = choose_tiles(conv_shape(p, 2), WIDE)
    assert (found.rows, found.strip, found.block, found.taps) == tiles


def test_inner_loop_stores_nothing_but_dx() -> None:
    """9 products for dweight and 9 for dx an input; the sums stay in registers."""
    p = problem("NormalizeReluConvGradReluGradReduce", 2, (32, 32), 64, (3, 3))
    code = str(tir.compile_function(conv_backward(p, WIDE).build(), WIDE).mod.inspect_source("asm"))
    blocks = re.split(r"\n(?=\.\w+:)", code)
    loops = [block[: jump.start()] for block in blocks if (jump := re.search(r"\tj\w+\t", block))]
    inner = [loop for loop in loops if loop.count("vfmadd") >= 18 and "prefetch" in loop]
    assert inner
    for loop in inner:
        assert len(re.findall(r"\tvmov\w+\t%zmm\d+, .*\(", loop)) == 1, loop
        assert not re.search(r"%zmm\d+, -?\d*\(%rsp\)", loop), loop
