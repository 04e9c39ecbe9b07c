"""The backward Winograd kernel against the numpy reference in float64, and the choice between it and the direct one."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from conv_case import ConvCase, gradient_operands
from halves import as_held, rounding, targets
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
from bnfuse.runtime.kernels.cpu.conv_backward import algorithms, conv_backward
from bnfuse.runtime.kernels.cpu.conv_backward_shape import conv_shape
from bnfuse.runtime.kernels.cpu.winograd_backward_shape import WinogradTiles, choose_tiles, shares_blocks
from bnfuse.runtime.targets.target import CpuTarget

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

HOST = dataclasses.replace(resolve("cpu"), threads=2)
WIDE = CpuTarget("sapphirerapids", 16, 2)
FULL = "BatchNormGradNormalizeReluConvGradReluGradReduceAccumulate"
PLAIN = "ConvGrad"
ONES = (1, 1, 1, 1)


@dataclasses.dataclass(frozen=True)
class Case(ConvCase):
    """A 3x3 convolution of stride 1; `slots` widens the buffers of x, dx and dy and moves the maps inside."""

    kernel: tuple[int, int] = (3, 3)
    pads: tuple[int, int, int, int] = ONES

    @property
    def ranges(self) -> dict[str, int]:
        starts = {"grad_start": self.slots, "acc_start": self.slots}
        return {**starts, "grad_stop": self.slots + self.cout, "acc_stop": self.slots + self.cin}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an operand or a result in the file: dy and acc are wider than what is read of them."""
        out = tuple(size + self.pads[i] + self.pads[i + 2] - 2 for i, size in enumerate((self.h, self.w)))
        if name in ("weight", "dweight"):
            return self.cout, self.cin, 3, 3
        if name in MAPS_LIKE_DY:
            wide = 2 * self.slots if name == "dy" and "Slice" in self.op else 0
            return self.n, self.cout + wide, *out
        if name in (*MAPS_LIKE_X, "dx") or is_numbered_map(name):
            return self.n, self.cin, self.h, self.w
        if name == "acc":
            return self.n, self.cin + 2 * self.slots, self.h, self.w
        if is_of_images(name):
            return self.n, self.cin
        return (self.cout if name in ("grad_a", "grad_b", "grad_p", "grad_q", "grad_w", "dbias") else self.cin,)


