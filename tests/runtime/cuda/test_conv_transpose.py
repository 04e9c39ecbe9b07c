"""Transposed convolutions and their gradients on tensor cores, in the interpreter, against the reference in float64."""

from __future__ import annotations

import dataclasses

import pytest
from cuda_conv import STORED, TOLERANCES, CudaCase, assert_close, run_case
from cuda_kernels import ARCHITECTURES, assert_no_spills, gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from transposed_case import FORWARD, INPUT, WEIGHT, TransposedCase, cases

from bnfuse.opset.spec import parse
from bnfuse.runtime.kernels.cuda import conv_backward, conv_forward
from bnfuse.runtime.kernels.cuda.conv_sizes import LinePlan

FULL = FORWARD[3], INPUT[2], WEIGHT[3]


@dataclasses.dataclass(frozen=True)
class Case(CudaCase):
    """The shapes of a transposed convolution, in slots of a GPU's maps."""

    out, more, shape = TransposedCase.out, TransposedCase.more, TransposedCase.shape


def check(case: Case, precision: str, choice=None) -> None:
    module = conv_forward if parse(case.op).core == "ConvTransposeGradInput" else conv_backward
    make = module.conv_forward if module is conv_forward else module.conv_backward
    case = dataclasses.replace(case, dtype=STORED[precision])
    generator = lambda problem, target: make(problem, target, "tile", choice and choice.plan)  # noqa: E731
    found, expected, _ = run_case(case, generator, gpu(precision))
    assert_close(found, expected, case.dtype_of, TOLERANCES[precision])


SIZES = {
    "generator": ((2, 4, 4, 24, 40), {"kernel": (4, 4), "strides": (2, 2), "pads": (1, 1, 1, 1), "slots": 8}),
    "first": ((3, 1, 1, 33, 21), {"kernel": (4, 4), "slots": 3}),
    "last": ((2, 5, 6, 40, 3), {"kernel": (4, 4), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    "to-one-channel": ((1, 5, 6, 24, 1), {"kernel": (4, 4), "strides": (2, 2), "pads": (1, 1, 1, 1), "slots": 1}),
    "u-net": ((2, 7, 5, 32, 16), {"kernel": (2, 2), "strides": (2, 2)}),
    "padded-output": (
        (1, 7, 6, 17, 34),
        {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)},
    ),
    "odd": ((2, 7, 6, 17, 34), {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1), "slots": 1}),
    "same": ((2, 6, 7, 24, 40), {"kernel": (3, 3), "pads": (1, 1, 1, 1), "slots": 8}),
    "pointwise": ((2, 5, 5, 40, 33), {}),
    "groups": ((2, 5, 6, 24, 12), {"kernel": (3, 2), "strides": (2, 3), "pads": (0, 1, 2, 0), "group": 3}),
    "groups-of-8": ((1, 5, 6, 16, 32), {"kernel": (4, 4), "strides": (2, 2), "pads": (1, 1, 1, 1), "group": 2}),
    "phases-without-taps": ((2, 3, 4, 9, 10), {"kernel": (1, 2), "strides": (3, 2), "pads": (0, 0, 0, 1)}),
    "phases-without-pixels": ((2, 1, 1, 9, 10), {"kernel": (1, 3), "strides": (3, 2), "pads": (0, 0, 0, 2)}),
}


@pytest.mark.parametrize("op", FULL)
@pytest.mark.parametrize("name", SIZES)
def test_results_are_those_of_the_reference(name, op):
    """By turns in either precision: what is done to a map depends on its type nowhere but where it is read and written,
    and each size and each operator meets both."""
    sizes, more = SIZES[name]
    turn = list(SIZES).index(name) + FULL.index(op)
    check(Case(op, *sizes, **more), ("bf16", "fp32")[turn % 2])


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
@pytest.mark.parametrize("op", FULL)
def test_other_precisions(op, precision):
    sizes, more = SIZES["generator"]
    check(Case(op, *sizes, **more), precision)


@pytest.mark.parametrize("op", ["BatchNormGradSigmoidConvTransposeGradWeight", "SoftplusConvTransposeGradWeight"])
@pytest.mark.parametrize(
    ("sizes", "more"),
    [((2, 5, 7, 9, 10), {"kernel": (3, 3), "pads": (1, 1, 1, 1), "slots": 1}), ((1, 5, 3, 9, 10), {"slots": 3})],
    ids=["same", "pointwise"],
)
def test_what_an_activation_makes_of_pixels_that_are_not_there_is_not_summed(op, sizes, more):
    check(Case(op, *sizes, **more), "fp32")


@pytest.mark.parametrize("op", [op for op in (*FORWARD, *INPUT, *WEIGHT) if op not in FULL])
def test_operators(op):
    check(Case(op, 1, 4, 5, 19, 22, (4, 4), (2, 2), (1, 1, 1, 1), slots=2), "bf16")


@pytest.mark.parametrize("op", ["BatchNormGradConvTransposeGradInput", "BatchNormGradConvTransposeGradWeight"])
def test_maps_of_a_prologue_have_strides_of_their_own(op):
    """y is dense, and its gradient lies in the buffer of a Concat."""
    sizes, more = SIZES["last"]
    check(Case(op, *sizes, **more, wider=("grad_x",)), "fp32")


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(cases((*FORWARD, *INPUT, *WEIGHT), most=20), st.sampled_from(["bf16", "fp32"]))
def test_any_geometry(drawn, precision):
    if drawn.group > 1 and drawn.cout == drawn.group:
        drawn = dataclasses.replace(drawn, cout=2 * drawn.group)  # depthwise ones are lowered to others
    given = {field.name: getattr(drawn, field.name) for field in dataclasses.fields(drawn)}
    check(Case(**given), precision)


@pytest.mark.parametrize("op", FULL)
def test_all_choices_compute_the_same(op):
    sizes, more = SIZES["u-net"]
    case = Case(op, *sizes, **more, dtype="bfloat16")
    module = conv_forward if parse(op).core == "ConvTransposeGradInput" else conv_backward
    offered = module.choices(case.problem(), gpu("bf16"))
    plans = {}
    for choice in offered:
        each = choice.plan if isinstance(choice.plan, tuple) else (choice.plan,)
        plans.setdefault(tuple(plan and dataclasses.replace(plan, min_blocks=1) for plan in each), choice)
    assert len(plans) > 1
    for choice in list(plans.values())[:6]:
        check(case, "bf16", choice)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_lines_towards_the_input_have_no_spills(arch):
    """A generator's last layer: its epilogue reads maps, and sums."""
    op = "NormalizeReluConvTransposeGradInputAddGradientReluGradReduceAccumulate"
    case = Case(op, 64, 32, 32, 64, 3, (4, 4), (2, 2), (1, 1, 1, 1), dtype="bfloat16")
    target = gpu("bf16", arch, 132)
    assert isinstance(conv_forward.choices(case.problem(), target)[0].plan, LinePlan)
    assert_no_spills(conv_forward.conv_forward(case.problem(), target))
