"""Forward convolution kernels against the numpy reference in float64."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import tvm
from conv_case import ConvCase
from halves import HALVES, as_held, of_stored, rounding, targets
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError
from bnfuse.opset import reference
from bnfuse.opset.spec import parse
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.conv_forward import conv_forward
from bnfuse.runtime.kernels.cpu.depthwise_forward import choose_depthwise_tiles
from bnfuse.runtime.kernels.cpu.tiles import balanced, choose_tiles, conv_shape, flatten, tile_bytes
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.targets.target import CpuTarget

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

TARGET = dataclasses.replace(resolve("cpu"), threads=2)
AVX512 = CpuTarget("skylake-avx512", 16, 2)
FULL = "NormalizeReluConvStatistics"
PROLOGUES = (
    "",
    "Relu",
    "Normalize",
    "NormalizeRelu",
    "NormalizeClip",
    "NormalizeQuickGelu",
    "AddRelu",
    "NormalizeAddRelu",
    "ReluAddNormalized",
    "NormalizeAddNormalizedRelu",
    "NormalizeReluAddRelu",
    "NormalizeWhereRelu",
    "Gate",
    "NormalizeHardSwishGate",
    "NormalizeReluGateSkipReluSkipGateAddNormalized",
    "WhereQuickGeluAddRelu",
)
EPILOGUES = (
    *(
        "",
        "Bias",
        "Statistics",
        "BiasReluImageStatistics",
        "BiasStatistics",
        "StoreInput",
        "BiasStoreInputStatistics",
        "Relu",
        "BiasReluStatistics",
    ),
)


@dataclasses.dataclass(frozen=True)
class Case(ConvCase):
    """Each map has `slots` channels before and after it in its buffer."""

    def operands(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        shapes = {
            "x": (self.n, self.cin, self.h, self.w),
            "skip": (self.n, self.cin, self.h, self.w),
            **dict.fromkeys(("gate", "skip_gate"), (self.n, self.cin, 1, 1)),
            "weight": (self.cout, self.cin // self.group, *self.kernel),
            "bias": (self.cout,),
        }
        names = parse(self.op).operands
        return {name: rng.standard_normal(shapes.get(name, (self.cin,)), np.float32) for name in names}


def run(
    case: Case, operands: dict[str, np.ndarray], target: CpuTarget = TARGET, generator: Any = conv_forward
) -> tuple[dict, dict]:
    """What the generator's kernel finds and what the reference expects."""
    wide = {name: value.astype(np.float64) for name, value in operands.items()}
    expected = reference.run(parse(case.op), wide, case.attributes)
    shapes = {name: value.shape for name, value in expected.items()}
    channels = {"x": case.cin, "skip": case.cin, "stored": case.cin, "y": case.cout}
    slots = {name: (count + 2 * case.slots, case.slots) for name, count in channels.items()}
    found = execute.operator(generator, target, case.op, operands, shapes, case.attributes, slots)
    return found, expected


