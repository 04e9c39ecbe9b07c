"""Function bodies, executed by onnxruntime, against the numpy reference in float64."""

import dataclasses
import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError
from bnfuse.opset import functions
from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.plain import BASELINE_OPS, LOCAL_OPS, PLAIN_OPS, RANK_OPS, SAMPLING_OPS, WHOLE_OPS
from bnfuse.opset.spec import (
    ACTIVATION_GRADS,
    BACKWARD_CORES,
    DOMAIN,
    FORWARD_CORES,
    IMAGE_GATES,
    IMAGE_REDUCTIONS,
    MASKED_REDUCTIONS,
    SAMPLEWISE,
    of_skip,
    parse,
)

NAMES = (
    "NormalizeReluConvStatistics",
    "NormalizeAddReluConvBiasStoreInputStatistics",
    "ReluAddNormalizedClipConvStoreInput",
    "NormalizeSkipHardSwishAddPointwise",
    "NormalizeTanhSkipLeakyReluAddNormalizedLeakyReluPointwiseStatistics",
    "NormalizeQuickGeluConvBias",
    "NormalizeReluConvBiasReluStoreInputStatistics",
    "NormalizeReluMaxPoolStatistics",
    "ReluAveragePoolStoreInputStatistics",
    "NormalizeClipGlobalAveragePool",
    "NormalizeReluResampleStatistics",
    "NormalizeReluPointwise",
    "AddPointwiseStoreInputStatistics",
    "Pointwise",
    "SliceBatchNormGradNormalizeReluConvGradReluGradReduceAccumulate",
    "BatchNormGradConvGradBiasGradAddGradientReluGradReduceReduceOtherReduceOther",
    "NormalizeClipConvGradClipGradReduceScale",
    "BatchNormGradReluConvGradAddGradientAddBatchNormGradReluGradReduceOther",
    "NormalizeSigmoidMaxPoolGradAddBatchNormGradSigmoidGradAddSkipGradientReduceScale",
    "NormalizeQuickGeluConvGradQuickGeluGradReduce",
    "SliceBatchNormGradReluConvGradInputReluGradAccumulate",
    "ConvGradInput",
    "BatchNormGradNormalizeReluConvGradWeightBiasGrad",
    "NormalizeReluConvTransposeBiasStatistics",
    "AddConvTransposeStoreInput",
    "SliceBatchNormGradNormalizeReluConvTransposeGradInputReluGradReduceAccumulate",
    "BatchNormGradNormalizeTanhConvTransposeGradWeightBiasGrad",
    "SliceMaxPoolGradAddGradientReluGradReduceScale",
    "NormalizeMaxPoolGradReluGradAccumulate",
    "NormalizeAveragePoolGradReluGradReduce",
    "GlobalAveragePoolGradAddGradientReluGradReduceReduceOther",
    "BatchNormGradNormalizeResampleGradReluGradReduce",
    "BatchNormGradPointwiseGrad",
    "SlicePointwiseGradAccumulate",
    "NormalizePointwiseGradReluGradReduce",
    "PointwiseGradAddGradientScale",
    "NormalizeAddNormalizedPlusPlusNormalizedReluPointwiseStatistics",
    "NormalizeHardSwishGateConvStatistics",
    "BatchNormGradNormalizeReluSkipHardSwishAddNormalizedConvGradBiasGradReduceReduceOther",
    "NormalizeSkipGateAddConvTransposeGradWeight",
    "NormalizeGateAddNormalizedReluPointwiseStatistics",
    "NormalizeGateSkipReluSkipGateAddNormalizedReluConv",
    "NormalizeQuickGeluGateGlobalAveragePool",
    "GateGradBatchNormGradNormalizeReluGateConvGradBiasGradAddGradientReduceOtherReduceGated",
    "SliceGateGradPointwiseGradReduceGatedReduceOtherScale",
    "BatchNormGradNormalizeGateClipConvGradBiasGradClipGrad",
    "NormalizeGatePointwiseGradQuickGeluGradReduceOther",
    "GateGradLeakyReluGradBatchNormGradNormalizeLeakyReluConvGradAddGradientReduceLeakyReluGradReduceOther",
    "BatchNormGradGeluGradReluConvGradBiasGradReluGradReduceReduceSigmoidGrad",
    "GateGradAddGradReluGradBatchNormGradConvGradReduceReduceAddedReluGradReduceOther",
    "SliceReluGradBatchNormGradTanhGradPointwiseGradAddGradientReduceMishGradReduceGated",
    "NormalizeGlobalAveragePoolGradAddGatedGradientReluGradReduceReduceGated",
    "BatchNormGradNormalizeReluConvGradReluGradReducePartReduceOtherReduceOtherPartReduceMishGrad",
    "PointwiseGradPartReduceGatedPartReduceAddedReluGradScale",
    *(f"Normalize{name}ConvGrad{name}GradReduce" for name in ACTIVATIONS),
    "NormalizeReluConvBiasImageStatistics",
    "BatchNormGradNormalizeReluConvGradReluGradReduceImageReduce",
    "PointwiseGradAddGradientImageReduce",
    "BatchNormGradNormalizeHardSwishGateConvGradImageGateHardSwish",
    "PointwiseGradAddGradientReluGradReduceOtherImageGate",
    "BatchNormGradNormalizeReluConvGradAddGradientReluGradImageReduceOther",
    "NormalizeWhereLeakyReluAddReluConvBias",
    "BatchNormGradNormalizeWhereQuickGeluConvGradAddGradientWhereQuickGeluGradReduce",
    "NormalizeAveragePoolGradWhereReluGradReduceScale",
    "NormalizeWhereReluConvTransposeGradWeight",
    *PLAIN_OPS,
)


