"""BatchNorms that exporters write out for training are BatchNormalizations again."""

from __future__ import annotations

import json
import time

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from bnfuse.build import build
from bnfuse.verifying.interpreter import run

EPSILON = 1e-3
PLACES = {"w": (4, 3, 3, 3), "v": (2, 4)}


def node(op, inputs, output, name=None, **attrs):
    return helper.make_node(op, inputs, [output], name or f"net/bn_1/batchnorm/{op.lower()}_{output}", **attrs)


def values(**more) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in PLACES.items()}
    found |= {"gamma": rng.uniform(0.5, 2, 4).astype(np.float32), "beta": rng.normal(size=4).astype(np.float32)}
    numbers = {"eps": np.float32(EPSILON), "one": np.float32(1), "two": np.float32(2), "minus": np.float32(-0.5)}
    shapes = {"pixels": [0, 2, 3], "row": [1, 1, 1, 4], "map": [1, 4, 1, 1], "last": [0, 1, 2]}
    return found | numbers | {name: np.array(value, np.int64) for name, value in shapes.items()} | more


def moments(x: str = "c", axes: str = "pixels") -> list[onnx.NodeProto]:
    return [
        node("ReduceMean", [x, axes], "mean", keepdims=1),
        node("Sub", [x, "mean"], "d"),
        node("Mul", ["d", "d"], "square"),
        node("ReduceMean", ["square", axes], "variance", keepdims=1),
    ]


def inverse(scaled: bool = True) -> list[onnx.NodeProto]:
    """1/Sqrt(variance + epsilon) [* gamma] of vectors [4], as Keras has them."""
    nodes = [
        node("Squeeze", ["mean", "pixels"], "m"),
        node("Squeeze", ["variance", "pixels"], "v4"),
        node("Add", ["v4", "eps"], "shifted"),
        node("Sqrt", ["shifted"], "root"),
        node("Reciprocal", ["root"], "r" if not scaled else "r0"),
    ]
    return [*nodes, node("Mul", ["r0", "gamma"], "r")] if scaled else nodes


KERAS = [  # x*r + (beta - mean*r), normalised in NHWC
    *moments(),
    *inverse(),
    node("Mul", ["m", "r"], "mr"),
    node("Sub", ["beta", "mr"], "shift"),
    node("Transpose", ["c"], "t", perm=[0, 2, 3, 1]),
    node("Mul", ["t", "r"], "scaled"),
    node("Add", ["scaled", "shift"], "n"),
    node("Relu", ["n"], "a"),
    node("Transpose", ["a"], "z", perm=[0, 3, 1, 2]),
]
FRESH = [  # of scales of ones and biases of zeros nothing is left
    *moments(),
    *inverse(scaled=False),
    node("Mul", ["m", "r"], "mr"),
    node("Neg", ["mr"], "shift"),
    node("Transpose", ["c"], "t", perm=[0, 2, 3, 1]),
    node("Mul", ["t", "r"], "scaled"),
    node("Add", ["scaled", "shift"], "n"),
    node("Relu", ["n"], "a"),
    node("Transpose", ["a"], "z", perm=[0, 3, 1, 2]),
]
ROWS = [  # vectors [1, 1, 1, 4], and a scale that is folded into that form
    *moments(),
    node("Reshape", ["mean", "row"], "m"),
    node("Reshape", ["variance", "row"], "v4"),
    node("Add", ["v4", "eps"], "shifted"),
    node("Sqrt", ["shifted"], "root"),
    node("Reciprocal", ["root"], "r0"),
    node("Mul", ["wide", "r0"], "r"),
    node("Mul", ["m", "r"], "mr"),
    node("Sub", ["wide_beta", "mr"], "shift"),
    node("Transpose", ["c"], "t", perm=[0, 2, 3, 1]),
    node("Mul", ["r", "t"], "scaled"),
    node("Add", ["shift", "scaled"], "n"),
    node("Relu", ["n"], "a"),
    node("Transpose", ["a"], "z", perm=[0, 3, 1, 2]),
]
WIDE = {name: values()[source].reshape(1, 1, 1, 4) for name, source in (("wide", "gamma"), ("wide_beta", "beta"))}
BY_HAND = [  # (x - mean)/sqrt(variance + epsilon)*gamma + beta
    *moments(),
    node("Add", ["variance", "eps"], "shifted"),
    node("Sqrt", ["shifted"], "root"),
    node("Div", ["d", "root"], "normal"),
    node("Reshape", ["gamma", "map"], "g"),
    node("Reshape", ["beta", "map"], "b"),
    node("Mul", ["normal", "g"], "scaled"),
    node("Add", ["scaled", "b"], "n"),
    node("Relu", ["n"], "z"),
]
POWERS = [  # squares and roots as powers, moments of a map in NHWC
    node("Transpose", ["c"], "t", perm=[0, 2, 3, 1]),
    node("ReduceMean", ["t", "last"], "mean", keepdims=1),
    node("Sub", ["t", "mean"], "d"),
    node("Pow", ["d", "two"], "square"),
    node("ReduceMean", ["square", "last"], "variance", keepdims=1),
    node("Add", ["eps", "variance"], "shifted"),
    node("Pow", ["shifted", "minus"], "r"),
    node("Mul", ["d", "r"], "normal"),
    node("Mul", ["gamma", "normal"], "scaled"),
    node("Add", ["beta", "scaled"], "n"),
    node("Relu", ["n"], "a"),
    node("Transpose", ["a"], "z", perm=[0, 3, 1, 2]),
]
FORMS = {
    "keras": (KERAS, {}),
    "keras, fresh": (FRESH, {}),
    "keras, rows": (ROWS, WIDE),
    "by hand": (BY_HAND, {}),
    "powers": (POWERS, {}),
}


