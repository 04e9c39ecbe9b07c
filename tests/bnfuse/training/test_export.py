"""The exported network in plain onnxruntime: logits and accuracy are those of the compiled step's evaluation."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.helper as h
import onnx.parser
import onnxruntime as ort
import pytest
from small_training import BATCH, SAMPLED, forward_model, small_data, small_graph

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.build.named import build_model
from bnfuse.core.errors import BnfuseError
from bnfuse.exporting import inference_model
from bnfuse.graph.training_graph import open_graph
from bnfuse.training import train_step
from bnfuse.training.scoring import evaluate_batches

STANDARD = {"", "ai.onnx"}


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x})
    return found


def check_standard(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} <= STANDARD
    assert {opset.domain for opset in model.opset_import} <= STANDARD
    assert not model.functions
    assert "Dropout" not in {node.op_type for node in model.graph.node}
    assert all(len(n.output) == 1 for n in model.graph.node if n.op_type == "BatchNormalization")


def changed_state(graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Values as after training: nothing is 0 or 1, variances are positive."""
    rng = np.random.default_rng(seed)
    return {
        name: (value + 0.2 * np.abs(rng.standard_normal(value.shape))).astype(value.dtype)
        for name, value in graph.state().items()
    }


@pytest.mark.parametrize("sample", [SAMPLED, None])
@pytest.mark.parametrize("level", ["none", "icf"])
def test_a_trained_step_and_its_export_agree(sample, level, new_step, tmp_path):
    data = small_data(train=40 * BATCH, test=203)
    step = new_step(model=small_graph(sample, level))
    history = train_step(step, data, epochs=4, normalise=True)
    path = tmp_path / "model.onnx"
    bnfuse.export_inference(step, path, mean=data.mean, std=data.std, classes=data.class_names)
    model = onnx.load(path)
    check_standard(model)
    x = data.normalised().test_x
    logits = run(model, x)  # a batch of 203
    accuracy = float((logits.argmax(1) == data.test_y).mean())
    assert round(accuracy, 4) == round(history.accuracy, 4)
    assert accuracy > 0.2
    found = bnfuse.evaluate(path, data.normalised())
    assert (found.images, found.accuracy) == (203, history.accuracy)
    assert np.isclose(found.loss, history.epochs[-1].held_out_loss, rtol=1e-4)
    assert np.abs(step.evaluate(x[:BATCH]) - logits[:BATCH]).max() < 1e-4
    assert np.abs(run(model, x[:1]) - logits[:1]).max() < 1e-4
    about = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert about == {
        "bnfuse.input_mean": list(data.mean),
        "bnfuse.input_std": list(data.std),
        "bnfuse.classes": list("0123456789"),
    }


@pytest.mark.parametrize(
    ("name", "zoo"),
    [
        ("densenet40", {"image": 8, "channels": 1, "growth": 4, "depth": 2}),
        ("resnet20", {"image": 16}),
        ("mobilenetv2", {"image": 32}),
        ("vgg11", {"image": 32, "hidden": 64, "width": 8}),
        ("squeezenet", {"image": 32}),
        ("vgg11-plain", {"image": 32, "hidden": 64, "width": 8}),
    ],
)
def test_graphs_of_all_levels_export_to_the_same_function(name, zoo):
    """Of BatchNorms behind biased convolutions, in front of Concats, with Clip, residual sums; and of none at all."""
    model = build_model(name, zoo={"batch": 2, "classes": 10, **zoo}, loss="cross-entropy").model
    found = {}
    for level in ("none", "bnff", "icf"):
        graph = open_graph(bnfuse.rewrite(model, level=level).model)
        exported = inference_model(graph, changed_state(graph))
        check_standard(exported)
        dims = exported.graph.input[0].type.tensor_type.shape.dim
        assert dims[0].dim_param == "N"
        x = np.random.default_rng(1).standard_normal((3, *(d.dim_value for d in dims[1:]))).astype(np.float32)
        found[level] = run(exported, x)
    for level in ("bnff", "icf"):
        assert np.abs(found[level] - found["none"]).max() <= 1e-5 * np.abs(found["none"]).max()