@pytest.mark.parametrize("name", NAMES)
def test_body_computes_what_the_reference_does(name, case, assert_close):
    it = case(name)
    assert_close(it.run_body(), it.expected())


@pytest.mark.parametrize("name", [name for name in NAMES if (op := parse(name)) and {*op.operands} & {*SAMPLEWISE}])
def test_body_takes_coefficients_of_each_sample(name, case, assert_close):
    it = case(name, by_sample=True)
    assert_close(it.run_body(), it.expected())


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMES)
def test_bodies_are_exact_where_their_floats_are_float64(name, case, assert_close, oracle):
    """Nothing in a body is for float32 alone: an interpreter that takes all floats as float64 is a yardstick."""
    it = case(name)
    found = oracle.evaluate(it.model(), it.operands, "float64")
    stored = {key: float(np.float32(value)) for key, value in it.attributes.items() if isinstance(value, float)}
    assert_close(found, dataclasses.replace(it, attributes={**it.attributes, **stored}).expected(), 1e-12)


def test_the_list_has_every_step_and_core():
    found = {step for name in NAMES if (op := parse(name)) for step in (*op.prologue, op.core, *op.epilogue)}
    found = {step for step in found if not of_skip(step) and step not in (*MASKED_REDUCTIONS, *IMAGE_GATES)}
    grammar = {*FORWARD_CORES, *BACKWARD_CORES, *ACTIVATIONS, *ACTIVATION_GRADS}
    grammar |= {"Normalize", "Add", "AddNormalized", "Bias", "StoreInput", "Statistics", "Slice", "BatchNormGrad"}
    grammar |= {"BiasGrad", "AddGradient", "AddBatchNormGrad", "Where", "AddSkipGradient"}
    grammar |= {"Gate", "SkipGate", "GateGrad", "AddGatedGradient", "ReduceGated", "AddGrad", "Plus", "PlusNormalized"}
    grammar |= {
        "Reduce",
        "ReduceOther",
        "Part",
        "Scale",
        "Accumulate",
        "ImageStatistics",
        "ImageReduce",
        "ImageReduceOther",
    }
    assert found == grammar


def optional(*choices: str) -> st.SearchStrategy[str]:
    return st.sampled_from(["", *choices])


FORWARD_NAMES = st.tuples(
    optional("Normalize"),
    optional(*ACTIVATIONS, *(f"Where{name}" for name in ACTIVATIONS)),
    optional("Gate"),
    optional(
        "Add", "AddNormalized", *(f"Skip{name}Add" for name in ACTIVATIONS), "SkipReluAddNormalized", "SkipGateAdd"
    ),
    st.sampled_from([*FORWARD_CORES]),
    optional("Bias"),
    optional("Relu"),
    optional("StoreInput"),
    optional("Statistics", "ImageStatistics"),
)
BACKWARD_NAMES = st.tuples(
    optional("Slice"),
    optional("GateGrad"),
    optional(
        "BatchNormGrad",
        *(f"{name}BatchNormGrad" for name in (*ACTIVATION_GRADS, "AddGradEluGrad")),
        "BatchNormGradTanhGrad",
    ),
    optional("Normalize"),
    optional(*ACTIVATIONS, *(f"Where{name}" for name in ACTIVATIONS)),
    optional("Gate"),
    st.sampled_from([*BACKWARD_CORES]),
    optional("BiasGrad"),
    optional("AddGradient", "AddGatedGradient"),
    optional("AddBatchNormGrad"),
    optional(*ACTIVATION_GRADS, *(f"Where{name}" for name in ACTIVATION_GRADS), "ReluGradAddSkipGradient"),
    optional("Reduce"),
    optional("ReduceOther", "ReduceGated", "PartReduceOther", "ReduceOtherPartReduceReluGrad", *MASKED_REDUCTIONS),
    optional("Scale", "Accumulate", *IMAGE_REDUCTIONS),
)
SAMPLED = [op.name for op in (*SAMPLING_OPS, *LOCAL_OPS, *RANK_OPS, *BASELINE_OPS)]
SHAPES_OF_SAMPLES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(4, 9), st.integers(4, 9))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.one_of(FORWARD_NAMES, BACKWARD_NAMES), SHAPES, st.integers(0, 9))
def test_any_composition_of_steps_has_a_right_body(case, assert_close, parts, shape, seed):
    name = "".join(parts)
    if parse(name) is not None:
        it = case(name, shape=shape, seed=seed)
        assert_close(it.run_body(), it.expected(), 3e-5)


