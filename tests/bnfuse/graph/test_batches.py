"""A training graph at another batch is the graph that is built at that batch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from small_training import forward_model

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.batches import with_batch
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.training_graph import open_graph
from bnfuse.ort.oracle import OrtGraph

BATCH = 4
BODIES = {
    "Reshape that names the batch": ("z = Reshape(y, shape)", {"shape": [4, 18]}),
    "sequence": (
        """t = Transpose<perm = [2, 0, 1]>(q) r = Reshape(t, rows) s = MatMul(r, square) u = Reshape(s, back)
        v = Transpose<perm = [1, 2, 0]>(u) z = Reshape(v, shape)""",
        {"rows": [36, 2], "back": [9, 4, 2], "shape": [4, 18]},
    ),
    "halves": (
        "a, b = Split<axis = 0>(q, half) j = Concat<axis = 0>(b, a) z = Reshape(j, shape)",
        {"half": [2, 2], "shape": [4, 18]},
    ),
    "two in one": (
        """d = Concat<axis = 0>(q, q) e = Relu(d) f = Slice(e, none, four, none) g = Slice(e, four, eight, none)
        i = Add(f, g) z = Reshape(i, shape)""",
        {"none": [0], "four": [4], "eight": [8], "shape": [4, 18]},
    ),
    "groups beside a map as it is": (
        """i = InstanceNormalization(c, scale, bias) r = Relu(i) k = Concat<axis = 1>(r, y) d = Conv(k, wide)
        z = Reshape(d, shape)""",
        {"shape": [4, 18]},
    ),
    "first state": (
        "zeros = ConstantOfShape(size) z0 = Reshape(q, shape) z = Max(z0, zeros)",
        {"size": [4, 18], "shape": [4, 18]},
    ),
}


def network(body: str, constants: dict[str, list[int]], batch: int = BATCH) -> onnx.ModelProto:
    """A BatchNorm over [N, 2, 3, 3], a body from y (and q, [N, 2, 9]) to z, [N, 18], and a classifier."""
    rng = np.random.default_rng(0)
    values = {name: np.array(value, np.int64) for name, value in constants.items()}
    floats = {"w": (2, 2, 1, 1), "scale": (2,), "bias": (2,), "head": (18, 5), "square": (2, 2), "wide": (2, 4, 1, 1)}
    values |= {name: rng.standard_normal(shape).astype(np.float32) for name, shape in floats.items()}
    values |= {"mean": np.zeros(2, np.float32), "var": np.ones(2, np.float32), "pixels": np.array([0, 2, 9])}
    text = f"""<ir_version: 8, opset_import: ["" : 18]> g (float[{batch},2,3,3] x) => (float[{batch},5] logits) {{
        c = Conv(x, w) n, nm, nv = BatchNormalization<training_mode = 1>(c, scale, bias, mean, var) y = Relu(n)
        q = Reshape(y, pixels) {body} logits = MatMul(z, head) }}"""
    model = onnx.parser.parse_model(text)
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in values.items() if k in used)
    return model


def built(body: str, constants: dict[str, list[int]], batch: int = BATCH) -> ir.Model:
    """The training graph, its constants as of `batch`."""
    own = {
        k: [batch * v // BATCH if v in (4, 8, 36) or k == "half" else v for v in value]
        for k, value in constants.items()
    }
    return ir.from_proto(build_training_graph(network(body, own, batch)))


@pytest.mark.parametrize("level", ["none", "icf"])
def test_unbiased_variances_are_those_of_the_samples_that_there_are(level):
    models = [
        ir.from_proto(build_training_graph(forward_model(0.0), batch=batch, running_variance="torch"))
        for batch in (16, 7)
    ]
    large, small = (bnfuse.rewrite(model, level=level).model for model in models)
    found, wanted = results(with_batch(open_graph(large), 7).model), results(small)
    assert all(np.allclose(found[name], value, rtol=1e-5, atol=1e-6) for name, value in wanted.items())


def results(model: ir.Model) -> dict[str, np.ndarray]:
    graph = open_graph(model)
    feeds = draw_feeds(graph, np.random.default_rng(1))
    outputs = [*graph.signature.results, *graph.signature.gradients.values(), *graph.signature.running.values()]
    return OrtGraph(graph.model, name="graph", threads=1).run({**graph.state(), **feeds}, outputs)


@pytest.mark.parametrize(("body", "level"), [*((body, "icf") for body in BODIES), ("sequence", "none")])
def test_it_computes_what_the_graph_that_is_built_at_that_batch_computes(body, level):
    rewritten = bnfuse.rewrite(built(*BODIES[body]), level=level).model
    for batch in (6, 2):
        moved = with_batch(open_graph(rewritten), batch).model
        wanted = results(built(*BODIES[body], batch))
        found = results(moved)
        for name, value in wanted.items():
            assert found[name].shape == value.shape
            assert np.allclose(found[name], value, rtol=1e-4, atol=1e-5), (batch, name)


@pytest.mark.parametrize("loss", ["cross-entropy(label_smoothing=0.1)", "mse", "soft-cross-entropy", "focal"])
def test_losses_are_means_over_the_samples_that_there_are(loss):
    moved = with_batch(open_graph(build_training_graph(forward_model(0.0), loss=loss)), 7)
    small = build_training_graph(forward_model(0.0), loss=loss, batch=7)
    found, wanted = results(moved.model), results(ir.from_proto(small))
    assert all(np.allclose(found[name], value, rtol=1e-5, atol=1e-6) for name, value in wanted.items())


def test_its_own_batch_leaves_the_graph_as_it_is():
    graph = open_graph(build_training_graph(forward_model()))
    assert with_batch(graph, 16) is graph


def test_the_graph_that_it_is_made_of_stays_as_it_was():
    graph = open_graph(build_training_graph(forward_model()))
    before = ir.to_proto(graph.model).SerializeToString()
    with_batch(graph, 7)
    assert ir.to_proto(graph.model).SerializeToString() == before


REFUSED = {
    "one of the samples": ("i = Gather<axis = 0>(q, first) j = Add(q, i) z = Reshape(j, shape)", {"first": [0]}),
    "some of the samples": ("i = Slice(q, none, two, none) j = Concat<axis = 0>(i, i) z = Reshape(j, shape)", {}),
    "a number for each sample": ("z0 = Reshape(q, shape) z = Mul(z0, own)", {}),
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_cannot_be_followed_is_refused_with_its_node(body):
    text, constants = REFUSED[body]
    model = network(text, {"shape": [4, 18], "none": [0], "two": [2], **constants})
    own = onnx.numpy_helper.from_array(np.arange(4, dtype=np.float32)[:, None], "own")
    model.graph.initializer.append(own)
    graph = open_graph(build_training_graph(model))
    for batch in (7, 1):
        with pytest.raises(BnfuseError, match=r"node '.*' \((Gather|Slice|Mul)\).*build it anew with --batch"):
            with_batch(graph, batch)


def test_a_division_by_the_number_of_samples_is_refused():
    model = network("z = Reshape(q, shape)", {"shape": [4, 18]})
    graph = open_graph(build_training_graph(model, loss="mse"))
    node = next(node for node in graph.model.graph if node.op_type == "ReduceMean")
    count = ir.Value(name="count", const_value=ir.tensor(np.float32(20), name="count"))
    count.shape, count.type = ir.Shape([]), ir.TensorType(ir.DataType.FLOAT)
    graph.model.graph.register_initializer(count)
    total = ir.node("ReduceSum", list(node.inputs), {"keepdims": 0}, name="total")
    total.outputs[0].name, total.outputs[0].shape, total.outputs[0].type = "total", ir.Shape([]), count.type
    mean = ir.node("Div", [total.outputs[0], count], name="mean")
    ir.convenience.replace_nodes_and_values(graph.model.graph, node, [node], [total, mean], node.outputs, mean.outputs)
    with pytest.raises(BnfuseError, match=r"node 'mean' \(Div\) divides by the constant 20, which may count samples"):
        with_batch(graph, 8)


def test_a_batch_of_one_value_in_a_channel_has_no_variance():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]> g (float[4,3] x) => (float[4,3] logits) {
        logits, nm, nv = BatchNormalization<training_mode = 1>(x, scale, bias, mean, var) }"""
    )
    parts = {"scale": np.ones(3), "bias": np.zeros(3), "mean": np.zeros(3), "var": np.ones(3)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v.astype(np.float32), k) for k, v in parts.items())
    with pytest.raises(BnfuseError, match="has one value in a channel"):
        with_batch(open_graph(build_training_graph(model)), 1)