BRANCHES = """<ir_version: 9, opset_import: ["": 18]>
    g (float[4, 3, 8, 8] image) => (float[4, 10] logits) {
        c0 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(image, w0)
        n0, m0, v0 = BatchNormalization<training_mode = 1>(c0, s0, z0, rm0, rv0)
        a0 = LeakyRelu(n0)
        left, right = Split<axis = 1>(a0, lengths)
        c1 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(right, w1)
        n1, m1, v1 = BatchNormalization<training_mode = 1>(c1, s1, z1, rm1, rv1)
        a1 = LeakyRelu(n1)
        stacked = Reshape(a1, wide)
        turned = Transpose<perm = [0, 2, 1, 3, 4]>(stacked)
        mixed = Reshape(turned, narrow)
        p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(left)
        t = Concat<axis = 1>(left, mixed, p)
        c2 = Conv<kernel_shape = [1, 1]>(t, w2)
        n2, m2, v2 = BatchNormalization<training_mode = 1>(c2, s2, z2, rm2, rv2)
        a2 = LeakyRelu(n2)
        pooled = GlobalAveragePool(a2)
        q = Flatten(pooled)
        logits = Gemm<transB = 1>(q, w3)
    }"""


def test_what_crossed_a_concat_a_split_or_a_shuffle_goes_back():
    model, rng = onnx.parser.parse_model(BRANCHES), np.random.default_rng(0)
    shapes = {"w0": (8, 3, 3, 3), "w1": (4, 4, 3, 3), "w2": (6, 12, 1, 1), "w3": (10, 6)}
    values = {name: rng.standard_normal(shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    for i, channels in enumerate((8, 4, 6)):
        values |= {f"{name}{i}": np.ones(channels, np.float32) for name in ("s", "rv")}
        values |= {f"{name}{i}": np.zeros(channels, np.float32) for name in ("z", "rm")}
    for name, sizes in (("lengths", [4, 4]), ("wide", [4, 2, 2, 8, 8]), ("narrow", [4, 4, 8, 8])):
        values[name] = np.array(sizes, np.int64)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
    built = build_training_graph(model)
    found, kinds = {}, {}
    for level in ("none", "icf"):
        graph = open_graph(bnfuse.rewrite(built, level=level).model)
        exported = inference_model(graph, changed_state(graph))
        check_standard(exported)
        kinds[level] = [node.op_type for node in exported.graph.node]
        found[level] = run(exported, np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype(np.float32))
    assert np.abs(found["icf"] - found["none"]).max() <= 1e-5 * np.abs(found["none"]).max()
    for kind in ("BatchNormalization", "LeakyRelu", "Split", "Concat"):
        assert kinds["icf"].count(kind) == kinds["none"].count(kind), kind
    assert not {"Mul", "Add", "Where"} & {*kinds["icf"]}


def generator() -> onnx.ModelProto:
    """Transposed convolutions with BatchNorms before and behind, in groups and with biases, and a classifier."""
    text = """<ir_version: 9, opset_import: ["": 18]>
    g (float[4, 3, 4, 4] image) => (float[4, 10] logits) {
        a = ConvTranspose<kernel_shape = [4, 4], strides = [2, 2], pads = [1, 1, 1, 1]>(image, w0, b0)
        n, m0, v0 = BatchNormalization<training_mode = 1>(a, s0, z0, rm0, rv0)
        r = Relu(n)
        c = ConvTranspose<kernel_shape = [3, 3], strides = [2, 2], output_padding = [1, 1], group = 2>(r, w1)
        k, m1, v1 = BatchNormalization<training_mode = 1>(c, s1, z1, rm1, rv1)
        t = LeakyRelu(k)
        u = ConvTranspose<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(t, w2, b2)
        p = GlobalAveragePool(u)
        q = Flatten(p)
        logits = Gemm<transB = 1>(q, w3, b3)
    }"""
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    shapes = {
        "w0": (3, 8, 4, 4),
        "b0": (8,),
        "w1": (8, 3, 3, 3),
        "w2": (6, 5, 3, 3),
        "b2": (5,),
        "w3": (10, 5),
        "b3": (10,),
    }
    values = {name: rng.standard_normal(shape) / 3 for name, shape in shapes.items()}
    for i, channels in enumerate((8, 6)):
        values |= {f"{name}{i}": np.ones(channels) for name in ("s", "rv")}
        values |= {f"{name}{i}": np.zeros(channels) for name in ("z", "rm")}
    tensors = [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()]
    model.graph.initializer.extend(tensors)
    for index, node in enumerate(model.graph.node):
        node.name = f"n{index}"
    return model


@pytest.fixture(scope="module")
def transposed() -> onnx.ModelProto:
    return build_training_graph(generator())


def test_transposed_convolutions_export_as_they_were(transposed):
    found = {}
    for level in ("none", "icf"):
        graph = open_graph(bnfuse.rewrite(transposed, level=level).model)
        exported = inference_model(graph, changed_state(graph))
        check_standard(exported)
        found[level] = run(exported, np.random.default_rng(1).standard_normal((3, 3, 4, 4)).astype(np.float32))
    assert np.abs(found["icf"] - found["none"]).max() <= 1e-5 * np.abs(found["none"]).max()


def test_transposed_convolutions_compile_to_what_their_file_computes(transposed):
    fused = bnfuse.rewrite(transposed, level="icf")
    assert fused.report.unfused == ()
    assert bnfuse.verify(transposed, fused.model, runtime="tvm", threads=1).equal


def test_removed_batch_norms_export_as_nothing():
    model = build_model("resnet20", zoo={"batch": 2, "image": 16, "classes": 10}, loss="cross-entropy").model
    rewritten = bnfuse.rewrite(model, level="icf", remove="all")
    exported = inference_model(open_graph(rewritten.model), open_graph(rewritten.model).state())
    assert "BatchNormalization" not in {node.op_type for node in exported.graph.node}
    assert run(exported, np.zeros((5, 3, 16, 16), np.float32)).shape == (5, 10)


def test_local_statistics_export_as_batch_norms():
    model = build_training_graph(forward_model())
    for options in ({"local_bn": 4}, {"local_bn": 4, "sample": "vdn:1"}):
        graph = open_graph(bnfuse.rewrite(model, level="icf", **options).model)
        whole = open_graph(model)
        state = changed_state(whole)
        x = small_data().test_x[:7]
        ours, theirs = inference_model(graph, state), inference_model(whole, state)
        check_standard(ours)
        assert np.abs(run(ours, x) - run(theirs, x)).max() < 1e-5


def test_a_training_graph_exports_with_a_checkpoint(graph, new_step, data, tmp_path):
    step = new_step()
    train_step(step, data, epochs=1, save_to=tmp_path / "run")
    bnfuse.export_inference(step, tmp_path / "a.onnx")
    bnfuse.export_inference(graph, tmp_path / "b.onnx", state=tmp_path / "run" / "last.safetensors")
    bnfuse.export_inference(graph, tmp_path / "c.onnx", state=step.state_dict())
    one, *others = ((tmp_path / f"{name}.onnx").read_bytes() for name in "abc")
    assert all(other == one for other in others)


def test_a_state_of_another_network_is_refused(graph, tmp_path):
    with pytest.raises(BnfuseError, match="the state lacks 'conv1"):
        bnfuse.export_inference(graph, tmp_path / "a.onnx", state={})
    state = open_graph(graph).state()
    state["conv1/weight"] = np.zeros((1, 1, 3, 3), np.float32)
    with pytest.raises(BnfuseError, match=r"'conv1/weight' has the shape \[1, 1, 3, 3\], not \[8, 1, 3, 3\]"):
        bnfuse.export_inference(graph, tmp_path / "a.onnx", state=state)


def test_a_reshape_that_holds_the_batch_is_freed_of_it():
    model = forward_model()
    (flatten,) = (node for node in model.graph.node if node.op_type == "Flatten")
    index = list(model.graph.node).index(flatten)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([BATCH, 16]), "shape"))
    model.graph.node.remove(flatten)
    model.graph.node.insert(index, h.make_node("Reshape", ["pooled", "shape"], ["flat"], name="reshape"))
    graph = open_graph(build_training_graph(model))
    exported = inference_model(graph, graph.state())
    assert exported.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    assert run(exported, np.zeros((5, 1, 8, 8), np.float32)).shape == (5, 10)


