"""Every trap has its refusal, in one line that names node, operator and remedy."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bnfuse.build import build
from bnfuse.core.errors import BnfuseError
from bnfuse.models import build_forward


def message_of(model: onnx.ModelProto, **options) -> str:
    with pytest.raises(BnfuseError) as caught:
        build(model, file="net.onnx", **options)
    text = str(caught.value)
    assert text.startswith("net.onnx: ") and "\n" not in text
    return text.removeprefix("net.onnx: ")


def node(op: str, inputs=("c",), outputs=("y",), **attrs) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name="it", **attrs)


def test_frozen_batch_norm(conv_norm):
    assert message_of(conv_norm(training_mode=0)) == (
        "node 'bn' (BatchNormalization) has training_mode=0: its statistics are frozen, so there is nothing to split. "
        "Pass --train-bn to train it, or --frozen-bn to keep it frozen."
    )


def test_batch_norm_over_one_value():
    text = message_of(build_forward("resnet18", batch=1, image=32))
    assert text.startswith("node 'stage4/block1/norm1' (BatchNormalization) has one value per channel")
    assert text.endswith("Use a larger --batch or --image.")


def test_celu_that_divides_by_zero(after_conv):
    text = message_of(after_conv([node("Celu", alpha=0.0)]))
    assert text.startswith("node 'it' (Celu) has alpha 0") and text.endswith("write that.")


def test_dynamic_batch_is_fixed_by_batch(after_conv, step):
    nodes = [node("AveragePool", kernel_shape=[2, 2], strides=[2, 2])]
    dynamic = after_conv(nodes, x=["N", 3, 6, 6])
    assert message_of(dynamic) == "input 'x' has the dynamic shape ['N', 3, 6, 6]: pass --batch N"
    results, _ = step(build(dynamic, batch=3).model)
    assert results["y"].shape == (3, 4, 3, 3) and results["w_grad"].any()


def test_dynamic_image(after_conv):
    text = message_of(after_conv([node("Relu")], x=[2, 3, "H", "W"]))
    assert text == "input 'x' has the dynamic shape [2, 3, 'H', 'W']: export the model with a static image size"


def test_input_without_shape(after_conv):
    model = after_conv([node("Relu")])
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert message_of(model) == "input 'x' has no shape: export the model with static shapes"


def test_average_pool_with_ceil_and_padding_that_matter(after_conv):
    pool = node("AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], ceil_mode=1, count_include_pad=1)
    assert message_of(after_conv([pool])).startswith("node 'it' (AveragePool) has ceil_mode=1, count_include_pad=1")


@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 1, 0, 0]])
def test_average_pool_with_ceil_where_it_changes_nothing_is_settled(after_conv, step, pads):
    how = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": pads}
    built = build(after_conv([node("AveragePool", ceil_mode=1, count_include_pad=1, **how)]), loss="mse")
    assert len(built.notes) == 1 and "which changes nothing" in built.notes[0]
    results, feeds = step(built.model)
    images, weight = np.pad(feeds["x"], ((0, 0), (0, 0), (1, 1), (1, 1))), values(built.model)["w"]
    maps = sum(
        np.einsum("nchw,oc->nohw", images[:, :, i : i + 6, j : j + 6], weight[:, :, i, j])
        for i in range(3)
        for j in range(3)
    )
    top, left = pads[:2]
    padded = np.full((2, 4, 6 + top + 2, 6 + left + 2), np.nan)
    padded[:, :, top : top + 6, left : left + 6] = maps
    padded[:, :, :top] = padded[:, :, :, :left] = 0.0  # padding counts, what lies beyond the last window does not
    size = results["y"].shape[2]
    windows = [[padded[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3] for j in range(size)] for i in range(size)]
    expected = np.stack([np.stack([np.nanmean(w, (2, 3)) for w in row], -1) for row in windows], -2)
    np.testing.assert_allclose(results["y"], expected, rtol=1e-4, atol=1e-5)


def values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_operator_without_gradient_is_named(after_conv):
    text = message_of(after_conv([node("Det")]))
    assert text.startswith("node 'it' (Det) has no gradient. Freeze the parameters in front of it")


def test_what_needs_no_gradient_may_have_none(after_conv, step):
    """A mask of what an operator without a gradient made of the data, which nothing trained is behind."""
    nodes = [node("Det", ["x"], "d"), node("Unsqueeze", ["d", "axes"], "u"), node("Mul", ["c", "s"], "y")]
    nodes[1].name, nodes[2].name = "up", "times"
    nodes.insert(2, helper.make_node("ReduceMean", ["u"], ["s"], name="mean"))
    results, _ = step(build(after_conv(nodes, {"axes": np.array([2, 3])}), loss="mse").model)
    assert results["w_grad"].any()


def test_operator_that_does_not_exist(after_conv):
    assert message_of(after_conv([node("Relux")])).startswith("node 'it' (Relux) is no operator of opset 17.")


def test_operator_of_another_domain(after_conv):
    model = after_conv([node("Swish", domain="my.ops")])
    model.opset_import.append(helper.make_opsetid("my.ops", 1))
    assert message_of(model) == "node 'it' (Swish) is of the domain my.ops: only standard operators can be trained."


def test_control_flow(after_conv):
    branch = helper.make_graph([helper.make_node("Identity", ["c"], ["o"])], "b", [], [
        helper.make_tensor_value_info("o", TensorProto.FLOAT, None)
    ])  # fmt: skip
    model = after_conv([node("If", ["flag"], then_branch=branch, else_branch=branch)], {"flag": np.array(True)})
    assert message_of(model).startswith("node 'it' (If) has a subgraph: control flow cannot be trained.")


def test_half_precision(after_conv):
    model = after_conv([node("Relu")])
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    assert "float16" in message_of(model)


def test_double_precision_parameters(forward):
    nodes = [node("Cast", ["x"], ["d"], to=TensorProto.DOUBLE), helper.make_node("Conv", ["d", "w"], ["y"], "conv")]
    model = forward(nodes, {"w": np.ones((4, 3, 3, 3))})
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    text = message_of(model)
    assert text == "node 'conv' (Conv) has a parameter 'w' of type double: convert the model to float32."


def test_training_graph_is_no_forward_graph():
    built = build(build_forward("densenet40", batch=2, depth=1, image=8)).model
    assert message_of(built) == "is a training graph already: `bnfuse rewrite` and the others take it as it is"


def test_several_outputs_need_a_choice(after_conv, step):
    model = after_conv([node("Relu"), helper.make_node("Neg", ["c"], ["z"], name="neg")])
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    assert message_of(model) == "has 2 outputs (y, z): say which one the loss reads (--logits NAME)"
    assert np.isfinite(step(build(model, logits="z").model)[0]["loss"])


def test_outputs_that_the_loss_does_not_read_are_left_out(after_conv, step):
    nodes = [node("Relu"), helper.make_node("Conv", ["x", "v"], ["z"], name="other")]
    model = after_conv(nodes, {"v": np.ones((4, 3, 1, 1), np.float32)})
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    built = build(model, logits="y")
    assert built.notes == ("left out z: the loss reads y alone",)
    assert [value.name for value in built.model.graph.output] == ["loss", "y", "w_grad"]
    assert "v" not in {value.name for value in built.model.graph.input}
    assert np.isfinite(step(built.model)[0]["loss"])


def test_shapes_that_do_not_fit(after_conv):
    text = message_of(after_conv([node("Conv", ["c", "k"])], {"k": np.ones((4, 5, 1, 1), np.float32)}))
    assert text == "node 'it' (Conv) reads 4 channels, but its weight is [4, 5, 1, 1] in 1 groups: they do not fit."


def test_operand_that_nothing_computes(after_conv):
    text = message_of(after_conv([node("Add", ["c", "nowhere"])]))
    assert text == "node 'it' (Add) reads 'nowhere', which nothing before it computes: the graph is damaged."


def test_operands_whose_shapes_do_not_fit(after_conv):
    text = message_of(after_conv([node("Add", ["c", "v"])], {"v": np.ones((1, 5, 1, 1), np.float32)}))
    assert text.startswith("its shapes do not fit together: ")


def test_absurd_constant(after_conv):
    size = helper.make_node("ConstantOfShape", ["n"], ["big"], name="big")
    model = after_conv([size, node("Add", ["c", "big"])], {"n": np.array([1 << 20, 1 << 20], np.int64)})
    assert message_of(model).startswith("node 'big' (ConstantOfShape) makes a tensor of 1099511627776 elements")


@pytest.mark.parametrize(
    ("op", "operands", "elements"),
    [
        ("Tile", {"one": [1], "times": [1 << 40]}, 1 << 40),
        ("Range", {"zero": 0, "end": 1 << 40, "one": 1}, 1 << 40),
        ("Range", {"zero": 0, "end": 5, "none": 0}, "inf"),
        ("Add", {"row": [1] * 65536, "column": [[1]] * 65536}, 1 << 32),
    ],
)
def test_absurd_constant_of_any_operator(after_conv, op, operands, elements):
    nodes = [
        helper.make_node(op, list(operands), ["big"], name="big"),
        helper.make_node("ReduceMax", ["big"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["scale"], to=TensorProto.FLOAT),
        node("Mul", ["c", "scale"]),
    ]
    model = after_conv(nodes, {name: np.array(value, np.int64) for name, value in operands.items()})
    assert message_of(model).startswith(f"node 'big' ({op}) makes a tensor of {elements} elements")


def test_opset_that_does_not_convert(after_conv):
    model = after_conv([node("Relu")])
    model.opset_import[0].version = 5
    model.graph.node.append(helper.make_node("Upsample", ["y"], ["u"], name="up", mode="nearest", height_scale=2.0))
    model.graph.output[0].name = "u"
    assert "Export it with opset 14 to 21" in message_of(model)


def mean_to_a_number(after_conv) -> onnx.ModelProto:
    model = after_conv([node("ReduceMean", keepdims=0)])
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, []))
    return model


def test_a_file_that_ends_in_a_number_has_a_loss_of_its_own(after_conv):
    text = message_of(mean_to_a_number(after_conv))
    assert text.startswith("output 'y' is a single number, as of a loss of the file's own. build adds the loss")


def with_loss(after_conv) -> onnx.ModelProto:
    loss = helper.make_node("SoftmaxCrossEntropyLoss", ["c", "target"], ["y"], name="it", reduction="none")
    model = after_conv([loss])
    model.graph.input.append(helper.make_tensor_value_info("target", TensorProto.INT64, [2, 6, 6]))
    return model


def test_a_file_that_ends_in_a_loss_says_so(after_conv):
    text = message_of(with_loss(after_conv))
    assert text.startswith("node 'it' (SoftmaxCrossEntropyLoss) is a loss of the file's own. build adds the loss")


def test_a_loss_beside_the_logits_is_left_out_with_its_labels(after_conv, step):
    model = with_loss(after_conv)
    model.graph.output.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, None))
    built = build(model, logits="c")
    assert built.notes == ("left out y, target: the loss reads c alone",)
    assert np.isfinite(step(built.model)[0]["loss"])


def test_an_input_of_integers(after_conv):
    nodes = [helper.make_node("Cast", ["t"], ["f"], to=TensorProto.FLOAT), node("Add", ["c", "f"])]
    model = after_conv(nodes)
    model.graph.input.append(helper.make_tensor_value_info("t", TensorProto.INT64, [6]))
    assert message_of(model).startswith("input 't' is int64: networks take float32 here. build adds the loss")


def test_halves_cut_by_arithmetic_on_the_shape(after_conv, step):
    """As torch's exporter writes x.chunk(2, 1)."""
    integers = {"one": [1], "zero": [0], "two": [2]}
    nodes = [
        helper.make_node("Shape", ["c"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["channels"], axis=0),
        helper.make_node("Add", ["channels", "one"], ["more"]),
        helper.make_node("Div", ["more", "two"], ["half"]),
        helper.make_node("Mul", ["half", "two"], ["whole"]),
        helper.make_node("Slice", ["c", "zero", "half", "one"], ["first"]),
        helper.make_node("Slice", ["c", "half", "whole", "one"], ["second"]),
        helper.make_node("Concat", ["second", "first"], ["y"], axis=1),
    ]
    model = build(after_conv(nodes, {name: np.array(value, np.int64) for name, value in integers.items()})).model
    results, feeds = step(model)
    maps = results["y"]
    swapped = np.roll(maps, 2, axis=1)  # of the convolution: channels 2, 3, 0, 1 became 0, 1, 2, 3
    weight = values(model)["w"]
    padded = np.pad(feeds["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    expected = sum(
        np.einsum("nchw,oc->nohw", padded[:, :, i : i + 6, j : j + 6], weight[:, :, i, j])
        for i in range(3)
        for j in range(3)
    )
    np.testing.assert_allclose(swapped, expected, rtol=1e-4, atol=1e-4)


def test_sizes_computed_in_floats_from_the_shape(after_conv, step):
    """SAME padding as TensorFlow's, in terms of ceil(size/stride)."""
    nodes = [
        helper.make_node("Shape", ["c"], ["shape"], start=2, end=4),
        helper.make_node("Cast", ["shape"], ["size"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["size", "stride"], ["ratio"]),
        helper.make_node("Ceil", ["ratio"], ["up"]),
        helper.make_node("Mul", ["up", "stride"], ["covered"]),
        helper.make_node("Sub", ["covered", "size"], ["missing"]),
        helper.make_node("Cast", ["missing"], ["after"], to=TensorProto.INT64),
        helper.make_node("Concat", ["before", "after"], ["pads"], axis=0),
        helper.make_node("Pad", ["c", "pads"], ["y"], name="pad"),
    ]
    constants = [helper.make_node("Constant", [], ["stride"], value_floats=[4.0])]
    model = after_conv([*constants, *nodes], {"before": np.zeros(6, np.int64)})
    assert step(build(model).model)[0]["y"].shape == (2, 4, 8, 8)


def test_shapes_that_follow_from_the_data(after_conv):
    nodes = [
        helper.make_node("Cast", ["c"], ["flags"], name="cast", to=TensorProto.INT64),
        helper.make_node("ReduceMax", ["flags"], ["most"], name="most", keepdims=0),
        helper.make_node("Unsqueeze", ["most", "zero"], ["end"], name="end"),
        node("Slice", ["c", "zero", "end"]),
    ]
    text = message_of(after_conv(nodes, {"zero": np.zeros(1, np.int64)}))
    assert text.startswith("node 'it' (Slice) gives 'y', whose shape follows from 'end', which depends on the data: ")


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.INT64])
def test_an_input_that_nothing_reads_is_left_out_and_told(after_conv, step, kind):
    model = after_conv([node("Relu")])
    model.graph.input.append(helper.make_tensor_value_info("mask", kind, [2, 7]))
    built = build(model, loss="mse")
    assert built.warnings == ("nothing reads the values of the input mask: the training file does not have it",)
    assert [value.name for value in built.model.graph.input][:2] == ["x", "labels"]
    step(built.model)


def test_an_input_that_only_gives_its_shape_is_left_out_and_told(after_conv):
    model = after_conv([node("Shape", ["like"], ["s"]), node("Expand", ["c", "s"], ["y"])])
    model.graph.input.append(helper.make_tensor_value_info("like", TensorProto.FLOAT, [2, 4, 6, 6]))
    assert "the input like" in build(model, loss="mse").warnings[0]


def test_a_network_that_does_not_read_its_input(after_conv):
    model = after_conv([node("Relu", ["w"])])
    assert message_of(model, loss="mse") == (
        "nothing that the loss depends on reads its input (x): export the network anew"
    )