def forward(nodes, more=None, producer="tf2onnx") -> onnx.ModelProto:
    chain = [
        node("Conv", ["x", "w"], "c", "conv", pads=[1, 1, 1, 1]),
        *nodes,
        node("GlobalAveragePool", ["z"], "p", "pool"),
        node("Flatten", ["p"], "f", "flatten"),
        node("Gemm", ["f", "v"], "y", "fc", transB=1),
    ]
    known = values(**(more or {}))
    read = {name for n in chain for name in n.input}
    graph = helper.make_graph(
        chain,
        "g",
        [helper.make_tensor_value_info("x", 1, (3, 3, 5, 4))],
        [helper.make_tensor_value_info("y", 1, (3, 2))],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in known.items() if name in read],
    )
    opset = helper.make_opsetid("", 18)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8, producer_name=producer)


def signature(model: onnx.ModelProto) -> dict:
    return json.loads({entry.key: entry.value for entry in model.metadata_props}["bnfuse.roles"])


def step(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    state = {tensor.name: numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer}
    names = {value.name for value in model.graph.input}
    x, dy = batch()
    return run(model, {k: v for k, v in state.items() if k in names} | {"x": x, "y_grad": dy})


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.normal(0.5, 2, (3, 3, 5, 4)), rng.normal(size=(3, 2))


def by_torch(scale: bool = True) -> dict[str, np.ndarray]:
    import torch

    leaves = {k: torch.from_numpy(values()[k]).double().requires_grad_() for k in ("w", "v", "gamma", "beta")}
    if not scale:
        leaves |= {"gamma": torch.ones(4).double().requires_grad_(), "beta": torch.zeros(4).double().requires_grad_()}
    x, dy = batch()
    c = torch.nn.functional.conv2d(torch.from_numpy(x), leaves["w"], padding=1)
    n = torch.nn.functional.batch_norm(
        c, None, None, leaves["gamma"], leaves["beta"], training=True, eps=float(np.float32(EPSILON))
    )
    scores = n.relu().mean((2, 3)) @ leaves["v"].T
    scores.backward(torch.from_numpy(dy))
    found = {f"{name}_grad": leaf.grad for name, leaf in leaves.items()}
    found |= {"y": scores, "mean": 0.01 * c.mean((0, 2, 3)), "variance": 0.99 + 0.01 * c.var((0, 2, 3), correction=0)}
    return {name: value.detach().numpy() for name, value in found.items()}


@pytest.mark.torch
@pytest.mark.parametrize("form", FORMS)
def test_the_step_is_that_of_a_batch_norm(form):
    nodes, more = FORMS[form]
    built = build(forward(nodes, more), loss="none")
    (norm,) = [n for n in built.model.graph.node if n.op_type == "BatchNorm"]
    assert norm.name == "net/bn_1"
    assert not any(n.op_type in ("Transpose", "ReduceMean") for n in built.model.graph.node)
    roles = signature(built.model)
    names = dict(zip(("gamma", "beta"), norm.input[1:3], strict=True))
    assert {*roles["trainable"]} == {"w", "v", *names.values()}
    assert list(roles["running"]) == ["net/bn_1/moving_mean", "net/bn_1/moving_variance"]
    found, expected = step(built.model), by_torch(form != "keras, fresh")
    for name in ("w", "v"):
        np.testing.assert_allclose(found[f"{name}_grad"], expected[f"{name}_grad"], rtol=1e-10, atol=1e-12)
    for name, own in names.items():
        np.testing.assert_allclose(found[f"{own}_grad"], expected[f"{name}_grad"], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-10, atol=1e-12)
    for name, new in zip(("mean", "variance"), roles["running"].values(), strict=True):
        np.testing.assert_allclose(found[new], expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_the_scores_are_those_of_the_file(form):
    nodes, more = FORMS[form]
    source = forward(nodes, more)
    session = onnxruntime.InferenceSession(source.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": batch()[0].astype(np.float32)})
    np.testing.assert_allclose(step(build(source, loss="none").model)["y"], expected, rtol=1e-4, atol=1e-5)


def test_it_says_what_begins_anew():
    notes = build(forward(KERAS)).notes
    assert notes[0] == (
        "1 BatchNorms written out by the exporter are BatchNormalizations again (net/bn_1). Their running statistics "
        "are not in the file: they begin at 0 and 1, with momentum 0.99"
    )
    assert not any("neither scale nor bias" in note for note in notes)
    assert any(note.startswith("1 of them have neither scale nor bias") for note in build(forward(FRESH)).notes)


def test_a_layer_without_scale_has_one_that_stays():
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in KERAS if list(n.output) != ["r"]]
    for n in nodes:
        n.output[:] = ["r" if name == "r0" else name for name in n.output]
    roles = signature(build(forward(nodes)).model)
    assert roles["trainable"] == ["w", "beta", "v"] and roles["frozen"] == ["net/bn_1/gamma"]


DIFFERENT = {  # what is no BatchNorm: the nodes, and the operands of some of them
    "by sample": (BY_HAND, {"mean": ["c", "map_axes"], "variance": ["square", "map_axes"]}),
    "the variance of something else": (BY_HAND, {"square": ["c", "c"]}),
    "another mean in the shift": (KERAS, {"mr": ["other", "r"]}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_no_batch_norm_stays(name):
    kept, changed = DIFFERENT[name]
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in kept]
    for n in nodes:
        n.input[:] = changed.get(n.output[0], n.input)
    more = {"map_axes": np.array([1, 2, 3], np.int64), "other": np.full(4, 0.5, np.float32)}
    built = build(forward(nodes, more))
    assert not any(n.op_type == "BatchNorm" for n in built.model.graph.node)


def test_products_of_products_are_followed_in_bounded_time():
    """Each squares the one before: as a tree it has 2**300 leaves."""
    nodes = [helper.make_node("ReduceMean", ["x", "axes"], ["v0"], name="mean")]
    nodes += [helper.make_node("Mul", [f"v{i}", f"v{i}"], [f"v{i + 1}"], name=f"square{i}") for i in range(300)]
    nodes += [helper.make_node("Mul", ["x", "v300"], ["y"], name="scaled")]
    info = helper.make_tensor_value_info
    tensors = [
        numpy_helper.from_array(np.array([0, 2, 3]), "axes"),
        numpy_helper.from_array(np.ones((3, 3, 1, 1), np.float32), "w"),
    ]
    nodes += [helper.make_node("Conv", ["y", "w"], ["z"], name="conv")]
    shapes = [info("x", 1, [2, 3, 4, 4])], [info("z", 1, [2, 3, 4, 4])]
    model = helper.make_model(
        helper.make_graph(nodes, "net", *shapes, tensors), opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    begin = time.perf_counter()
    built = build(model, loss="mse")
    assert time.perf_counter() - begin < 20
    assert not [node for node in built.model.graph.node if node.op_type == "BatchNorm"]
