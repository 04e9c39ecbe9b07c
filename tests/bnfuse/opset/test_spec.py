"""Names and steps of operators."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.spec import (
    ACTIVATION_GRADS,
    BACKWARD_CORES,
    CONV_GRADS,
    FORWARD_CORES,
    MASKED_REDUCTIONS,
    WEIGHT_GRADS,
    OpSpec,
    find,
    parse,
    parse_steps,
    skip_activation,
)

PROLOGUES = st.tuples(
    st.sampled_from(["", "Normalize"]),
    st.sampled_from(["", *ACTIVATIONS, *(f"Where {kind}" for kind in ACTIVATIONS)]),
    st.sampled_from(["", "Gate"]),
    st.sampled_from(
        ["", "Add", "AddNormalized", *(f"Skip{kind} Add" for kind in ACTIVATIONS), "SkipRelu SkipGate Add"]
    ),
    st.sampled_from(["", *ACTIVATIONS]),
)
EPILOGUES = st.tuples(
    *(st.sampled_from(["", step]) for step in ("Bias", "Relu", "StoreInput")),
    st.sampled_from(["", "Statistics", "ImageStatistics"]),
)
GRADIENT_PROLOGUES = st.tuples(
    *(st.sampled_from(["", step]) for step in ("Slice", "GateGrad")),
    st.sampled_from(
        [
            "",
            *(f"{kind} BatchNormGrad" for kind in ("", "AddGrad EluGrad", *ACTIVATION_GRADS)),
            "BatchNormGrad ReluGrad",
        ]
    ),
    st.sampled_from(["", "Normalize"]),
    st.sampled_from(["", *ACTIVATIONS, *(f"Where {kind}" for kind in ACTIVATIONS)]),
    st.sampled_from(["", "Gate"]),
)
AROUND = (("", ""), ("Where ", ""), ("", " AddSkipGradient"), ("Where ", " AddSkipGradient"))  # an ActivationGrad
GRADIENT_EPILOGUES = st.tuples(
    st.sampled_from(["", "BiasGrad"]),
    st.sampled_from(["", "AddGradient", "AddGatedGradient", "AddBatchNormGrad", "AddGradient AddBatchNormGrad"]),
    st.sampled_from(["", *(f"{where}{kind}Grad{more}" for kind in ACTIVATIONS for where, more in AROUND)]),
    st.sampled_from(["", "Reduce"]),
    st.sampled_from(["", "ReduceOther", "ReduceGated ReduceOther", "ReduceOther Part ReduceOther", *MASKED_REDUCTIONS]),
    st.sampled_from(["", "Scale", "Accumulate", "ImageReduce", "ImageReduceOther", "ImageGate", "ImageGateClip"]),
)


def of_one_name(first: str, second: str) -> bool:
    """Whether two activations have an attribute in common, which one operator cannot give both."""
    return bool({*ACTIVATIONS[first].attributes} & {*ACTIVATIONS[second].attributes})


def steps(words) -> tuple[str, ...]:
    return tuple(step for word in words for step in word.split())


@settings(max_examples=300, derandomize=True)
@given(PROLOGUES, st.sampled_from([*FORWARD_CORES]), EPILOGUES)
def test_forward_steps_come_back_from_their_name(prologue, core, epilogue):
    written = (steps(prologue), core, steps(epilogue))
    read = parse_steps("".join((*written[0], core, *written[2])))
    activations = [step for step in written[0] if step in ACTIVATIONS]
    shared = len(activations) == 2 and of_one_name(*activations)
    skip = skip_activation(written[0])
    shared |= skip is not None and any(kind != skip and of_one_name(kind, skip) for kind in activations)
    ambiguous = (len(activations) == 2 and not prologue[3]) or shared
    assert read == (None if ambiguous else written)


@settings(max_examples=300, derandomize=True)
@given(GRADIENT_PROLOGUES, st.sampled_from([*BACKWARD_CORES]), GRADIENT_EPILOGUES)
def test_backward_steps_come_back_from_their_name(prologue, core, epilogue):
    written = (steps(prologue), core, steps(epilogue))
    read = parse_steps("".join((*written[0], core, *written[2])))
    without_dx = core in WEIGHT_GRADS and {*written[2]} - {"BiasGrad"}
    without_dx = without_dx or (core == "ConvTransposeGradInput" and "BiasGrad" in written[2])
    masked = "".join(step.removesuffix("Grad") for step in written[2] if step.removesuffix("Grad") in ACTIVATIONS)
    grads = [step for step in (*written[0], *written[2]) if step in ACTIVATION_GRADS]
    grads += [MASKED_REDUCTIONS[step] for step in written[2] if step in MASKED_REDUCTIONS]
    kinds = {*(step for step in written[0] if step in ACTIVATIONS), *(step.removesuffix("Grad") for step in grads)}
    kinds |= {"Clip"} if "ImageGateClip" in written[2] else set()
    shared = any(of_one_name(*pair) for pair in itertools.combinations(kinds, 2))
    behind_gate = prologue[5] and ({"Reduce", "ImageReduce"} & {*written[2]} or (core not in CONV_GRADS and not masked))
    behind_gate = behind_gate or (prologue[5] and prologue[4] and masked)
    assert read == (None if without_dx or shared or behind_gate else written)


@pytest.mark.parametrize(
    "name", ["NormalizeWhereConv", "ReluWhereConv", "ConvGradWhere", "ConvGradWhereReduce", "WhereAddReluConv"]
)
def test_a_choice_of_channels_is_of_an_activation(name):
    assert parse(name) is None


@pytest.mark.parametrize("core", ["Conv", "Pointwise"])
def test_every_pair_of_activations_around_an_add_is_told_apart(core):
    for first in ("", *ACTIVATIONS):
        for add in ("Add", "AddNormalized"):
            for second in ("", *ACTIVATIONS):
                read = parse_steps(f"{first}{add}{second}{core}")
                shared = first and second and of_one_name(first, second)
                assert read == (None if shared else (steps((first, add, second)), core, ()))


def test_every_activation_and_gradient_around_a_core_is_told_apart():
    for first in ("", *ACTIVATIONS):
        for core in BACKWARD_CORES:
            if core in WEIGHT_GRADS:
                continue
            for masked in ("", *ACTIVATIONS):
                after = (f"{masked}Grad",) if masked else ()
                read = parse_steps("".join((first, core, *after)))
                shared = first and masked and first != masked and of_one_name(first, masked)
                assert read == (None if shared else (steps((first,)), core, after))


@settings(max_examples=200, derandomize=True)
@given(GRADIENT_PROLOGUES, st.sampled_from([*BACKWARD_CORES]), GRADIENT_EPILOGUES)
def test_operands_and_results_have_one_name_each(prologue, core, epilogue):
    op = parse("".join((*steps(prologue), core, *steps(epilogue))))
    if op is not None:
        for names in (op.operands, op.results, op.attributes):
            assert len({*names}) == len(names)


NO_NAMES = [
    "",
    "Normalize",
    "ConvTanh",
    "ConvReluBias",
    "ReluReluConv",
    "AddPlusConv",
    "PlusPointwise",
    "ClipAddClipConv",
    "BatchNormalization",
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_other_names_are_no_operators(name):
    assert find(name) is None


def test_steps_out_of_order_are_refused():
    with pytest.raises(ValueError, match="Relu Normalize Conv"):
        OpSpec(("Relu", "Normalize"), "Conv")