def test_where_the_batch_cannot_be_left_open_it_stays_and_is_filled_up(tmp_path):
    """A Reshape that mixes the batch with channels before it is taken apart again."""
    model = forward_model()
    (flatten,) = (node for node in model.graph.node if node.op_type == "Flatten")
    index = list(model.graph.node).index(flatten)
    for name, shape in (("one", [BATCH * 16]), ("two", [BATCH, 16])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(shape), name))
    model.graph.node.remove(flatten)
    model.graph.node.insert(index, h.make_node("Reshape", ["pooled", "one"], ["line"], name="reshape1"))
    model.graph.node.insert(index + 1, h.make_node("Reshape", ["line", "two"], ["flat"], name="reshape2"))
    graph = open_graph(build_training_graph(model))
    exported = inference_model(graph, graph.state())
    assert exported.graph.input[0].type.tensor_type.shape.dim[0].dim_value == BATCH
    assert run(exported, np.zeros((BATCH, 1, 8, 8), np.float32)).shape == (BATCH, 10)
    path = tmp_path / "model.onnx"
    assert bnfuse.export_inference(graph, path) == "node 'reshape1' (Reshape) has the batch of 16 in a constant"
    data = small_data(test=21)
    found = bnfuse.evaluate(path, data)
    logits = np.concatenate([run(exported, np.repeat(x[None], BATCH, 0))[:1] for x in data.test_x]).astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert (found.images, found.right) == (21, int((logits.argmax(1) == data.test_y).sum()))
    assert np.isclose(found.loss, -np.log(p[np.arange(21), data.test_y]).mean(), rtol=1e-6)


