"""What exporters leave is repaired, and said."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bnfuse.build import build
from bnfuse.graph.signature import GraphSignature
from bnfuse.opset import check_model

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def ops(model: onnx.ModelProto) -> Counter:
    return Counter(node.op_type for node in model.graph.node)


def values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def relu(x: str = "n") -> onnx.NodeProto:
    return helper.make_node("Relu", [x], ["y"], name="relu")


def signature(model: onnx.ModelProto) -> GraphSignature:
    return GraphSignature.from_json({entry.key: entry.value for entry in model.metadata_props}["bnfuse.roles"])


@pytest.mark.parametrize(("name", "norms", "batch"), [("densenet121", 121, None), ("resnet50", 53, 2)])
def test_the_files_that_the_onnx_package_ships_become_training_graphs(name, norms, batch, step):
    built = build(LIGHT / f"light_{name}.onnx", batch=batch)
    check_model(built.model)
    found = ops(built.model)
    assert found["BatchNorm"] == found["BatchNormGrad"] == norms
    readers: dict[str, set[str]] = {}
    for node in built.model.graph.node:
        for value in node.input:
            readers.setdefault(value, set()).add(node.op_type)
    forward = {"Relu", "Conv", "Add"}
    after = [readers[n.output[0]] & forward for n in built.model.graph.node if n.op_type == "BatchNorm"]
    assert all(after)
    assert not any("Add" in kinds for kinds in after) or name == "resnet50"  # there: the residual sum
    results, _ = step(built.model)
    assert np.isfinite(results["loss"]) and all(results[g].any() for g in signature(built.model).gradients.values())


def test_what_was_repaired_in_light_densenet121_is_told():
    assert build(LIGHT / "light_densenet121.onnx", seed=5).notes == (
        "converted from opset 9 to 18",
        "121 BatchNormalization nodes made to train (the file's opset has no training_mode that would freeze them)",
        "merged the Mul and Add after 121 BatchNormalization nodes into their scale and bias",
        (
            "filled 598 parameters that the file has no values for "
            "(conv1_w_0, conv2_1/x1_w_0, conv2_1/x2/bn_scale_0 and 595 more; seed 5)"
        ),
        "flattened the output 'fc6_1' to [batch, classes]",
    )


def test_placeholders_are_filled_by_kind_and_seed():
    model = build(LIGHT / "light_squeezenet.onnx", batch=1, seed=1).model
    found = values(model)
    weight = found["fire2/squeeze1x1_w_0"]
    assert weight.std() == pytest.approx(np.sqrt(2 / 64), rel=0.1) and not found["conv10_b_0"].any()
    again = values(build(LIGHT / "light_squeezenet.onnx", batch=1, seed=2).model)
    assert not np.array_equal(weight, again["fire2/squeeze1x1_w_0"])


SCALE = np.array([2.0, -1.0, 0.5, 3.0], np.float32)
SHIFT = np.array([1.0, 2.0, -3.0, 0.25], np.float32)


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1)])
def test_multiplication_and_addition_after_a_batch_norm_become_its_scale_and_bias(conv_norm, step, shape):
    nodes = [
        helper.make_node("Mul", ["n", "g"], ["ng"], name="mul"),
        helper.make_node("Add", ["h", "ng"], ["ngh"], name="add"),
        relu("ngh"),
    ]
    source = conv_norm(nodes, {"g": SCALE.reshape(shape), "h": SHIFT.reshape(shape)})
    built = build(source)
    assert built.notes == ("merged the Mul and Add after 1 BatchNormalization nodes into their scale and bias",)
    assert signature(built.model).trainable == ("w", "scale", "bias")
    before, after = values(source), values(built.model)
    np.testing.assert_allclose(after["scale"], before["scale"] * SCALE)
    np.testing.assert_allclose(after["bias"], before["bias"] * SCALE + SHIFT)
    plain, _ = step(build(conv_norm()).model)
    merged, _ = step(built.model)
    np.testing.assert_allclose(merged["new_mean"], plain["new_mean"], rtol=1e-5)
    normal = (normalised(before, merged) - before["bias"][:, None, None]) / before["scale"][:, None, None]
    np.testing.assert_allclose(
        merged["y"],
        np.maximum(normal * after["scale"][:, None, None] + after["bias"][:, None, None], 0),
        rtol=1e-4,
        atol=1e-4,
    )


def normalised(found: dict[str, np.ndarray], _: dict[str, np.ndarray]) -> np.ndarray:
    """scale*x_hat + bias of the convolution's output, by numpy in float64."""
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32).astype(np.float64)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    w = found["w"].astype(np.float64)
    y = sum(
        np.einsum("nchw,oc->nohw", padded[:, :, i : i + 6, j : j + 6], w[:, :, i, j])
        for i in range(3)
        for j in range(3)
    )
    mean, var = y.mean((0, 2, 3), keepdims=True), y.var((0, 2, 3), keepdims=True)
    scale, bias = (found[name][:, None, None] for name in ("scale", "bias"))
    return (y - mean) / np.sqrt(var + 1e-5) * scale + bias