CONVOLUTIONS = [
    {"kernel_shape": [1, 1], "pads": [0, 0, 0, 0]},
    {"kernel_shape": [1, 1], "pads": [0, 0, 0, 0], "strides": [2, 2]},
    {"kernel_shape": [3, 2], "pads": [1, 0, 2, 1], "strides": [2, 1]},
    {"dilations": [2, 1], "pads": [2, 1, 2, 1]},
    {"group": 2},
    {"group": 6, "strides": [2, 2]},
    {"kernel_shape": [7, 7], "pads": [3, 3, 3, 3], "strides": [2, 2]},
]


TRANSPOSED = [
    {"kernel_shape": [4, 4], "strides": [2, 2]},
    {"kernel_shape": [2, 2], "pads": [0, 0, 0, 0], "strides": [2, 2]},
    {"kernel_shape": [3, 2], "pads": [1, 0, 2, 1], "strides": [2, 3], "output_padding": [1, 2]},
    {"dilations": [2, 3], "pads": [2, 0, 1, 1]},
    {"group": 2, "strides": [2, 2], "output_padding": [1, 1]},
    {"kernel_shape": [1, 1], "pads": [0, 0, 0, 0], "strides": [3, 2]},
]


@pytest.mark.parametrize("name", [name for name in NAMES if "ConvTransposeGrad" in name])
def test_gradients_where_the_output_is_padded_by_strides(name, case, assert_close):
    """The convolution of dy has windows behind those of x. (onnxruntime's ConvTranspose is wrong here.)"""
    it = case(name, conv={"dilations": [2, 3], "pads": [2, 0, 1, 1], "output_padding": [1, 2]})
    assert_close(it.run_body(), it.expected(), 1e-5)


@pytest.mark.parametrize("conv", TRANSPOSED, ids=str)
@pytest.mark.parametrize("name", NAMES[NAMES.index("NormalizeReluConvTransposeBiasStatistics") :][:4])
def test_transposed_convolutions_of_any_window(name, conv, case, assert_close):
    it = case(name, conv=conv)
    assert_close(it.run_body(), it.expected(), 1e-5)


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("name", ["NormalizeReluConv", "NormalizeReluConvGradReluGrad", "ConvGradWeight"])
def test_convolutions(name, conv, case, assert_close):
    it = case(name, conv=conv, out_channels=conv.get("group", 5))
    assert_close(it.run_body(), it.expected())


@st.composite
def windows(draw) -> dict[str, list[int] | int]:
    """A convolution of any strides, dilations, pads and groups, the channels of each group and the size of its map."""
    pair = lambda low, high: [draw(st.integers(low, high)) for _ in range(2)]  # noqa: E731
    kernel, dilations = pair(1, 3), pair(1, 3)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = [draw(st.integers(0, span)) for span in spans * 2]
    least = [max(1, span - pads[i] - pads[i + 2]) for i, span in enumerate(spans)]
    extent = [draw(st.integers(low, low + 6)) for low in least]
    own = {"kernel_shape": kernel, "dilations": dilations, "pads": pads, "strides": pair(1, 4)}
    return {**own, "group": draw(st.integers(1, 3)), "channels": pair(1, 3), "extent": extent}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(windows(), st.integers(1, 3), st.sampled_from(["ConvGrad", "NormalizeReluConvGradBiasGradReluGradReduce"]))