def check(case: Case, target: CpuTarget = TARGET, tolerance: float = 2e-6, generator: Any = conv_forward) -> None:
    operands = as_held(case.operands(np.random.default_rng(0)), target)
    found, expected = run(case, operands, target, generator)
    for name, value in of_stored(expected, found, target).items():
        error = np.linalg.norm(found[name] - value) / (np.linalg.norm(value) + 1e-30)
        assert error < tolerance + rounding(name, value, target), f"{name} of {case}: {error:.1e}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(FULL, 2, 6, 5, 33, 70, slots=3), id="flat-1x1-with-tails"),
        pytest.param(Case(FULL, 1, 7, 8, 700, 40), id="flat-1x1-in-blocks-of-channels"),
        pytest.param(
            Case("NormalizeAddReluConvStoreInputStatistics", 2, 7, 7, 20, 17, strides=(2, 2)), id="1x1-strided"
        ),
        pytest.param(Case(FULL, 2, 14, 14, 64, 32, (3, 3), pads=(1, 1, 1, 1), slots=5), id="3x3"),
        pytest.param(Case(FULL, 3, 7, 7, 20, 48, (3, 3), pads=(1, 1, 1, 1)), id="3x3-two-rows-a-micro-tile"),
        pytest.param(Case(FULL, 2, 5, 6, 300, 40, (3, 3), pads=(1, 1, 1, 1)), id="3x3-in-blocks-of-channels"),
        pytest.param(Case("ConvBias", 1, 7, 9, 5, 7, (3, 2), (2, 1), (1, 0, 2, 1)), id="rectangular-asymmetric"),
        pytest.param(Case("ReluConvStatistics", 1, 40, 31, 6, 9, (5, 5), pads=(2, 2, 2, 2)), id="5x5-several-tiles"),
        pytest.param(Case("ConvBiasStatistics", 2, 23, 23, 3, 64, (7, 7), (2, 2), (3, 3, 3, 3)), id="stem-7x7"),
        pytest.param(Case("NormalizeReluConvImageStatistics", 5, 6, 5, 33, 40, slots=3), id="1x1-of-images"),
        pytest.param(Case("ConvImageStatistics", 7, 2, 2, 20, 17), id="1x1-of-small-images"),
        pytest.param(Case("ReluConvBiasImageStatistics", 3, 9, 7, 6, 9, (5, 3), (2, 1)), id="5x3-of-images"),
        pytest.param(Case("ConvImageStatistics", 3, 5, 4, 700, 40), id="1x1-of-images-in-blocks-of-channels"),
        pytest.param(Case("Conv", 1, 27, 27, 3, 16, (11, 11), (4, 4), (2, 2, 2, 2)), id="stem-11x11"),
        pytest.param(Case("ReluConvStatistics", 5, 4, 3, 10, 36, (4, 3)), id="window-as-large-as-the-image"),
        pytest.param(Case("NormalizeReluConv", 2, 9, 9, 18, 20, (3, 3), (2, 2), (2, 1, 2, 1), (2, 3)), id="dilated"),
        pytest.param(Case(FULL, 2, 3, 3, 4, 6, (3, 3), (3, 3), (5, 4, 6, 3)), id="windows-in-the-padding"),
        pytest.param(Case(FULL, 2, 6, 6, 24, 36, (3, 3), pads=(1, 1, 1, 1), group=3), id="grouped"),
        pytest.param(Case(FULL, 2, 9, 9, 21, 21, (3, 3), pads=(1, 1, 1, 1), group=21, slots=1), id="depthwise"),
        pytest.param(
            Case("NormalizeConvBiasReluStatistics", 2, 9, 9, 21, 21, (3, 3), pads=(1, 1, 1, 1), group=21, slots=1),
            id="depthwise-before-a-relu",
        ),
        pytest.param(
            Case("NormalizeReluConvBiasStoreInputStatistics", 1, 8, 7, 5, 15, (5, 3), (2, 1), (2, 1, 2, 1), group=5),
            id="depthwise-with-multiplier",
        ),
        pytest.param(
            Case("NormalizeReluConvStoreInputStatistics", 1, 30, 40, 1000, 1000, (3, 3), pads=(1, 1, 1, 1), group=1000),
            id="depthwise-in-blocks-of-channels",
        ),
    ],
)
def test_convolution_is_that_of_the_reference(case):
    check(case)


@pytest.mark.parametrize("prologue", PROLOGUES)
def test_every_prologue_pads_with_zeros_after_the_activation_and_stores_what_the_core_reads(prologue):
    check(Case(f"{prologue}ConvStoreInput", 2, 5, 4, 5, 3, (3, 3), pads=(1, 1, 1, 1), slots=2))