def segmenter(last: str) -> onnx.ModelProto:
    """Conv, BN, ReLU, and a 1x1 Conv; what comes `last` makes the logits, a class for each pixel."""
    rng = np.random.default_rng(0)
    values = {
        "w1": 0.3 * rng.standard_normal((4, 1, 3, 3)),
        "w2": 0.3 * rng.standard_normal((3, 4, 1, 1)),
        **{f"bn{i}/{what}": 1 + 0.1 * rng.random(c) for i, c in ((1, 4), (2, 3)) for what in ("s", "b", "m", "v")},
        "ratio": np.array(0.5),
    }
    weights = [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()]
    weights.append(onnx.numpy_helper.from_array(np.array(True), "training"))

    def norm(i: int, x: str, y: str) -> onnx.NodeProto:
        operands = [x, *(f"bn{i}/{what}" for what in ("s", "b", "m", "v"))]
        results = [y, f"bn{i}/new_mean", f"bn{i}/new_var"]
        return h.make_node("BatchNormalization", operands, results, name=f"bn{i}", training_mode=1)

    nodes = [
        h.make_node("Conv", ["image", "w1"], ["y1"], pads=[1] * 4),
        norm(1, "y1", "z1"),
        h.make_node("Relu", ["z1"], ["r1"]),
        h.make_node("Conv", ["r1", "w2"], ["y2"]),
    ]
    ends = {
        "bn": [norm(2, "y2", "logits")],
        "dropout": [h.make_node("Dropout", ["y2", "ratio", "training"], ["logits"])],
        "bn, dropout": [norm(2, "y2", "z2"), h.make_node("Dropout", ["z2", "ratio", "training"], ["logits"])],
    }
    image = h.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [BATCH, 1, 6, 5])
    logits = h.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [BATCH, 3, 6, 5])
    graph = h.make_graph(nodes + ends[last], "segmenter", [image], [logits], weights)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)