def test_a_batch_of_one_cannot_be_told_from_other_dimensions():
    graph = open_graph(build_training_graph(forward_model(), batch=1))
    with pytest.raises(BnfuseError, match="batch of 1, which cannot be told"):
        with_batch(graph, 4)


def test_random_values_are_drawn_for_the_batch():
    mask = "m = RandomUniformLike<seed = 1.0>(one) z0 = Reshape(q, shape) z = Mul(z0, m)"
    model = network(mask, {"shape": [4, 18]})
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((4, 1), np.float32), "one"))
    moved = with_batch(open_graph(build_training_graph(model)), 6)
    (draw,) = (node for node in moved.model.graph if node.op_type == "RandomUniformLike")
    assert draw.outputs[0].shape == [6, 1]


def test_a_mean_over_the_batch_by_a_constant_is_refused():
    """x.sum(0) / 16 stays divided by 16, of whatever shape it is."""
    nodes = [
        helper.make_node("Constant", [], ["sixteen"], value=numpy_helper.from_array(np.float32(16))),
        helper.make_node("MatMul", ["x", "w"], ["z"], name="layer"),
        helper.make_node("ReduceSum", ["z", "axes"], ["sums"], name="sums", keepdims=0),
        helper.make_node("Div", ["sums", "sixteen"], ["means"], name="mean_16"),
        helper.make_node("ReduceSum", ["means"], ["loss"], name="sum", keepdims=0),
    ]
    tensors = [
        numpy_helper.from_array(np.ones((3, 5), np.float32), "w"),
        numpy_helper.from_array(np.array([0]), "axes"),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "net", [info("x", 1, [16, 3])], [info("loss", 1, [])], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(BnfuseError, match=r"'mean_16' \(Div\) divides by the constant 16, which may count samples"):
        with_batch(open_graph(build_training_graph(model, loss="own")), 4)