def operands(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    return gradient_operands(case, np.random.default_rng(seed))


def errors(
    case: Case, target: CpuTarget, values: dict[str, np.ndarray], algorithm: str | None = "winograd"
) -> dict[str, float]:
    """Relative errors of the kernel's results against float64; what lies outside of the slots is checked on the way."""
    expected = reference.run(parse(case.op), values, case.attributes)
    slots = {"x": (case.cin + case.slots + 2, 2)} if case.slots else {}
    found = execute.operator(
        lambda problem, target: conv_backward(problem, target, algorithm),
        target,
        case.op,
        values,
        {name: case.shape(name) for name in parse(case.op).results},
        case.attributes,
        slots,
    )
    return {n: float(np.linalg.norm(found[n] - expected[n]) / np.linalg.norm(expected[n])) for n in found}


def check(case: Case, target: CpuTarget = HOST, tolerance: float = 1e-5) -> None:
    for name, error in errors(case, target, as_held(operands(case), target)).items():
        rounded = rounding(name, np.empty(case.shape(name)), target)
        assert error < tolerance + rounded, f"{name} of {case}: {error:.1e}"


CASES = [
    Case(FULL, 2, 14, 14, 64, 32),
    Case(FULL, 3, 7, 7, 37, 33, slots=5),  # odd maps, a last block of 5 channels
    Case(PLAIN, 1, 5, 3, 3, 5),  # fewer channels than lanes
    Case(PLAIN, 1, 1, 1, 16, 16),  # one pixel
    Case(PLAIN, 2, 6, 9, 40, 70, pads=(0, 2, 1, 3)),  # pads beyond the window's reach
    Case("ConvGradBiasGrad", 2, 16, 30, 17, 17, pads=(0, 0, 0, 0)),
    Case("ConvGradInputAddGradientReluGradReduceReduceOtherReduceOther", 4, 7, 7, 40, 36, pads=(2, 2, 2, 2)),
    Case("NormalizeClipConvGradBiasGradAddGradientClipGradReduceScale", 1, 9, 8, 20, 11),
    Case("NormalizeQuickGeluConvGradQuickGeluGrad", 1, 8, 8, 18, 16),
    Case("SliceBatchNormGradNormalizeReluConvGradReluGradReduce", 2, 10, 6, 24, 32, slots=7),
    Case("ConvGradInputAccumulate", 2, 5, 5, 16, 16, slots=3),
    Case("BatchNormGradNormalizeReluConvGradWeight", 2, 7, 7, 16, 40),
    Case(FULL, 8, 7, 7, 80, 264),  # blocks of channels transformed together, several images in a chunk
    Case("NormalizeReluConvGradReluGradReduceImageReduce", 8, 7, 7, 40, 33, slots=2),  # several images in a chunk
    Case("ConvGradAddGradientReluGradReduceImageGateHardSwish", 3, 14, 9, 37, 20),
    Case("ConvGradInputImageGate", 7, 3, 5, 36, 40, pads=(2, 2, 2, 2)),
    Case("ConvGradReduce", 1, 66, 6, 32, 32),  # the last chunk has fewer rows
]

SHARED = [  # far more weights than pixels: threads share the blocks of input channels
    Case(FULL, 3, 2, 2, 69, 37, slots=5),  # a last block of 5 channels
    Case("SliceBatchNormGradConvGradBiasGradAddGradientReluGradReduceReduceOther", 2, 3, 2, 96, 130, slots=3),
    Case("BatchNormGradNormalizeReluConvGradWeight", 2, 2, 1, 64, 80, pads=(0, 2, 1, 3)),
    Case("ConvGradInputReluGradReduceAccumulate", 1, 4, 4, 80, 33, slots=4),
]


@pytest.mark.parametrize("case", [*CASES, *SHARED], ids=str)
def test_gradients_of(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_threads_that_share_channels(case: Case) -> None:
    for threads in (1, 3):
        target = dataclasses.replace(HOST, threads=threads)
        assert shares_blocks(conv_shape(problem(case), threads), target)
        check(case, target)


OPERATORS = (
    PLAIN,
    "ConvGradBiasGradReluGradScale",
    "NormalizeReluConvGradAddGradientReluGradReduceReduceOtherAccumulate",
    "BatchNormGradNormalizeClipConvGradClipGradReduce",
    "BatchNormGradConvGradWeightBiasGrad",
    "NormalizeReluConvGradInputReluGradReduce",
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Convolutions with at least one output, of one or more chunks a thread."""
    pads = draw(st.tuples(*(st.integers(0, 3),) * 4))
    h, w = (max(1, 3 - pads[i] - pads[i + 2]) + draw(st.integers(0, 17)) for i in (0, 1))
    cin, cout = (draw(st.integers(1, 70)) for _ in "io")
    return Case(draw(st.sampled_from(OPERATORS)), draw(st.integers(1, 3)), h, w, cin, cout, pads=pads)


@settings(max_examples=10, derandomize=True, deadline=None, database=None)
@given(cases(), targets)
def test_gradients_of_any_map_and_padding(case: Case, target: CpuTarget) -> None:
    check(case, target, tolerance=2e-5)


@pytest.mark.parametrize(("mcpu", "lanes"), [("haswell", 8), ("nehalem", 4)])
def test_narrower_vectors(mcpu: str, lanes: int) -> None:
    check(Case(FULL, 2, 7, 9, 21, 18, slots=2), CpuTarget(mcpu, lanes, 2))


def test_more_threads_than_chunks() -> None:
    """A thread without a chunk adds nothing to dweight."""
    check(Case(FULL, 1, 3, 3, 5, 4), dataclasses.replace(HOST, threads=3))


def test_errors_are_those_of_the_direct_kernel() -> None:
    """dweight sums 6272 tiles of one sign; dx sums nine taps of 32 channels, of both signs."""
    case = Case("NormalizeReluConvGradReluGradReduce", 8, 56, 56, 32, 32)
    values = operands(case)
    values["dy"] = np.abs(values["dy"])
    winograd, direct = (errors(case, HOST, values, algorithm) for algorithm in ("winograd", "direct"))
    assert set(winograd) == {"dx", "dweight", "dbeta", "dgamma"}
    for name, error in winograd.items():
        assert error < max(3 * direct[name], 3e-7), f"{name}: {error:.1e}, direct {direct[name]:.1e}"


def test_the_winograd_kernel_is_chosen_where_it_pays() -> None:
    def chosen(case: Case) -> tuple[str, ...]:
        return algorithms(problem(case), WIDE)

    assert chosen(Case(FULL, 16, 56, 56, 128, 32)) == ("winograd", "direct")
    assert chosen(Case(FULL, 16, 7, 7, 512, 512)) == ("winograd", "direct")
    assert chosen(Case(PLAIN, 16, 224, 224, 3, 64)) == ("direct", "winograd")


def problem(case: Case, **attributes: object) -> execute.Problem:
    spec = parse(case.op)
    names = [name for name in (*spec.operands, *spec.results) if name in ("dy", "x", "grad_x", "dx")]
    maps = []
    for name in names:
        n, c, h, w = case.shape(name)
        maps.append((name, execute.MapType(n, h, w, c, c)))
    return execute.Problem(case.op, tuple(maps), tuple({**case.attributes, **attributes}.items()), case.shape("weight"))


@pytest.mark.parametrize("attributes", [{"strides": (2, 2)}, {"dilations": (1, 2)}, {"group": 2}], ids=str)
def test_other_convolutions_have_the_direct_kernel_alone(attributes: dict[str, object]) -> None:
    asked = problem(Case(PLAIN, 1, 8, 8, 64, 64), **attributes)
    assert algorithms(asked, WIDE) == ("direct",)
    with pytest.raises(BnfuseError, match="ConvGrad has no kernel 'winograd' for this shape; take direct"):
        conv_backward(asked, WIDE, "winograd")


def test_the_kernels_of_one_problem_have_different_keys() -> None:
    asked = problem(Case(PLAIN, 1, 8, 8, 64, 64))
    assert conv_backward(asked, WIDE, "winograd").key != conv_backward(asked, WIDE, "direct").key


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # images, rows of tiles; tiles of a micro-tile
        (Case(FULL, 16, 56, 56, 128, 32), (1, 4, 14)),
        (Case(FULL, 16, 14, 14, 128, 32), (2, 7, 14)),
        (Case(FULL, 1, 5, 5, 16, 16), (1, 2, 6)),
    ],
    ids=str,
)
def test_tiles(case: Case, expected: tuple[int, int, int]) -> None:
    tiles: WinogradTiles = choose_tiles(conv_shape(problem(case), 2), WIDE)
    assert (tiles.images, tiles.rows // 2, tiles.micro) == expected


def test_threads_share_channels_where_weights_outnumber_maps() -> None:
    def shared(*case: int) -> bool:
        return shares_blocks(conv_shape(problem(Case(FULL, *case)), 2), HOST)

    assert shared(32, 2, 2, 512, 512)
    assert not shared(32, 4, 4, 256, 256)
    assert not shared(16, 7, 7, 512, 512)


def test_inner_loops_keep_their_sums_in_registers() -> None:
    """The loops over k (28 sums) and over tiles (16 sums): nothing but loads of operands and multiply-adds."""
    kernel = conv_backward(problem(Case(FULL, 2, 28, 28, 64, 64)), WIDE, "winograd")
    executable = tir.compile_function(kernel.build(), WIDE)
    blocks = re.split(r"\n(?=\.\w+:)", executable.mod.inspect_source("asm"))
    loops = [block for block in blocks if block.count("vfmadd") in (16, 28) and re.search(r"\tj\w+\t", block)]
    tight = [body for body in (loop[: re.search(r"\tj\w+\t", loop).start()] for loop in loops) if "zmm" in body]
    counts = {body.count("vfmadd") for body in tight if "rsp" not in body and not re.search(r"zmm\d+, \S*\(", body)}
    assert counts == {16, 28}