def evaluating(model: onnx.ModelProto) -> onnx.ModelProto:
    """The forward model by its running statistics, without dropout."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in copy.graph.initializer:
        if tensor.name == "training":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(False), "training"))
    for node in copy.graph.node:
        if node.op_type == "BatchNormalization":
            del node.output[1:], node.attribute[:]
    return copy


@pytest.mark.parametrize("how", [{"level": "none"}, {"level": "icf"}, {"sample": "fs:1/4"}, {"local_bn": 4}])
@pytest.mark.parametrize("last", ["bn", "dropout", "bn, dropout"])
def test_what_changes_in_evaluation_may_be_the_last_node(last, how):
    """Its result is an output of the graph, and what takes its place becomes that output."""
    forward = segmenter(last)
    graph = bnfuse.rewrite(build_training_graph(forward), **how)
    step = bnfuse.compile(graph, threads=1)
    x = np.random.default_rng(1).standard_normal((BATCH, 1, 6, 5)).astype(np.float32)
    expected = run(evaluating(forward), x)
    np.testing.assert_allclose(step.evaluate(x), expected, rtol=1e-4, atol=1e-5)
    exported = inference_model(open_graph(graph), step.state_dict())
    assert [value.name for value in exported.graph.output] == ["logits"]
    np.testing.assert_allclose(run(exported, x[:5]), expected[:5], rtol=1e-4, atol=1e-5)


TWICE = """<ir_version: 9, opset_import: ["": 18]>
    g (float[4, 3, 6, 6] image) => (float[4, 10] logits) {
        c0 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(image, w0)
        n0, m0, v0 = BatchNormalization<training_mode = 1>(c0, s, z, rm, rv)
        r0 = Relu(n0)
        c1 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(r0, w1)
        n1, m1, v1 = BatchNormalization<training_mode = 1>(c1, s, z, rm, rv)
        r1 = Relu(n1)
        pooled = GlobalAveragePool(r1)
        q = Flatten(pooled)
        logits = Gemm<transB = 1>(q, w2)
    }"""


@pytest.mark.parametrize("level", ["none", "rcf", "bnff", "icf"])
@pytest.mark.parametrize("how", ["onnx", "torch"])
def test_a_batch_norm_in_two_places_exports_with_the_statistics_of_both(how, level):
    """Its running statistics go from one place to the next in training; in inference each reads them as they are."""
    model, rng = onnx.parser.parse_model(TWICE), np.random.default_rng(0)
    shapes = {"w0": (5, 3, 3, 3), "w1": (5, 5, 3, 3), "w2": (10, 5), "s": (5,), "z": (5,), "rm": (5,), "rv": (5,)}
    for name, shape in shapes.items():
        value = rng.standard_normal(shape) / 3 if name.startswith("w") else rng.uniform(0.5, 1.5, shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    built = build_training_graph(model, running_variance=how)
    graph = open_graph(bnfuse.rewrite(built, level=level).model)
    x = rng.standard_normal((4, 3, 6, 6)).astype(np.float32)
    exported = inference_model(graph, graph.state())
    check_standard(exported)
    np.testing.assert_allclose(run(exported, x), run(evaluating(model), x), rtol=1e-5, atol=1e-6)


def test_scores_of_pixels_are_no_logits():
    parts = iter([(np.zeros((4, 3, 2, 2), np.float32), np.zeros(4, np.int64))])
    with pytest.raises(BnfuseError, match=r"gives \[4, 5, 1, 1\] for 4 images: logits are \[N, classes\]"):
        evaluate_batches(lambda x: np.zeros((len(x), 5, 1, 1), np.float32), parts)