def test_gradients_of_any_convolution(case, assert_close, window, batch, name):
    conv = dict(window)
    (into, out), extent = conv.pop("channels"), conv.pop("extent")
    shape = (batch, into * conv["group"], *extent)
    it = case(name, shape=shape, out_channels=out * conv["group"], conv=conv)
    assert_close(it.run_body(), it.expected(), 3e-5)


# kernel, stride, pads (the second window leaves rows unread, the last overlaps nothing)
POOLS = [(2, 2, [0, 0, 0, 0]), (3, 2, [1, 1, 1, 1]), (3, 3, [0, 1, 1, 0]), (2, 3, [0, 0, 0, 0]), (3, 1, [1, 1, 1, 1])]


@pytest.mark.parametrize("kernel, stride, pads", POOLS)
@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3, 8, 7), (1, 1, 6, 9)])
def test_gradient_of_average_pool(kernel, stride, pads, include, ceil, shape, case, assert_close):
    pool = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": pads, "count_include_pad": include}
    it = case("AveragePoolGrad", shape=shape, pool={**pool, "ceil_mode": ceil})
    assert_close(it.run_body(), it.expected())


@pytest.mark.parametrize("kernel, stride, pads", POOLS)
@pytest.mark.parametrize("dilation", [1, 2])
def test_max_pool_and_its_gradient(kernel, stride, pads, dilation, case, assert_close):
    pool = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": pads, "dilations": [dilation] * 2}
    for name in ("ReluMaxPool", "MaxPoolGrad"):  # after a Relu many values are equal: the first is the maximum
        it = case(name, pool=pool)
        assert_close(it.run_body(), it.expected())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "name, opset",
    [
        *((name, 13) for name in ("NormalizeClipConvStatistics", "AveragePoolGrad")),
        ("SliceNormalizeReluConvGradReduceAccumulate", 13),
        *((name, 16) for name in ("MaxPoolGrad", "AveragePoolGrad")),
        *((name, 21) for name in ("NormalizeClipConvStatistics", "AveragePoolGrad", "MaxPoolGrad")),
        ("SliceNormalizeReluConvGradReduceAccumulate", 21),
    ],
)
def test_opsets_and_unknown_shapes(name, opset, dynamic, case, assert_close):
    it = case(name)
    assert_close(it.run_body(opset, dynamic=dynamic), it.expected())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from([*SAMPLED]), SHAPES_OF_SAMPLES, st.integers(0, 9))
def test_samples_of_odd_shapes(case, assert_close, name, shape, seed):
    """Batches of one, maps of one element, boxes and points at their bounds."""
    it = case(name, shape=shape, seed=seed)
    assert_close(it.run_body(), it.expected(), 3e-5)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("opset, dynamic", [(13, False), (21, False), (17, True)])
def test_sampled_statistics_in_other_opsets_and_of_unknown_shapes(name, opset, dynamic, case, assert_close):
    it = case(name)
    assert_close(it.run_body(opset, dynamic=dynamic), it.expected())


RANKS = [(5, 3), (3, 4, 7), (2, 3, 4, 5), (2, 3, 2, 3, 4), (1, 1, 1)]


