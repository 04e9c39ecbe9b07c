"""Transposes of NHWC frameworks, which cancel, and what they move through on the way."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from bnfuse.build import build

TO_LAST, TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


def node(op, inputs, output, name=None, **attrs):
    outputs = output if isinstance(output, list) else [output]
    return helper.make_node(op, inputs, outputs, name or f"{op.lower()}_{outputs[0]}", **attrs)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


CONVS = {"w": floats(4, 3, 3, 3), "v": floats(2, 4, 1, 1, seed=1), "u": floats(2, 8, 1, 1, seed=2)}
FIRST = [
    node("Transpose", ["x"], "x1", perm=TO_FIRST),
    node("Conv", ["x1", "w"], "c", pads=[1, 1, 1, 1]),
    node("Transpose", ["c"], "t", perm=TO_LAST),
]


def last(weight: str = "v", x: str = "m") -> list[onnx.NodeProto]:
    return [
        node("Transpose", [x], "m1", perm=TO_FIRST),
        node("Conv", ["m1", weight], "d"),
        node("GlobalAveragePool", ["d"], "g"),
        node("Flatten", ["g"], "y"),
    ]


def ints(*values):
    return np.array(values, np.int64)


MIDDLES = {  # from t [2, 6, 5, 4] to m, with constants, and the weight of the convolution behind
    "relu": ([node("Relu", ["t"], "m")], {}),
    "clip": ([node("Clip", ["t", "low", "high"], "m")], {"low": np.float32(-0.5), "high": np.float32(0.5)}),
    "bias by channel": ([node("Add", ["t", "b"], "m")], {"b": floats(4)}),
    "factor by channel of rank 4": ([node("Mul", ["b", "t"], "m")], {"b": floats(1, 1, 1, 4)}),
    "prelu": ([node("PRelu", ["t", "b"], "m")], {"b": floats(1, 1, 4)}),
    "swish": ([node("Sigmoid", ["t"], "s"), node("Mul", ["t", "s"], "m")], {}),
    "pad": ([node("Pad", ["t", "pads", "zero"], "m")], {"pads": ints(0, 1, 2, 0, 0, 0, 1, 0), "zero": np.float32(0)}),
    "pad by a number": (
        [node("Pad", ["t", "pads", "two"], "m")],
        {"pads": ints(0, 1, 2, 0, 0, 0, 1, 0), "two": np.float32(2)},
    ),
    "slice": (
        [node("Slice", ["t", "starts", "ends", "axes"], "m")],
        {"starts": ints(1, 0), "ends": ints(5, 4), "axes": ints(1, -2)},
    ),
    "softmax of the channels": ([node("Softmax", ["t"], "m")], {}),
    "split and sum": ([node("Split", ["t"], ["a", "b"], axis=1, num_outputs=2), node("Add", ["a", "b"], "m")], {}),
    "squeeze and excite": (
        [
            node("ReduceMean", ["t", "axes"], "r", keepdims=0),
            node("Reshape", ["r", "shape"], "q"),
            node("Sigmoid", ["q"], "s"),
            node("Mul", ["t", "s"], "m"),
        ],
        {"axes": ints(1, 2), "shape": ints(-1, 1, 1, 4)},
    ),
    "mean of the pixels, kept": (
        [node("ReduceMean", ["t", "axes"], "r", keepdims=1), node("Add", ["t", "r"], "m")],
        {"axes": ints(1, 2)},
    ),
    "a number": ([node("Mul", ["t", "half"], "m")], {"half": np.float32(0.5)}),
    "dropout": ([node("Dropout", ["t"], "m")], {}),
}


def forward(nodes, values, x=(2, 6, 5, 3), output="y"):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, x)],
        [helper.make_tensor_value_info(output, 1, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def run(model, feeds, names=None):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(names, feeds)


def check(source, **options):
    """The scores are those of the source, the gradients those by differences. Gives what was built."""
    built = build(source, loss="none", **options)
    x = floats(*[d.dim_value for d in source.graph.input[0].type.tensor_type.shape.dim], seed=3)
    (expected,) = run(source, {"x": x})
    output = source.graph.output[0].name
    dy = floats(*expected.shape, seed=4)
    dropped = any(n.op_type == "Dropout" for n in source.graph.node)
    if not dropped:
        names = [output, "w_grad"]
        found, dw = run(built.model, {"x": x, f"{output}_grad": dy}, names)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        step, losses = np.sign(dw).astype(np.float32) * 1e-2, []
        for sign in (1, -1):
            moved = onnx.ModelProto()
            moved.CopyFrom(source)
            tensor = next(t for t in moved.graph.initializer if t.name == "w")
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + sign * step, "w"))
            losses.append(float((run(moved, {"x": x})[0].astype(np.float64) * dy).sum()))
        assert (losses[0] - losses[1]) / 2 == pytest.approx(float((dw * step).sum()), rel=0.1)
    return built


def transposes(model):
    return [n for n in model.graph.node if n.op_type == "Transpose"]


@pytest.mark.parametrize("name", MIDDLES)
def test_two_that_turn_a_map_and_turn_it_back_are_gone(name):
    nodes, values = MIDDLES[name]
    built = check(forward([*FIRST, *nodes, *last()], {**CONVS, **values}))
    assert [n.input[0] for n in transposes(built.model)] == ["x"]  # the data itself stays as it is
    assert "3 Transposes moved until 2 of them cancelled: maps stay in one layout" in built.notes


def test_through_a_concat_of_channels_and_a_residual_sum():
    second = [node("Conv", ["x1", "w"], "e", pads=[1, 1, 1, 1]), node("Transpose", ["e"], "f", perm=TO_LAST)]
    joined = [node("Add", ["t", "f"], "s"), node("Concat", ["s", "t"], "m", axis=3)]
    built = check(forward([*FIRST, *second, *joined, *last("u")], CONVS))
    assert len(transposes(built.model)) == 1
    (concat,) = [n for n in built.model.graph.node if n.op_type == "Concat"]
    assert concat.attribute[0].i == 1


def test_what_flattens_a_map_keeps_the_order_of_the_file():
    tail = [node("Relu", ["t"], "r"), node("Flatten", ["r"], "f"), node("Gemm", ["f", "fc"], "y")]
    built = check(forward([*FIRST, *tail], {"w": CONVS["w"], "fc": floats(120, 3)}))
    left = [n for n in transposes(built.model) if "/grad" not in n.name]
    assert len(left) == 2  # that of the data, and one in front of the Flatten


def test_an_output_stays_what_it_is():
    built = check(forward([*FIRST, node("Relu", ["t"], "y")], {"w": CONVS["w"]}))
    (y,) = [value for value in built.model.graph.output if value.name == "y"]
    assert [d.dim_value for d in y.type.tensor_type.shape.dim] == [2, 6, 5, 4]


def test_a_graph_stays_as_it_is_where_nothing_would_be_gained():
    nodes = [*FIRST, node("Relu", ["t"], "r"), node("MatMul", ["r", "k"], "y")]
    built = check(forward(nodes, {"w": CONVS["w"], "k": floats(4, 5)}))
    assert not any("cancelled" in note for note in built.notes)
    (relu,) = [n for n in built.model.graph.node if n.op_type in ("Relu", "ReluPointwise")]
    assert relu.input[0] == "t" and relu.output[0] == "r"


def test_a_pad_of_zeros_goes_into_the_convolution_and_the_pooling_behind_it():
    pads = {"p": ints(0, 0, 1, 1, 0, 0, 1, 2), "q": ints(0, 0, 1, 1, 0, 0, 1, 1)}
    nodes = [
        node("Pad", ["x", "p"], "a"),
        node("Conv", ["a", "w"], "c", auto_pad="VALID", strides=[2, 2]),
        node("Relu", ["c"], "r"),
        node("Pad", ["r", "q"], "b"),
        node("MaxPool", ["b"], "y", kernel_shape=[3, 3]),
    ]
    built = check(forward(nodes, {"w": CONVS["w"], **pads}, x=(2, 3, 8, 7)))
    found = {n.op_type: list(a.ints) for n in built.model.graph.node for a in n.attribute if a.name == "pads"}
    assert found["Conv"] == [1, 1, 1, 2] and found["MaxPool"] == [1, 1, 1, 1]
    assert not any(n.op_type == "Pad" for n in built.model.graph.node)


@pytest.mark.parametrize("activation", ["Tanh", None], ids=["below zero", "a convolution's result"])
def test_a_pad_of_zeros_in_front_of_a_pooling_of_negative_numbers_stays(activation):
    middle = [node(activation, ["c"], "r")] if activation else [node("Identity", ["c"], "r")]
    nodes = [
        node("Conv", ["x", "w"], "c"),
        *middle,
        node("Pad", ["r", "q"], "b"),
        node("MaxPool", ["b"], "y", kernel_shape=[3, 3], strides=[2, 2]),
    ]
    built = check(forward(nodes, {"w": CONVS["w"], "q": ints(0, 0, 1, 1, 0, 0, 1, 1)}, x=(2, 3, 8, 7)))
    assert any(n.op_type == "Pad" for n in built.model.graph.node)