def test_multiplication_that_others_read_stays(conv_norm):
    nodes = [helper.make_node("Mul", ["n", "g"], ["ng"], name="mul"), helper.make_node("Add", ["n", "ng"], ["y"])]
    built = build(conv_norm(nodes, {"g": SCALE.reshape(4, 1, 1)}))
    assert built.notes == () and "g" in signature(built.model).trainable


def test_multiplication_by_a_map_stays(conv_norm):
    nodes = [helper.make_node("Mul", ["n", "g"], ["ng"], name="mul"), relu("ng")]
    built = build(conv_norm(nodes, {"g": np.ones((4, 6, 6), np.float32)}))
    assert built.notes == () and "g" in signature(built.model).trainable


def test_train_bn_makes_an_inference_batch_norm_train(conv_norm, step):
    built = build(conv_norm(training_mode=0), train_bn=True)
    results, _ = step(built.model)
    expected, _ = step(build(conv_norm()).model)
    assert signature(built.model).running == {"mean": "bn/new_running_mean", "var": "bn/new_running_var"}
    assert results["loss"] == expected["loss"]


def test_a_batch_norm_of_opset_13_trains(conv_norm, step):
    """The last opset that has no training_mode."""
    model = conv_norm()
    model.opset_import[0].version = 13
    norm = model.graph.node[1]
    del norm.attribute[:], norm.output[1:]
    built = build(model)
    assert built.notes[0].startswith("1 BatchNormalization nodes made to train")
    assert step(built.model)[0]["scale_grad"].any()


def test_train_bn_says_where_there_is_none(after_conv):
    (note,) = build(after_conv([relu("c")]), train_bn=True).notes
    assert note.startswith("--train-bn found no BatchNormalization")


def test_final_softmax_is_dropped(after_conv, step):
    for op in ("Softmax", "LogSoftmax"):
        nodes = [
            helper.make_node("GlobalAveragePool", ["c"], ["p"], name="pool"),
            helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
            helper.make_node(op, ["f"], ["y"], name="prob", axis=1),
        ]
        built = build(after_conv(nodes))
        assert built.notes == (f"dropped the final {op} 'prob': cross-entropy takes logits",)
        assert signature(built.model).logits == "f" and not ops(built.model)[op]
        assert np.isfinite(step(built.model)[0]["loss"])


def test_softmax_stays_under_a_squared_error(after_conv):
    built = build(after_conv([helper.make_node("Softmax", ["c"], ["y"], name="prob", axis=1)]), loss="mse")
    assert built.notes == () and ops(built.model)["Softmax"] == 1