@pytest.mark.parametrize("shape", RANKS, ids=str)
@pytest.mark.parametrize("op", WHOLE_OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("opset, dynamic", [(13, True), (17, False), (21, True)])
def test_whole_operators_take_maps_of_any_rank(op, shape, opset, dynamic, case, assert_close):
    it = case(op.name, shape=shape)
    assert_close(it.run_body(opset, dynamic=dynamic), it.expected())


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("label", [-100, -1, 6, 2**31 - 1])
def test_row_of_a_label_that_is_no_class_is_zero_where_its_loss_does_not_count(kind, label, case):
    it = case("SoftmaxCrossEntropyGrad", shape=(4, 6))
    it.operands["labels"] = it.operands["labels"].astype(kind)
    it.operands["labels"][2], it.operands["dlosses"][2] = label, 0
    dscores = it.run_body()["dscores"]
    assert not dscores[2].any() and np.isfinite(dscores).all() and dscores[1].any()


def test_whole_batch_norm_survives_a_mean_of_a_thousand_standard_deviations(case, assert_close):
    it = case("BatchNorm", shape=(8, 3, 40, 40))
    it.operands["x"] += np.float32(1000)
    assert_close(it.run_body(), it.expected(), 1e-4)


def test_nothing_but_the_sample_changes(case):
    for name in ("AddSampled", "AddAtPoints", "LocalAddSampled"):
        it = case(name, shape=(4, 3, 5, 4))
        dx, expected = it.run_body()["dx"], it.expected()["dx"]
        untouched = expected == it.operands["acc"]
        assert 0 < untouched.mean() < 1
        assert np.array_equal(dx[untouched], it.operands["acc"][untouched])


def test_statistics_survive_a_mean_of_a_thousand_standard_deviations(case, assert_close):
    it = case("BatchNormStatistics", shape=(8, 3, 40, 40))
    it.operands["x"] += np.float32(1000)
    assert_close(it.run_body(), it.expected(), 1e-5)


def test_statistics_of_constant_channels_are_exact(case):
    it = case("ConvStatistics")
    it.operands["weight"][:] = 0
    assert np.array_equal(it.run_body()["variance"], np.zeros(4))


def test_gradient_of_a_relu_is_zero_at_zero(case):
    it = case("PointwiseGradReluGrad")
    it.operands["x"][:] = 0
    assert not it.run_body()["dx"].any()


def test_gradient_of_a_clip_is_one_at_its_bounds(case):
    it = case("PointwiseGradClipGrad", min=-1.0, max=2.0)
    it.operands["x"] = np.resize(np.float32([-1.5, -1, 2, 2.5]), it.operands["x"].shape)
    it.operands["dy"][:] = 1
    assert it.run_body()["dx"].ravel()[:4].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "name, wanted", [("ConvGrad", [True, True]), ("ConvGradInput", [True, False]), ("ConvGradWeight", [False, True])]
)
def test_a_gradient_of_a_convolution_computes_what_it_gives(name, wanted):
    found = {node.op_type for node in functions.function_for(parse(name), 17)}
    assert ["ConvTranspose" in found, "Loop" in found] == wanted


def test_gradient_of_max_pool_needs_opset_16():
    op = parse("MaxPoolGradReluGrad")
    assert functions.why_not(op, 16) is None
    assert re.search("15.*needs 16", functions.why_not(op, 15))
    with pytest.raises(BnfuseError, match=r"MaxPoolGradReluGrad .* Convert the model to a later opset"):
        functions.function_for(op, 15)


def test_nothing_is_older_than_opset_13():
    assert "needs 13" in functions.why_not(parse("NormalizePointwise"), 12)


@pytest.mark.parametrize("name", NAMES)
def test_bodies_use_only_allowed_operators(name):
    """Nothing that changed between 13 and 21 in more than the types it takes, and no gradient of a pool."""
    op = parse(name) or PLAIN_OPS[name]
    for node in functions.function_for(op, 17).all_nodes():
        assert node.domain == ""
        assert node.op_type not in ("MaxPoolGrad", "AveragePoolGrad", "ReduceMean", "BatchNormalization")
        assert onnx.defs.has(node.op_type, max_inclusive_version=21)


# add_functions


def relu_map_model() -> ir.Model:
    return ir.from_onnx_text("""
        <ir_version: 9, opset_import: ["": 17, "ai.bnfuse": 1]>
        g (float[1,2,3,3] x, float[2] a, float[2] b) => (float[1,2,3,3] y) {
            y = ai.bnfuse.NormalizeReluPointwise(x, a, b)
        }""")


def test_add_functions_adds_what_is_used_and_removes_the_rest():
    model = relu_map_model()
    stale = functions.function_for(parse("ConvGradInput"), 17)
    model.functions[stale.identifier()] = stale
    functions.add_functions(model)
    assert [*model.functions] == [(DOMAIN, "NormalizeReluPointwise", "")]
    assert model.opset_imports == {"": 17, DOMAIN: 1}


def test_add_functions_removes_what_nothing_needs_any_more():
    model = relu_map_model()
    functions.add_functions(model)
    model.graph[0].domain, model.graph[0].op_type = "", "Sum"
    functions.add_functions(model)
    assert (model.functions, model.opset_imports) == ({}, {"": 17})


def test_add_functions_follows_the_opset_of_the_model():
    model = relu_map_model()
    functions.add_functions(model)
    model.opset_imports[""] = 18
    functions.add_functions(model)
    assert [function.opset_imports[""] for function in model.functions.values()] == [18]


def test_add_functions_twice_changes_nothing():
    model = relu_map_model()
    functions.add_functions(model)
    once = ir.to_proto(model)
    functions.add_functions(model)
    assert ir.to_proto(model) == once


def test_unknown_operator_is_named():
    model = relu_map_model()
    model.graph[0].name, model.graph[0].op_type = "n7", "ReluNormalizeMap"
    with pytest.raises(BnfuseError, match=r"node 'n7' \(ai.bnfuse::ReluNormalizeMap\)"):
        functions.add_functions(model)