@pytest.mark.parametrize("target", [CpuTarget("haswell", 8, 2), CpuTarget("x86-64", 4, 1)], ids=["avx2", "sse"])
def test_other_vector_lengths_and_thread_counts(target):
    check(Case(FULL, 2, 6, 5, 13, 21, (3, 3), pads=(1, 1, 1, 1)), target)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    group = draw(st.sampled_from([1, 1, 1, 2, 5]))
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dilations = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = draw(st.tuples(*(st.integers(0, 3) for _ in range(4))))
    h = draw(st.integers(max(1, reach[0] - pads[0] - pads[2]), 20))
    w = draw(st.integers(max(1, reach[1] - pads[1] - pads[3]), 40))
    cin, cout = (group * draw(st.integers(1, 40 // group)) for _ in range(2))
    strides = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    op = draw(st.sampled_from(PROLOGUES)) + "Conv" + draw(st.sampled_from(EPILOGUES))
    n, slots = draw(st.integers(1, 3)), draw(st.integers(0, 17))
    return Case(op, n, h, w, cin, cout, kernel, strides, pads, dilations, group, slots)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(FULL, 1, 7, 8, 700, 40, slots=3), id="flat-1x1-in-blocks-of-channels"),
        pytest.param(Case("ConvBiasStatistics", 2, 23, 23, 3, 64, (7, 7), (2, 2), (3, 3, 3, 3)), id="stem-7x7"),
        pytest.param(Case("NormalizeReluConvImageStatistics", 5, 6, 5, 33, 40, slots=3), id="1x1-of-images"),
        pytest.param(
            Case("NormalizeAddReluConvStoreInputStatistics", 2, 7, 7, 20, 17, strides=(2, 2)), id="1x1-strided"
        ),
        pytest.param(Case(FULL, 2, 9, 9, 21, 21, (3, 3), pads=(1, 1, 1, 1), group=21, slots=1), id="depthwise"),
    ],
)
def test_maps_of_16_bits_are_widened_and_rounded_once(case):
    check(case, HALVES)


@settings(max_examples=14, deadline=None, derandomize=True, database=None)
@given(cases(), targets)
def test_any_convolution(case, target):
    check(case, target, tolerance=5e-6)


def test_x_and_y_may_be_slots_of_one_buffer():
    """As in a dense block: the kernel reads a prefix of the channels and writes those after it."""
    channels, growth, stride, pixels = 19, 13, 40, 2 * 5 * 5
    maps = (("x", MapType(2, 5, 5, channels, stride)), ("y", MapType(2, 5, 5, growth, stride)))
    case = Case("ReluConv", 2, 5, 5, channels, growth, (3, 3), pads=(1, 1, 1, 1))
    kernel = conv_forward(Problem(case.op, maps, tuple(case.attributes.items()), (growth, channels, 3, 3)), TARGET)
    rng = np.random.default_rng(1)
    buffer, weight = execute.aligned((pixels, stride)), execute.aligned((growth, channels, 3, 3))
    for array in (buffer, weight):
        array[...] = rng.standard_normal(array.shape, np.float32)
    before = buffer.copy()
    x = before[:, :channels].reshape(2, 5, 5, channels).transpose(0, 3, 1, 2).astype(np.float64)
    y = reference.run(parse(case.op), {"x": x, "weight": weight.astype(np.float64)}, case.attributes)["y"]
    shared = tvm.runtime.from_dlpack(buffer.reshape(-1))
    execute.compile_kernel(kernel)(shared, tvm.runtime.from_dlpack(weight.reshape(-1)), shared, 0, channels)
    stop = channels + growth
    np.testing.assert_allclose(buffer[:, channels:stop], y.transpose(0, 2, 3, 1).reshape(pixels, growth), 1e-4, 1e-4)
    before[:, channels:stop] = buffer[:, channels:stop]
    np.testing.assert_array_equal(buffer, before)


@pytest.mark.parametrize(
    "case",
    [
        Case("ConvBiasStatistics", 3, 20, 21, 16, 33),
        Case("ConvBiasStatistics", 3, 20, 21, 16, 16, (3, 3), pads=(1, 1, 1, 1), group=16),
    ],
    ids=["gemm", "depthwise"],
)
def test_variance_far_from_zero_is_accurate(case):
    """Against the float64 variance of the float32 map that the kernel stored. One channel does not vary at all."""
    operands = case.operands(np.random.default_rng(2))
    operands["weight"] /= np.sqrt(np.prod(operands["weight"].shape[1:]))
    operands["bias"] = np.full(case.cout, 1e3, np.float32)
    operands["weight"][3] = 0
    found, _ = run(case, operands)
    y = found["y"].astype(np.float64)
    mean, variance = y.mean(axis=(0, 2, 3)), y.var(axis=(0, 2, 3))
    moving = np.arange(case.cout) != 3
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-7)
    np.testing.assert_allclose(found["variance"][moving], variance[moving], rtol=1e-5)
    assert 0 <= found["variance"][3] < 1e-7 * 1e3


