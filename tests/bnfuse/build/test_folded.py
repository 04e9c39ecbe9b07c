"""Files whose BatchNorms an exporter took away are refused where that is known, and told where it is likely."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exported import called, norm_of_module
from onnx import helper

from bnfuse.build import build
from bnfuse.build.named import build_model
from bnfuse.core.errors import BnfuseError

RECIPE = 'torch.onnx.export(net.train(), (images,), "net.onnx", dynamo=True, optimize=False)'
FX = "aten._native_batch_norm_legit_no_training.default"


def convolution(name: str, x: str, y: str, weight: str = "", bias: str = "") -> onnx.NodeProto:
    operands = [x, weight or f"{name}.weight", bias or f"{name}.bias"]
    return helper.make_node("Conv", operands, [y], name=f"/{name}/Conv", pads=[1, 1, 1, 1])


def network(forward, nodes: list[onnx.NodeProto], producer: str = "") -> onnx.ModelProto:
    """x [2, 3, 6, 6] through convolutions of 3 channels; every operand that nothing computes gets random values."""
    rng = np.random.default_rng(0)
    known, values = {"x", *(name for node in nodes for name in node.output)}, {}
    for node in nodes:
        for index, name in enumerate(node.input):
            if name not in known:
                shape = (3, 3, 3, 3) if node.op_type == "Conv" and index == 1 else (3,)
                values[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    model = forward(nodes, values)
    model.producer_name = producer
    return model


def refusal(model: onnx.ModelProto, **options) -> str:
    with pytest.raises(BnfuseError) as caught:
        build(model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def folded_by_dynamo(forward) -> onnx.ModelProto:
    nodes = [
        called(convolution("c1", "x", "a"), "bn_1", FX, ["%conv", "%p_bn1_weight"], "bn1"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        called(convolution("c2", "r", "y"), "bn_2", FX, ["%conv_1", "%p_bn2_weight"], "bn2"),
    ]
    return network(forward, nodes, "pytorch")


def test_what_torchs_exporter_says_to_have_folded_is_refused_with_the_remedy(forward):
    for options in ({}, {"train_bn": True}):
        text = refusal(folded_by_dynamo(forward), **options)
        assert text.startswith("2 BatchNorms were folded away by its exporter (bn1, bn2)")
        assert RECIPE in text and "--train-bn" in text and text.endswith("--allow-folded-bn builds the file as it is")


def test_it_is_built_as_it_is_on_request(forward, step):
    built = build(folded_by_dynamo(forward), allow_folded_bn=True)
    assert built.notes == () and len(built.warnings) == 1
    assert built.warnings[0] == "2 BatchNorms were folded away by the exporter (bn1, bn2) and will not be trained"
    assert np.isfinite(step(built.model)[0]["loss"])


def test_a_file_of_which_some_batch_norms_were_folded_is_refused(forward):
    nodes = [
        called(convolution("c1", "x", "a"), "bn_1", FX, ["%conv", "%p_bn1_weight"], "bn1"),
        norm_of_module("a", "y", ["s", "b", "m", "v"], "pre"),
    ]
    assert refusal(network(forward, nodes, "pytorch"), train_bn=True).startswith("a BatchNorm was folded away")


@pytest.mark.parametrize(
    "said",
    [
        {"namespace": ": net.Net/bn1: torch.nn.modules.batchnorm.BatchNorm2d/bn: aten.batch_norm.default"},
        {"namespace": ": net.Net/bn1: torch.nn.modules.batchnorm.BatchNorm2d"},
        {"pkg.torch.onnx.class_hierarchy": "['net.Net', 'torch.nn.modules.batchnorm.BatchNorm2d', 'aten.batch_norm']"},
        {"pkg.onnxscript.rewriter.rule_name": "RemoveOptionalBiasFromConv, FuseBatchNormIntoConv"},
    ],
)
def test_any_word_of_the_exporter_will_do(forward, said):
    node = convolution("c1", "x", "y")
    for key, value in said.items():
        node.metadata_props.add(key=key, value=value)
    assert refusal(network(forward, [node], "pytorch")).startswith("a BatchNorm was folded away")


def test_batch_norms_that_the_exporter_wrote_as_arithmetic_are_refused(forward):
    nodes = [
        convolution("c1", "x", "a"),
        called(helper.make_node("Mul", ["a", "s"], ["n"], name="mul"), "bn_1", FX, ["%a"], "bn1"),
        called(helper.make_node("Add", ["n", "h"], ["y"], name="add"), "bn_1", FX, ["%a"], "bn1"),
    ]
    model = network(forward, nodes, "pytorch")
    for tensor in model.graph.initializer:
        if list(tensor.dims) == [3] and tensor.name in "sh":
            tensor.dims[:] = [3, 1, 1]
    assert refusal(model).startswith("a BatchNorm was folded away by its exporter (bn1)")


@pytest.mark.parametrize(
    ("weight", "bias", "output"),
    [
        ("onnx::Conv_32", "onnx::Conv_33", "y"),  # torch's older exporter
        ("193", "194", "y"),  # and still older
        ("c1.weight", "c1.weight_bias", "getitem_3"),  # torch's newer exporter, with its metadata lost
        ("_v_30", "bn1.bias", "y"),  # onnxsim
        ("/bn1/BatchNormalization_output_0_weight", "/bn1/BatchNormalization_output_0_bias", "y"),  # onnxslim
        ("ConvBnFusion_W_c1.weight", "ConvBnFusion_BN_B_bn1.bias", "y"),  # onnxruntime
        ("m/conv/Conv2D_weights_fused_bn", "m/conv/Conv2D_bias_fused_bn", "y"),  # tf2onnx
        ("m/conv/Conv2D/ReadVariableOp:0", "m/conv/bias", "m/bn/FusedBatchNormV3:0"),  # Keras
        ("conv2d_0.w_0", "batch_norm2d_0.b_0", "y"),  # Paddle
    ],
)
def test_names_of_what_tools_fold_are_refused(forward, weight, bias, output):
    nodes = [convolution("c1", "x", output, weight, bias)]
    if output != "y":
        nodes.append(helper.make_node("Relu", [output], ["y"], name="relu"))
    assert refusal(network(forward, nodes, "pytorch")).startswith("a BatchNorm was folded away")


def test_weight_normalisation_is_no_batch_norm(forward):
    """Its folding gives the weight a new name, and leaves the bias its own."""
    built = build(network(forward, [convolution("c1", "x", "y", "onnx::Conv_12", "c1.bias")], "pytorch"))
    assert built.warnings == () and built.notes == ()


def two_convolutions(forward, suffixes: tuple[str, str], producer: str) -> onnx.ModelProto:
    weight, bias = suffixes
    nodes = [convolution(c, x, y, f"{c}{weight}", f"{c}{bias}") for c, x, y in (("c1", "x", "a"), ("c2", "a", "y"))]
    return network(forward, nodes, producer)


def test_biases_without_batch_norm_are_told_where_nothing_explains_them(forward):
    built = build(two_convolutions(forward, ("_W", "_B"), "tool"))
    assert built.notes == () and len(built.warnings) == 1
    assert built.warnings[0].startswith("the file has no BatchNorm, and a bias in all 2 convolutions")
    assert RECIPE in built.warnings[0]


def test_biases_that_are_the_modules_own_are_not_told(forward):
    assert build(two_convolutions(forward, (".weight", ".bias"), "pytorch")).warnings == ()


def test_networks_of_the_zoo_without_batch_norm_are_not_told():
    assert build_model("squeezenet-plain", zoo={"batch": 1, "image": 32}).warnings == ()


def test_arithmetic_by_channel_is_told(forward):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Mul", ["a", "s"], ["n"], name="mul"),
        helper.make_node("Add", ["n", "h"], ["y"], name="add"),
    ]
    values = {"w": np.ones((4, 3, 3, 3), np.float32), "s": np.ones((4, 1, 1), np.float32)}
    built = build(forward(nodes, {**values, "h": values["s"]}))
    assert built.warnings[0].startswith("1 convolutions are multiplied and added to by channel")


def test_dropout_of_a_network_in_evaluation_mode_is_told(forward):
    """It is written as a copy; in training mode a rate of 0 is written alike, and loses nothing."""
    copied = helper.make_node("Identity", ["x"], ["d"], name="clone")
    copied = called(copied, "clone", "aten.clone.default", ["%x"], "drop")
    for entry in copied.metadata_props:
        entry.value = entry.value.replace("conv.Conv2d", "dropout.Dropout")
    norm = norm_of_module("d", "y", ["s", "b", "m", "v"], "bn")
    built = build(network(forward, [copied, norm]), train_bn=True)
    assert built.warnings == (
        (
            "the network was exported in evaluation mode, without its Dropouts (drop): export net.train() to have them "
            "trained with"
        ),
    )
    for entry in norm.metadata_props:
        entry.value = entry.value.replace("_no_training", "_functional")
    assert build(network(forward, [copied, norm]), train_bn=True).warnings == ()
