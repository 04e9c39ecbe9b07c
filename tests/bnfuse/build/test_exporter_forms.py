"""How tf2onnx, paddle2onnx and torch's exporter write what others write otherwise: scores stay those of the file."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from bnfuse.build import build
from bnfuse.core.errors import BnfuseError


def node(op, inputs, output, name=None, **attrs):
    outputs = output if isinstance(output, list) else [output]
    return helper.make_node(op, inputs, outputs, name or f"{op}.{outputs[0]}", **attrs)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def ints(*values):
    return np.array(values, np.int64)


def model(nodes, values, x=(2, 3, 9, 7), *, producer="", inputs=(), functions=(), opset=17, output="y"):
    read = {name for n in nodes for name in n.input}
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(f.domain, 1) for f in functions[:1])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, x), *inputs],
        [helper.make_tensor_value_info(output, 1, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in values.items() if k in read],
    )
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name=producer)
    made.functions.extend(functions)
    return made


def scores(source: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(source.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def roles(built: onnx.ModelProto) -> dict:
    return json.loads({entry.key: entry.value for entry in built.metadata_props}["bnfuse.roles"])


def same_scores(source: onnx.ModelProto, built: onnx.ModelProto, batch: int | None = None) -> None:
    """Of the network as the file has it, its BatchNorms in training, and of the training graph."""
    x = floats(*[d.dim_value for d in built.graph.input[0].type.tensor_type.shape.dim], seed=9)
    trained = onnx.ModelProto()
    trained.CopyFrom(source)
    for n in (*trained.graph.node, *(n for function in trained.functions for n in function.node)):
        if n.op_type == "BatchNormalization":
            n.attribute.append(helper.make_attribute("training_mode", 1))
            n.output.extend([f"{n.output[0]}/m", f"{n.output[0]}/v"])
    if batch:
        for dims in (trained.graph.input[0].type.tensor_type.shape.dim,):
            dims[0].dim_value = batch
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(built.SerializeToString(), options, providers=["CPUExecutionProvider"])
    labels = np.zeros(len(x), np.int64)
    (found,) = session.run([roles(built)["logits"]], {"x": x, "labels": labels})
    np.testing.assert_allclose(found, scores(trained, x), rtol=1e-4, atol=1e-5)


def norm(name: str, channels: int) -> dict[str, np.ndarray]:
    parts = {"w_0": (0.5, 2), "b_0": (-1, 1), "w_1": (-1, 1), "w_2": (0.5, 2)}
    rng = np.random.default_rng(len(name))
    return {f"{name}.{part}": rng.uniform(*of, channels).astype(np.float32) for part, of in parts.items()}


# -- paddle2onnx ---------------------------------------------------------------------------------------------------

PADDLE_VALUES = {
    "conv2d_0.w_0": floats(8, 3, 3, 3),
    **norm("batch_norm2d_0", 8),
    "conv2d_1.w_0": floats(8, 8, 1, 1, seed=1),
    "conv2d_1.b_0": floats(8, seed=2),
    "linear_0.w_0": floats(24, 5, seed=3),
    "linear_0.b_0": floats(5, seed=4),
    "shape_1": ints(1, -1, 1, 1),
    "three": np.float32(3),
    "zero": np.float32(0),
    "six": np.float32(6),
    "from": ints(0),
    "to": ints(1),
    "axes": ints(0),
    "rest": ints(-1),
    "flat": ints(0, -1),
}
NORM = ["conv", *(f"batch_norm2d_0.{part}" for part in ("w_0", "b_0", "w_1", "w_2"))]
BEFORE = [
    node("Conv", ["x", "conv2d_0.w_0"], "conv", "p2o.Conv.0", pads=[1, 1, 1, 1], strides=[2, 2]),
    node("BatchNormalization", NORM, "bn", "p2o.BatchNormalization.0", epsilon=1e-5, momentum=0.9),
]
HARD_SWISH = [
    node("Add", ["bn", "three"], "plus", "p2o.Add.1"),
    node("Clip", ["plus", "zero", "six"], "clip", "p2o.Clip.0"),
    node("Mul", ["bn", "clip"], "product", "p2o.Mul.0"),
    node("Div", ["product", "six"], "act", "p2o.Div.0"),
]
EXCITE = [
    node("GlobalAveragePool", ["act"], "pooled"),
    node("Conv", ["pooled", "conv2d_1.w_0"], "squeezed"),
    node("Reshape", ["conv2d_1.b_0", "shape_1"], "bias_as_map"),
    node("Add", ["squeezed", "bias_as_map"], "biased"),
    node("HardSigmoid", ["biased"], "gate", alpha=1 / 6, beta=0.5),
    node("Mul", ["act", "gate"], "excited"),
]
POOL = [node("MaxPool", ["excited"], "max", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)]
FLATTEN = [
    node("GlobalAveragePool", ["max"], "p"),
    node("Concat", ["p", "p", "p"], "tripled", axis=1),
    node("Shape", ["tripled"], "shape"),
    node("Slice", ["shape", "from", "to", "axes"], "rows"),
    node("Concat", ["rows", "rest"], "target", axis=0),
    node("Reshape", ["tripled", "target"], "row"),
]
LINEAR = [
    node("MatMul", ["row", "linear_0.w_0"], "product_1", "p2o.MatMul.0"),
    node("Add", ["product_1", "linear_0.b_0"], "sum_1", "p2o.Add.9"),
    node("Identity", ["sum_1"], "y", "p2o.Identity.0"),
]


def paddle(**how) -> onnx.ModelProto:
    return model([*BEFORE, *HARD_SWISH, *EXCITE, *POOL, *FLATTEN, *LINEAR], PADDLE_VALUES, **how)


def test_paddle_s_forms():
    source = paddle()
    built = build(source, train_bn=True)
    same_scores(source, built.model)
    ops = [n.op_type for n in built.model.graph.node]
    assert "HardSwish" in ops and not {"Shape", "Slice"} & {*ops}
    found = roles(built.model)
    assert found["running"] == {
        f"batch_norm2d_0.w_{number}": f"p2o.BatchNormalization.0/new_running_{what}"
        for number, what in ((1, "mean"), (2, "var"))
    }
    assert {*found["trainable"]} == {*(k for k in PADDLE_VALUES if k.endswith(("w_0", "b_0")))}


def test_a_file_of_one_image_becomes_one_of_several():
    source = paddle(x=(1, 3, 9, 7))
    built = build(source, train_bn=True, batch=4)
    assert [d.dim_value for d in built.model.graph.input[0].type.tensor_type.shape.dim] == [4, 3, 9, 7]
    same_scores(source, built.model, batch=4)


# -- tf2onnx -------------------------------------------------------------------------------------------------------


def keras(batch: int = 2, **how) -> onnx.ModelProto:
    """A separable convolution as Keras has it: NHWC, SAME padding, a depthwise convolution, GlobalAveragePooling2D."""
    values = {
        "net/c1/kernel": floats(4, 3, 3, 3),
        "const_fold_opt__12": floats(4, 1, 3, 3, seed=1),
        "net/fc/kernel": floats(4, 5, seed=2),
        "net/fc/bias": floats(5, seed=3),
        "scale": np.float32(1 / 255),
        "vector": floats(4, seed=4),
        "row": ints(1, 1, 1, 4),
        "axes": ints(2, 3),
    }
    nodes = [
        node("Mul", ["x", "scale"], "scaled"),
        node("Transpose", ["scaled"], "x1", perm=[0, 3, 1, 2]),
        node("Conv", ["x1", "net/c1/kernel"], "c1", auto_pad="SAME_UPPER", strides=[2, 2]),
        node("Conv", ["c1", "const_fold_opt__12"], "dw", group=4, auto_pad="SAME_UPPER"),
        node("Transpose", ["dw"], "t", perm=[0, 2, 3, 1]),
        node("Reshape", ["vector", "row"], "bias"),
        node("Add", ["t", "bias"], "biased"),
        node("Relu", ["biased"], "r"),
        node("Transpose", ["r"], "r1", perm=[0, 3, 1, 2]),
        node("GlobalAveragePool", ["r1"], "p"),
        node("Squeeze", ["p", "axes"], "f"),
        node("MatMul", ["f", "net/fc/kernel"], "m"),
        node("Add", ["m", "net/fc/bias"], "y"),
    ]
    return model(nodes, values, (batch, 9, 7, 3), producer="tf2onnx", **how)


def test_keras_forms():
    source = keras()
    built = build(source)
    same_scores(source, built.model)
    assert sum(n.op_type == "Transpose" for n in built.model.graph.node) == 1
    assert "vector" in roles(built.model)["trainable"]


def test_a_vector_made_a_row_is_no_batch_of_one():
    built = build(keras(1), batch=3)
    same_scores(keras(1), built.model, batch=3)


def test_inputs_that_nothing_reads_are_left_out():
    captured = helper.make_tensor_value_info("net/normalization/Sub/y:0", 1, (1, 1, 1, 3))
    built = build(keras(inputs=[captured]))
    assert roles(built.model)["data"] == ["x"]
    assert "left out inputs that nothing reads: net/normalization/Sub/y:0" in built.notes


def test_a_folded_batch_norm_of_keras_has_the_remedy_of_keras():
    source = keras()
    source.graph.node[2].output[0] = source.graph.node[3].input[0] = "net/bn_1/batchnorm/mul_1:0"
    with pytest.raises(
        BnfuseError, match=r"folded away .*from_function of tf.function\(lambda x: net\(x, training=True\)\)"
    ):
        build(source)
    assert any("will not be trained" in text for text in build(source, allow_folded_bn=True).warnings)


def test_masks_that_are_constants_are_refused():
    source = keras()
    mask = numpy_helper.from_array(np.array([[True, False, True, True]] * 2), "net/dropout_1/GreaterEqual:0")
    source.graph.initializer.extend([mask, numpy_helper.from_array(np.float32(0), "zero")])
    source.graph.node[10].output[0] = "kept"
    source.graph.node.insert(11, node("Where", [mask.name, "kept", "zero"], "f"))
    with pytest.raises(
        BnfuseError, match=r"masks of its Dropouts are constants \(net/dropout_1/GreaterEqual:0\).*set to 0"
    ):
        build(source)


# -- local functions -----------------------------------------------------------------------------------------------


def block(domain: str = "pkg.net") -> onnx.FunctionProto:
    """Conv -> BatchNorm -> Relu, as a module is exported as a function; strides are an attribute."""
    conv = node("Conv", ["x", "w"], "c", "conv", pads=[1, 1, 1, 1])
    strides = conv.attribute.add(name="strides", type=onnx.AttributeProto.INTS)
    strides.ref_attr_name = "strides"
    nodes = [
        conv,
        node("BatchNormalization", ["c", "s", "b", "m", "v"], "n", "bn", epsilon=1e-3),
        node("Relu", ["n"], "y", "relu"),
    ]
    opset = [helper.make_opsetid("", 17)]
    return helper.make_function(domain, "Block", ["x", "w", "s", "b", "m", "v"], ["y"], nodes, opset, ["strides"])


def pair(domain: str = "pkg.net") -> onnx.FunctionProto:
    """Two blocks of the same weights, one behind the other: a function that calls another."""
    operands = ["w", "s", "b", "m", "v"]
    nodes = [
        helper.make_node("Block", ["x", *operands], ["h"], "first", domain=domain, strides=[1, 1]),
        helper.make_node("Block", ["h", *operands], ["y"], "second", domain=domain, strides=[2, 2]),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    return helper.make_function(domain, "Pair", ["x", *operands], ["y"], nodes, opsets)


def test_functions_that_are_called_several_times():
    parts = ("w_0", "b_0", "w_1", "w_2")
    values = {
        "w1": floats(4, 3, 3, 3),
        "w2": floats(4, 4, 3, 3, seed=1),
        **norm("bn1", 4),
        **norm("bnTwo", 4),
        "fc": floats(4, 5, seed=2),
    }
    first, second = ([f"{name}.{part}" for part in parts] for name in ("bn1", "bnTwo"))
    nodes = [
        helper.make_node("Block", ["x", "w1", *first], ["a"], "a", domain="pkg.net", strides=[1, 1]),
        helper.make_node("Pair", ["a", "w2", *second], ["h"], "h", domain="pkg.net"),
        node("GlobalAveragePool", ["h"], "p"),
        node("Flatten", ["p"], "f"),
        node("Gemm", ["f", "fc"], "y"),
    ]
    source = model(nodes, values, functions=[block(), pair()])
    built = build(source, train_bn=True)
    same_scores(source, built.model)
    norms = [n for n in built.model.graph.node if n.op_type == "BatchNorm"]
    assert len(norms) == 3 == len({n.name for n in norms})
    assert [n.input[1] for n in norms] == ["bn1.w_0", "bnTwo.w_0", "bnTwo.w_0"]
    assert norms[2].input[3] == norms[1].output[1]  # the second call goes on from the first
    assert not [f for f in built.model.functions if f.domain == "pkg.net"]


def test_aliases_of_initializers_are_parameters_of_their_own():
    """torch's exporter writes tensors of equal values once, and an Identity for each other one."""
    names = ("scale", "bias", "mean", "var")
    values = {"w1": floats(3, 3, 3, 3), "fc": floats(3, 5, seed=2)}
    values |= dict(zip((f"bn1.{name}" for name in names), norm("bn", 3).values(), strict=True))
    copies = [node("Identity", [f"bn1.{name}"], f"bn2.{name}") for name in names]
    nodes = [
        *copies,
        node("Conv", ["x", "w1"], "c"),
        node("BatchNormalization", ["c", *(f"bn1.{name}" for name in names)], "n", "bn1"),
        node("Relu", ["n"], "r"),
        node("Conv", ["r", "w1"], "d", "again"),
        node("BatchNormalization", ["d", *(f"bn2.{name}" for name in names)], "m", "bn2"),
        node("GlobalAveragePool", ["m"], "p"),
        node("Flatten", ["p"], "f"),
        node("Gemm", ["f", "fc"], "y"),
    ]
    source = model(nodes, values)
    built = build(source, train_bn=True)
    same_scores(source, built.model)
    found = roles(built.model)
    assert {"bn1.scale", "bn2.scale", "w1"} <= {*found["trainable"]} and len(found["running"]) == 4
