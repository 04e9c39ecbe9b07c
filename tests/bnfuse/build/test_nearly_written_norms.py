"""What is nearly a BatchNorm written out, or nearly a window's Pad, and Transposes: the graph keeps its value."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bnfuse.build import build
from bnfuse.graph.training_graph import open_graph
from bnfuse.verifying.interpreter import run

node = helper.make_node
RNG = np.random.default_rng(0)
MOMENTS = [
    node("ReduceMean", ["x"], ["m"], axes=[0, 1, 2], keepdims=1),
    node("Sub", ["x", "m"], ["d"]),
    node("Mul", ["d", "d"], ["dd"]),
    node("ReduceMean", ["dd"], ["v"], axes=[0, 1, 2], keepdims=1),
    node("Add", ["v", "eps"], ["ve"]),
    node("Sqrt", ["ve"], ["sd"]),
    node("Reciprocal", ["sd"], ["r"]),
]
END = [
    node("Relu", ["n"], ["a"]),
    node("ReduceMean", ["a"], ["p"], axes=[1, 2], keepdims=0),
    node("MatMul", ["p", "W"], ["y"]),
]
CONV = [node("Conv", ["t", "K"], ["c"]), node("GlobalAveragePool", ["c"], ["p"]), node("Flatten", ["p"], ["y"])]
K = RNG.standard_normal((5, 3, 1, 1))
EPS = np.float32(1e-3)


def model(nodes: list[onnx.NodeProto], **values: np.ndarray) -> onnx.ModelProto:
    tensors = [
        numpy_helper.from_array(v.astype(np.float32) if v.dtype.kind == "f" else v, name)
        for name, v in ((name, np.asarray(value)) for name, value in values.items())
    ]
    info = helper.make_tensor_value_info
    inputs, outputs = info("x", TensorProto.FLOAT, [4, 3, 3, 3]), info("y", TensorProto.FLOAT, [4, 5])
    graph = helper.make_graph(nodes, "net", [inputs], [outputs], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="tf2onnx")


def built(source: onnx.ModelProto) -> onnx.ModelProto:
    """The training graph, whose loss is that of the scores which the file gives."""
    made = build(source).model
    graph, x = open_graph(made), RNG.standard_normal((4, 3, 3, 3)) * 2 + 1
    labels = np.array([0, 1, 2, 3])
    feeds = {**graph.state(), graph.signature.data[0]: x.astype(np.float32), graph.signature.labels[0]: labels}
    (scores,) = onnx.reference.ReferenceEvaluator(source).run(None, {"x": x.astype(np.float32)})
    wanted = np.mean(np.log(np.exp(scores.astype(np.float64)).sum(1)) - scores[np.arange(4), labels])
    loss = graph.signature.loss
    np.testing.assert_allclose(run(made, feeds, [loss])[loss], wanted, rtol=2e-5)
    return made


def batch_norms(made: onnx.ModelProto) -> int:
    return sum(each.op_type == "BatchNorm" for each in made.graph.node)


def scaled(*last: onnx.NodeProto) -> list[onnx.NodeProto]:
    return [*MOMENTS, node("Mul", ["d", "r"], ["dn"]), *last, *END]


@pytest.mark.parametrize("shift", [(3,), (3, 1)], ids=["along channels", "along the width"])
def test_a_shift_along_another_axis_is_none_of_its(shift):
    last = (node("Mul", ["dn", "gamma"], ["q"]), node("Add", ["q", "shift"], ["n"]))
    values = {"gamma": np.full(3, 2.0), "shift": RNG.standard_normal(shift), "W": RNG.standard_normal((3, 5))}
    assert batch_norms(built(model(scaled(*last), eps=EPS, **values))) == (shift == (3,))


def test_a_number_that_is_added_is_no_bias():
    half = node("Constant", [], ["half"], value=numpy_helper.from_array(np.float32(0.5)))
    made = build(model([half, *scaled(node("Add", ["dn", "half"], ["n"]))], eps=EPS, W=RNG.standard_normal((3, 5))))
    assert made.trainable == ("W",)


def test_a_mean_times_the_deviation_is_no_shift():
    shift = [node("Mul", ["m", "sd"], ["ms"]), node("Sub", ["bb", "ms"], ["sh"])]
    nodes = [*MOMENTS, node("Div", ["x", "sd"], ["dn"]), *shift, node("Add", ["dn", "sh"], ["n"]), *END]
    made = built(model(nodes, eps=EPS, bb=np.array([1.0, -2, 3]), W=RNG.standard_normal((3, 5))))
    assert batch_norms(made) == 0


def test_a_scale_of_two_norms_stays_one():
    first = scaled(node("Mul", ["dn", "gamma"], ["q"]), node("Add", ["q", "beta"], ["n"]))[:-2]
    shared = {"eps", "gamma", "beta"}
    again = []
    for each in first:
        copy = onnx.NodeProto()
        copy.CopyFrom(each)
        inputs = [name if name in shared else "a" if name == "x" else f"{name}2" for name in each.input]
        copy.input[:], copy.output[:] = inputs, [f"{name}2" for name in each.output]
        again.append(copy)
    end = [node("ReduceMean", ["a2"], ["p"], axes=[1, 2], keepdims=0), node("MatMul", ["p", "W"], ["y"])]
    values = {"gamma": np.full((1, 1, 1, 3), 2.0), "beta": RNG.standard_normal((1, 1, 1, 3))}
    source = model([*first, *again, *end], eps=EPS, **values, W=RNG.standard_normal((3, 5)))
    assert batch_norms(built(source)) == 2
    assert len(build(source).trainable) == 3


def test_places_of_maxima_are_counted_with_the_padding():
    nodes = [
        node("Constant", [], ["small"], value=numpy_helper.from_array(np.float32(0.01))),
        node("Relu", ["x"], ["r"]),
        node("Pad", ["r", "pads"], ["q"]),
        node("MaxPool", ["q"], ["largest", "places"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Cast", ["places"], ["numbers"], to=TensorProto.FLOAT),
        node("Mul", ["numbers", "small"], ["smaller"]),
        node("Mul", ["largest", "smaller"], ["t"]),
        *CONV,
    ]
    built(model(nodes, K=K, pads=np.array([0, 0, 1, 1, 0, 0, 0, 0])))


def turned(*between: onnx.NodeProto) -> list[onnx.NodeProto]:
    last = [node("Relu", ["z"], ["zr"]), node("Transpose", ["zr"], ["t"], perm=[0, 3, 1, 2])]
    return [node("Transpose", ["x"], ["xt"], perm=[0, 2, 3, 1]), *between, *last, *CONV]


def test_one_element_that_waits_in_another_order_is_made():
    one = node("ReduceMean", ["x"], ["s"], axes=[0, 1, 2, 3], keepdims=1)
    between = [one, node("Transpose", ["s"], ["st"], perm=[0, 3, 1, 2]), node("Add", ["xt", "st"], ["z"])]
    built(model(turned(*between), K=K))


def test_axes_of_a_slice_have_the_type_of_its_starts():
    starts, ends, axes = (np.array([value], np.int32) for value in (0, 2, 1))
    source = model(turned(node("Slice", ["xt", "st", "en", "ax"], ["z"])), K=K, st=starts, en=ends, ax=axes)
    onnx.checker.check_model(built(source), full_check=True)


def test_a_reduction_over_no_axes_named_is_one_over_all():
    nodes = [
        node("ReduceSum", ["xt", "none"], ["s"], keepdims=0),
        node("Add", ["xt", "s"], ["z"]),
    ]
    built(model(turned(*nodes), K=K * 0.01, none=np.zeros(0, np.int64)))