def test_zero_bias_that_an_exporter_invents_is_dropped(forward, step):
    """torch's dynamo exporter computes a bias of zeros for every convolution."""
    nodes = [
        helper.make_node("Constant", [], ["zero"], name="zero", value_float=0.0),
        helper.make_node("CastLike", ["zero", "x"], ["like"], name="like"),
        helper.make_node("Shape", ["w"], ["size"], name="size", start=0, end=1),
        helper.make_node("Expand", ["like", "size"], ["b"], name="bias"),
        helper.make_node("Conv", ["x", "w", "b"], ["y"], name="conv"),
    ]
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    built = build(forward(nodes, {"w": weight}))
    assert built.notes == ("dropped 1 Conv biases of constant zeros",)
    assert signature(built.model).trainable == ("w",)


def test_zero_bias_that_is_a_parameter_stays(forward):
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], name="conv")]
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    built = build(forward(nodes, {"w": weight, "b": np.zeros(4, np.float32)}))
    assert signature(built.model).trainable == ("w", "b") and built.notes == ()


def test_constants_in_arithmetic_are_no_parameters(after_conv):
    nodes = [
        helper.make_node("Constant", [], ["k"], name="k", value=numpy_helper.from_array(SHIFT.reshape(4, 1, 1))),
        helper.make_node("Add", ["c", "k"], ["y"], name="add"),
    ]
    assert signature(build(after_conv(nodes)).model).trainable == ("w",)


def test_identity_of_an_initializer_is_a_parameter_of_its_own(forward, step):
    """torch's exporter writes tensors of equal values once, and the others as Identity."""
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    nodes = [helper.make_node("Identity", [n], [f"{n}2"], name=f"id_{n}") for n in ("s", "b", "m", "v")]
    for x, y, suffix in (("x", "n", ""), ("n", "y", "2")):
        inputs = [x, *(f"{n}{suffix}" for n in ("s", "b", "m", "v"))]
        outputs = [y, f"mean{y}", f"var{y}"]
        nodes.append(helper.make_node("BatchNormalization", inputs, outputs, f"bn{y}", training_mode=1))
    built = build(forward(nodes, {"s": ones, "b": zeros, "m": zeros, "v": ones}))
    assert signature(built.model).trainable == ("s", "b", "s2", "b2")
    assert set(signature(built.model).running) == {"m", "v", "m2", "v2"}


def test_dropout_is_switched_on_and_gets_a_mask(after_conv, step):
    nodes = [helper.make_node("Dropout", ["c"], ["y"], name="drop")]
    built = build(after_conv(nodes), loss="mse")
    assert built.notes == ("switched on 1 Dropout nodes",) and ops(built.model)["Where"] == 1
    results, _ = step(built.model)
    assert 0.3 < (results["y"] == 0).mean() < 0.7


def test_reshape_to_batch_and_rest_is_flatten_and_follows_the_batch(forward, step):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Reshape", ["c", "shape"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "v"], ["y"], name="fc"),
    ]
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(s).astype(np.float32) for name, s in (("w", (4, 3, 3, 3)), ("v", (64, 5)))}
    source = forward(nodes, {**weights, "shape": np.array([2, 64], np.int64)})
    for batch in (None, 5):
        model = build(source, batch=batch).model
        assert next(n for n in model.graph.node if n.name == "flat").op_type == "Flatten"
        assert step(model)[0]["y"].shape == (batch or 2, 5)


def test_shape_arithmetic_is_folded(forward, step):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Shape", ["c"], ["s"], name="shape"),
        helper.make_node("Gather", ["s", "zero"], ["n"], name="gather", axis=0),
        helper.make_node("Unsqueeze", ["n", "axis"], ["n1"], name="unsqueeze"),
        helper.make_node("Concat", ["n1", "rest"], ["to"], name="concat", axis=0),
        helper.make_node("Reshape", ["c", "to"], ["y"], name="view"),
    ]
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    shapes = {"zero": np.array(0), "axis": np.array([0]), "rest": np.array([-1])}
    model = build(forward(nodes, {"w": weight, **shapes}, x=["N", 3, 6, 6]), batch=3).model
    forward_ops = {node.op_type for node in model.graph.node if node.name in {n.name for n in nodes}}
    assert forward_ops == {"Conv", "Flatten"}
    assert step(model)[0]["y"].shape == (3, 64)