def problem(case: Case, out: tuple[int, int]) -> Problem:
    maps = (
        ("x", MapType(case.n, case.h, case.w, case.cin, case.cin)),
        ("y", MapType(case.n, *out, case.cout, case.cout)),
    )
    weight = (case.cout, case.cin // case.group, *case.kernel)
    return Problem(case.op, maps, tuple(case.attributes.items()), weight)


def test_inner_loop_is_multiplications_in_registers():
    """14 pixels x 2 vectors: 28 FMAs a channel, two loads of weights, no stack."""
    kernel = conv_forward(problem(Case(FULL, 1, 28, 28, 64, 128), (28, 28)), AVX512)
    assembly = tir.compile_function(kernel.build(), AVX512).mod.inspect_source("asm")
    bodies = [b for b in innermost_loops(assembly) if sum("vfmadd" in line for line in b) >= 20]
    assert len(bodies) == 1
    (body,) = bodies
    unrolled, rest = divmod(sum("vfmadd" in line for line in body), 28)
    assert rest == 0
    assert not [line for line in body if "%rsp" in line]
    assert len(body) <= unrolled * (28 + 14 + 2) + 8
    assert "TVMBackendAllocWorkspace" in assembly and assembly.count("zmm") > assembly.count("(%rsp), %zmm") * 20


def innermost_loops(assembly: str) -> list[list[str]]:
    """The instructions from a label to a jump back to it, where no other label lies between."""
    lines = [line for line in assembly.splitlines() if not re.match(r"\s*\.(loc|cfi)|\.Ltmp", line)]
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if re.match(r"\.LBB\w+:", line)}
    found = []
    for i, line in enumerate(lines):
        jump = re.match(r"\s+j\w+\s+(\.LBB\w+)", line)
        if jump and labels.get(jump[1], i) < i and not any(labels[jump[1]] < at < i for at in labels.values()):
            found.append([text for text in lines[labels[jump[1]] + 1 : i + 1] if text.startswith("\t")])
    return found


@pytest.mark.parametrize(
    ("case", "out", "vectors", "micro", "channels"),
    [
        (Case(FULL, 16, 56, 56, 64, 128), (56, 56), 2, (1, 14, 1), 64),
        (Case(FULL, 16, 14, 14, 992, 128), (14, 14), 2, (1, 14, 1), 496),
        (Case(FULL, 16, 56, 56, 128, 32, (3, 3), pads=(1, 1, 1, 1)), (56, 56), 2, (1, 1, 14), 128),
        (Case(FULL, 16, 7, 7, 128, 32, (3, 3), pads=(1, 1, 1, 1)), (7, 7), 2, (1, 2, 7), 128),
        (Case(FULL, 16, 32, 32, 16, 48, (3, 3), pads=(1, 1, 1, 1)), (32, 32), 3, (1, 1, 8), 16),
        (Case(FULL, 16, 2, 2, 16, 32, (2, 2)), (1, 1), 2, (8, 1, 1), 16),
        (Case(FULL, 16, 8, 8, 16, 12, (3, 3), pads=(1, 1, 1, 1)), (8, 8), 1, (1, 3, 8), 16),
    ],
)
def test_tiles(case, out, vectors, micro, channels):
    shape = flatten(conv_shape(problem(case, out)))
    tiles = choose_tiles(shape, AVX512)
    assert (tiles.vectors, tiles.micro, tiles.channels) == (vectors, micro, channels)
    assert tiles.rows % tiles.micro_rows == 0 or tiles.rows == shape.oh
    assert tile_bytes(shape, tiles) <= 384 << 10


def test_depthwise_tile_is_short_enough_for_the_cache_and_the_threads():
    case = Case(FULL, 1, 112, 112, 96, 96, (3, 3), pads=(1, 1, 1, 1), group=96)
    tiles = choose_depthwise_tiles(conv_shape(problem(case, (112, 112))), AVX512)
    assert tiles.channels == 96
    assert (tiles.rows + 2) * 114 * 96 * 4 <= 384 << 10


@pytest.mark.parametrize(("total", "most", "size"), [(32, 14, 11), (56, 14, 14), (7, 14, 7), (15, 14, 8), (1, 14, 1)])
def test_pieces_are_few_and_even(total, most, size):
    assert balanced(total, most) == size


def test_a_map_beyond_int32_is_refused():
    case = Case("Conv", 1 << 14, 512, 512, 1, 1)
    with pytest.raises(BnfuseError, match="Conv: x has 4294967296 elements, more than int32 can index: use a smaller"):
        conv_forward(problem(case, (512, 512)), TARGET)