def test_sum_of_two_is_add(after_conv):
    assert ops(build(after_conv([helper.make_node("Sum", ["c", "c"], ["y"], name="sum")])).model)["Add"] == 1


@pytest.mark.parametrize(
    ("mode", "size", "pads"),
    [
        ("SAME_UPPER", 6, [0, 0, 1, 1]),
        ("SAME_LOWER", 6, [1, 1, 0, 0]),
        ("VALID", 6, [0] * 4),
        ("SAME_UPPER", 7, [1] * 4),
    ],
)
def test_automatic_padding_is_written_out(forward, step, mode, size, pads):
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", strides=[2, 2], auto_pad=mode)
    source = forward([node], {"w": weight}, x=[2, 3, size, size])
    built = build(source, loss="mse").model
    conv = next(n for n in built.graph.node if n.op_type == "Conv")
    attrs = {attr.name: helper.get_attribute_value(attr) for attr in conv.attribute}
    assert attrs["pads"] == pads and attrs["kernel_shape"] == [3, 3] and attrs.get("auto_pad", b"NOTSET") == b"NOTSET"
    results, feeds = step(built)
    expected = onnx.reference.ReferenceEvaluator(source).run(None, {"x": feeds["x"]})[0]
    np.testing.assert_allclose(results["y"], expected, rtol=1e-4, atol=1e-4)


def test_local_functions_are_inlined(after_conv, step):
    body = [helper.make_node("Relu", ["a"], ["b"])]
    function = helper.make_function("mine", "Act", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    model = after_conv([helper.make_node("Act", ["c"], ["y"], name="act", domain="mine")])
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("mine", 1))
    built = build(model)
    assert ops(built.model)["PointwiseGradReluGrad"] == 1
    assert {function.domain for function in built.model.functions} == {"ai.bnfuse"}


def test_unnamed_and_equal_node_names_become_unique(after_conv):
    nodes = [helper.make_node("Relu", ["c"], ["r"]), helper.make_node("Neg", ["r"], ["y"], name="conv")]
    names = [node.name for node in build(after_conv(nodes)).model.graph.node]
    assert len(set(names)) == len(names) and all(names)


def test_initializers_that_are_inputs_too_are_no_data(after_conv):
    model = after_conv([relu("c")])
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 3, 3, 3]))
    assert signature(build(model).model).data == ("x",)


@pytest.mark.parametrize(("sizes", "expected"), [(np.array(3), [3, 1]), (np.array([1, 3]), [1, 3])])
def test_a_sequence_of_which_items_are_read_is_split(after_conv, step, sizes, expected):
    """As torch's exporter writes x.chunk(2, 1) and x.split([1, 3], 1)."""
    nodes = [
        helper.make_node("SplitToSequence", ["c", "sizes"], ["parts"], name="chunk", axis=1, keepdims=1),
        *(helper.make_node("SequenceAt", ["parts", f"i{i}"], [f"part{i}"], name=f"at{i}") for i in (0, 1)),
        helper.make_node("Concat", ["part1", "part0"], ["y"], name="swap", axis=1),
    ]
    places = {f"i{i}": np.array(i, np.int64) for i in (0, 1)}
    model = build(after_conv(nodes, {**places, "sizes": sizes.astype(np.int64)})).model
    assert values(model)["chunk/lengths"].tolist() == expected
    plain = step(build(after_conv([helper.make_node("Identity", ["c"], ["y"], name="same")])).model)[0]["y"]
    np.testing.assert_array_equal(step(model)[0]["y"], np.roll(plain, expected[1], axis=1))
