"""Losses that come with the user: at the end of the file, and in a file of their own."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bnfuse.build import build
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.signature import METADATA_KEY, GraphSignature
from bnfuse.verifying.interpreter import run

BATCH, CLASSES, FEATURES = 6, 3, 5
WEIGHTS = np.array([0.5, 1.0, 2.0], np.float32)
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def info(name, kind, shape):
    return helper.make_tensor_value_info(name, kind, shape)


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"make_{outputs.split()[0]}", **attributes)


def model_of(nodes, inputs, outputs, values, opset=18, name="g"):
    tensors = [numpy_helper.from_array(np.asarray(value), key) for key, value in values.items()]
    graph = helper.make_graph(nodes, name, inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def weights(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(0, 1, (FEATURES, CLASSES)).astype(np.float32),
        "b": rng.normal(0, 1, CLASSES).astype(np.float32),
    }


NETWORK = [node("MatMul", "x w", "p"), node("Add", "p b", "z")]
CLASS_LABELS = info("y", INT64, [BATCH])
FLOAT_LABELS = info("y", FLOAT, [BATCH, CLASSES])


def with_loss(nodes, labels, values=None, outputs=(), shape=()):
    """A network x -> z, and behind it nodes from z and y to l."""
    outs = [info("l", FLOAT, list(shape)), *(info(name, FLOAT, None) for name in outputs)]
    inputs = [info("x", FLOAT, [BATCH, FEATURES]), *([labels] if labels is not None else [])]
    return model_of([*NETWORK, *nodes], inputs, outs, {**weights(), **(values or {})})


ONE, GAMMA = np.float32(1), np.float32(2)
CROSS_ENTROPY = node("SoftmaxCrossEntropyLoss", "z y", "l")
WEIGHTED = node("SoftmaxCrossEntropyLoss", "z y cw", "l")
FOCAL = [
    node("SoftmaxCrossEntropyLoss", "z y", "e", reduction="none"),
    node("Neg", "e", "n"),
    node("Exp", "n", "q"),
    node("Sub", "one q", "r"),
    node("Pow", "r gamma", "m"),
    node("Mul", "m e", "f"),
    node("ReduceMean", "f", "l", keepdims=0),
]
BCE = [
    node("Sigmoid", "z", "s"),
    node("Log", "s", "log_s"),
    node("Sub", "one s", "t"),
    node("Log", "t", "log_t"),
    node("Sub", "one y", "u"),
    node("Mul", "log_s pos", "h"),
    node("Mul", "y h", "v"),
    node("Mul", "u log_t", "k"),
    node("Add", "v k", "j"),
    node("Neg", "j", "i"),
    node("ReduceMean", "i", "l", keepdims=0),
]
MSE = [node("Sub", "z y", "d"), node("Mul", "d d", "dd"), node("ReduceMean", "dd", "l", keepdims=0)]
BY_HAND = [  # -log_prob[y], its mean
    node("LogSoftmax", "z", "lp", axis=1),
    node("Unsqueeze", "y one_axis", "yy"),
    node("GatherElements", "lp yy", "o", axis=1),
    node("ReduceMean", "o", "om", keepdims=0),
    node("Neg", "om", "l"),
]

CASES = {
    "class weights": (with_loss([WEIGHTED], CLASS_LABELS, {"cw": WEIGHTS}), "z", ()),
    "ignoring": (with_loss([node("SoftmaxCrossEntropyLoss", "z y", "l", ignore_index=2)], CLASS_LABELS), "z", ()),
    "focal": (with_loss(FOCAL, CLASS_LABELS, {"one": ONE, "gamma": GAMMA}), "z", ()),
    "bce": (with_loss(BCE, FLOAT_LABELS, {"one": ONE, "pos": WEIGHTS}), "s", ("y",)),
    "mse": (with_loss(MSE, FLOAT_LABELS), "z", ("y",)),
    "by hand": (with_loss(BY_HAND, CLASS_LABELS, {"one_axis": np.array([1], np.int64)}), "z", ()),
}


def signature_of(model):
    return GraphSignature.from_json({entry.key: entry.value for entry in model.metadata_props}[METADATA_KEY])


def feeds_of(model, seed=3):
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if value.name in weights():
            continue
        if value.type.tensor_type.elem_type == INT64:
            feeds[value.name] = rng.integers(0, CLASSES, shape)
        elif value.name == "x":
            feeds[value.name] = rng.normal(0, 1, shape)
        else:
            feeds[value.name] = rng.uniform(0, 1, shape)
    return feeds


def without_values(model, names):
    """The model in float64, with these initializers as inputs, so that they can be fed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.data_type == FLOAT:
            wide = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
    for each in (*copy.graph.node, *(body for function in copy.functions for body in function.node)):
        for attribute in each.attribute:
            if each.op_type == "Cast" and attribute.i == FLOAT:
                attribute.i = TensorProto.DOUBLE
            if attribute.t.data_type == FLOAT:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(np.float64)))
    tensors = {tensor.name: tensor for tensor in copy.graph.initializer}
    for name in names:
        copy.graph.initializer.remove(tensors[name])
        if name not in {value.name for value in copy.graph.input}:
            copy.graph.input.append(info(name, FLOAT, tensors[name].dims))
    return copy


def slopes(forward, feeds, loss="l", step=1e-5):
    """The gradients of the loss at the weights by central differences, in float64."""
    start = {name: value.astype(np.float64) for name, value in weights().items()}
    plain = without_values(forward, start)
    found = {}
    for name, value in start.items():
        found[name] = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            both = []
            for sign in (1, -1):
                moved = value.copy()
                moved[index] += sign * step
                both.append(float(run(plain, {**feeds, **start, name: moved}, [loss])[loss].reshape(())))
            found[name][index] = (both[0] - both[1]) / (2 * step)
    return found


def check_gradients(built, forward, loss="l"):
    """Compare a training file with central differences of a forward file."""
    feeds, signature = feeds_of(built), signature_of(built)
    start = {name: value.astype(np.float64) for name, value in weights().items()}
    wanted = [signature.loss, "w_grad", "b_grad"]
    given = {**feeds, **start}
    results = run(without_values(built, start), given, wanted)
    plain = {name: feeds[name] for name in (value.name for value in forward.graph.input) if name in feeds}
    expected = run(without_values(forward, start), {**plain, **start}, [loss])[loss]
    assert results[signature.loss] == pytest.approx(float(np.reshape(expected, ())), rel=1e-9)
    for name, expected in slopes(forward, plain, loss).items():
        np.testing.assert_allclose(results[f"{name}_grad"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_file_and_its_gradients(name):
    forward, scores, labels = CASES[name]
    built = build(forward, loss="own", labels=labels).model
    signature = signature_of(built)
    assert (signature.data, signature.labels, signature.loss) == (("x",), ("y",), "l")
    assert signature.logits == scores and signature.trainable == ("w", "b") and signature.frozen == ()
    assert [value.name for value in built.graph.output][:2] == ["l", scores]
    check_gradients(built, forward)


@pytest.mark.parametrize("name", ["bce", "class weights"])
def test_such_a_file_is_rewritten_verified_and_compiled(name, tmp_path):
    import bnfuse

    forward, _, labels = CASES[name]
    bnfuse.save(build(forward, loss="own", labels=labels).model, tmp_path / "train.onnx")
    fused = bnfuse.rewrite(tmp_path / "train.onnx")
    assert bnfuse.verify(tmp_path / "train.onnx", fused, runtime="tvm", threads=1).equal
    step = bnfuse.compile(fused, optimizer=bnfuse.SGD(lr=0.1), threads=1)
    feeds = feeds_of(forward)
    x, y = feeds["x"].astype(np.float32), feeds["y"].astype(np.float32 if labels else np.int64)
    losses = [step(x, y) for _ in range(5)]
    assert losses[-1] < losses[0] and step.evaluate(x).shape == (BATCH, CLASSES)


def test_soft_labels_that_torch_writes_as_classes(step):
    forward = with_loss([WEIGHTED], FLOAT_LABELS, {"cw": WEIGHTS})
    built = build(forward, loss="own", labels=["y"])
    assert "wrote 1 SoftmaxCrossEntropyLoss of probabilities by other operators" in built.notes[0]
    assert signature_of(built.model).logits == "z"
    results, feeds = step(built.model)
    scores = feeds["x"] @ weights()["w"] + weights()["b"]
    log_prob = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    assert results["l"] == pytest.approx(-(feeds["y"] * log_prob * WEIGHTS).sum(1).mean(), rel=1e-5)


def test_a_loss_of_shape_1_becomes_a_number():
    forward = with_loss([*MSE[:2], node("ReduceMean", "dd", "m", keepdims=0), node("Reshape", "m s1", "l")],
                        FLOAT_LABELS, {"s1": np.array([1], np.int64)}, shape=(1,))  # fmt: skip
    built = build(forward, loss="own", labels=["y"]).model
    assert signature_of(built).loss == "loss"
    check_gradients(built, forward)


def test_scores_are_an_output_or_what_is_named():
    assert (
        signature_of(build(with_loss(MSE, FLOAT_LABELS, outputs=["p"]), loss="own", labels=["y"]).model).logits == "p"
    )
    named = build(with_loss(FOCAL, CLASS_LABELS, {"one": ONE, "gamma": GAMMA}), loss="own", logits="p").model
    assert signature_of(named).logits == "p"


def test_several_numbers_need_a_name():
    forward = with_loss([*MSE, node("ReduceMax", "dd", "worst", keepdims=0)], FLOAT_LABELS)
    forward.graph.output.append(info("worst", FLOAT, []))
    with pytest.raises(BnfuseError, match=r"outputs l, worst are single numbers: say which one .*own@NAME"):
        build(forward, loss="own", labels=["y"])
    built = build(forward, loss="own@l", labels=["y"])
    assert signature_of(built.model).loss == "l" and built.notes == ("left out worst: the loss is l",)


def test_two_heads_with_a_loss_each_have_no_scores():
    nodes = [
        node("SoftmaxCrossEntropyLoss", "z y", "l1"),
        node("SoftmaxCrossEntropyLoss", "p y", "l2"),
        node("Add", "l1 l2", "l"),
    ]
    built = build(with_loss(nodes, CLASS_LABELS), loss="own").model
    assert signature_of(built).logits == "p"  # the last that both read
    nodes[1] = node("SoftmaxCrossEntropyLoss", "other y", "l2")
    other = {"v": np.ones((FEATURES, CLASSES), np.float32)}
    built = build(with_loss([node("MatMul", "x v", "other"), *nodes], CLASS_LABELS, other), loss="own").model
    assert signature_of(built).logits is None


@pytest.mark.parametrize(
    ("model", "how", "message"),
    [
        (with_loss(MSE, FLOAT_LABELS), {"loss": "own", "labels": ["t"]}, "--labels t: there is no such input"),
        (with_loss(MSE, FLOAT_LABELS), {"loss": "own@q"}, "--loss own@q: there is no such output, there are l"),
        (with_loss(MSE, FLOAT_LABELS), {"loss": "own", "logits": "q"}, "--logits q: there is no such output"),
        (with_loss(MSE, FLOAT_LABELS), {"loss": "mse", "labels": ["y"]}, "--labels y is for losses that have inputs"),
        (with_loss(MSE, FLOAT_LABELS), {}, r"build adds the loss: take the file's own \(--loss own\)"),
        (with_loss([node("Neg", "z", "l")], None, shape=(BATCH, CLASSES)), {"loss": "own"}, "none of its outputs"),
        (
            with_loss([node("Neg", "z", "l")], None, shape=(BATCH, CLASSES)),
            {"loss": "own@l"},
            r"output 'l' has shape \[6, 3\]: a loss is a single number",
        ),
        (
            with_loss([node("Cast", "y", "c", to=1), *MSE], info("y", TensorProto.BOOL, [BATCH, CLASSES])),
            {"loss": "own", "labels": ["y"]},
            "labels input 'y' is bool: it must be int64, int32 or float",
        ),
    ],
)
def test_what_is_no_such_loss_is_one_line(model, how, message):
    with pytest.raises(BnfuseError, match=message) as caught:
        build(model, **how)
    assert "\n" not in str(caught.value)


def test_constants_of_a_loss_train_where_they_are_named():
    forward, _, labels = CASES["bce"]
    assert build(forward, loss="own", labels=labels).notes == (
        "constants of the loss stay as they are: pos. --train '*' --train NAME trains them",
    )
    signature = signature_of(build(forward, loss="own", labels=labels, train=["*", "pos"]).model)
    assert set(signature.trainable) == {"w", "b", "pos"}


def test_inputs_of_floats_that_nobody_named_are_told():
    built = build(with_loss(MSE, FLOAT_LABELS), loss="own")
    assert signature_of(built.model).data == ("x", "y") and "--labels NAME" in built.warnings[0]


# A file of its own


def network(opset=18, outputs=("z",)):
    outs = [info(name, FLOAT, [BATCH, CLASSES]) for name in outputs]
    return model_of(NETWORK, [info("x", FLOAT, [BATCH, FEATURES])], outs, weights(), opset=opset)


def loss_file(nodes, inputs, values=None, opset=18, output="l"):
    return model_of(nodes, inputs, [info(output, FLOAT, [])], values or {}, opset=opset, name="loss")


SCORES = info("z", FLOAT, ["N", "C"])
MSE_FILE = loss_file(MSE, [SCORES, info("y", FLOAT, ["N", "C"])])


@pytest.mark.parametrize(("ours", "theirs"), [(18, 18), (13, 20), (20, 13)])
def test_a_loss_in_a_file_and_its_gradients(ours, theirs):
    values = {"one": ONE, "gamma": GAMMA}
    nodes = FOCAL if theirs >= 18 else [*FOCAL[:-1], node("ReduceMean", "f", "l", keepdims=0)]
    file = loss_file(nodes, [SCORES, info("y", INT64, ["N"])], values, opset=theirs)
    built = build(network(ours), loss=file).model
    signature = signature_of(built)
    assert (signature.labels, signature.loss, signature.logits) == (("y",), "loss", "z")
    assert signature.trainable == ("w", "b")
    check_gradients(built, CASES["focal"][0])


def test_names_of_the_loss_do_not_meet_those_of_the_network():
    nodes = [node("Mul", "z w", "p"), node("Sub", "p x", "d"), node("ReduceMean", "d", "b", keepdims=0)]
    file = loss_file(nodes, [SCORES, info("x", FLOAT, ["N", "C"])], {"w": WEIGHTS}, output="b")
    built = build(network(), loss=file).model
    signature = signature_of(built)
    assert signature.data == ("x",) and signature.labels == ("loss/x",) and signature.trainable == ("w", "b")
    whole = with_loss(
        [node("Mul", "z cw", "m"), node("Sub", "m y", "d"), node("ReduceMean", "d", "l", keepdims=0)],
        FLOAT_LABELS,
        {"cw": WEIGHTS},
    )
    whole.graph.input[1].name = "loss/x"
    for each in whole.graph.node:
        each.input[:] = ["loss/x" if name == "y" else name for name in each.input]
    check_gradients(built, whole)


def test_the_only_input_of_floats_reads_the_only_output(tmp_path):
    file = loss_file(
        [node("SoftmaxCrossEntropyLoss", "scores target", "l")],
        [info("scores", FLOAT, None), info("target", INT64, ["batch"])],
    )
    onnx.save(file, tmp_path / "loss.onnx")
    built = build(network(), loss=str(tmp_path / "loss.onnx")).model
    assert signature_of(built).labels == ("target",)
    assert [d.dim_value for d in built.graph.input[1].type.tensor_type.shape.dim] == [BATCH]
    with pytest.raises(BnfuseError, match=r"none of its inputs .*is named like an output of the network"):
        build(network(outputs=("z", "p")), loss=file)
    assert signature_of(build(network(outputs=("z", "p")), loss=file, logits="p").model).logits == "p"


def test_a_loss_of_two_outputs_and_two_labels_trains(tmp_path):
    import bnfuse

    nodes = [
        node("SoftmaxCrossEntropyLoss", "z kind", "a"),
        node("Sub", "p size", "d"),
        node("Abs", "d", "e"),
        node("ReduceMean", "e", "f", keepdims=0),
        node("Add", "a f", "l"),
    ]
    inputs = [SCORES, info("p", FLOAT, ["N", "C"]), info("kind", INT64, ["N"]), info("size", FLOAT, ["N", "C"])]
    built = build(network(outputs=("p", "z")), loss=loss_file(nodes, inputs)).model
    signature = signature_of(built)
    assert signature.labels == ("kind", "size") and signature.logits == "z"
    bnfuse.save(built, tmp_path / "train.onnx")
    step = bnfuse.compile(tmp_path / "train.onnx", optimizer=bnfuse.SGD(lr=0.01), threads=1)
    assert step.inputs == ("x", "kind", "size")
    feeds = {name: value.astype(np.float32) if value.dtype.kind == "f" else value
             for name, value in feeds_of(built).items()}  # fmt: skip
    losses = [step(*(feeds[name] for name in step.inputs)) for _ in range(4)]
    assert losses[-1] < losses[0]
    with pytest.raises(BnfuseError, match="input 'kind' has labels from 3 to 3: the graph has the classes 0 to 2"):
        step(feeds["x"], np.full(BATCH, 3), feeds["size"])


@pytest.mark.parametrize(
    ("file", "how", "message"),
    [
        (loss_file(MSE, [info("a", FLOAT, ["N", 3]), info("y", FLOAT, ["N", 3])]), {}, "none of its inputs"),
        (MSE_FILE, {"labels": ["q"]}, "--labels q: there is no such input, there are z, y"),
        (MSE_FILE, {"logits": "q"}, "has no output 'q': there are z"),
        (loss_file(MSE, [info("z", FLOAT, ["N", 4]), info("y", FLOAT, ["N", 4])]), {}, r"\[6, 3\]"),
        (loss_file(MSE[:2], [SCORES, info("y", FLOAT, ["N", "C"])], output="dd"), {}, "a loss is a single number"),
        ("lost.onnx", {}, "loss 'lost.onnx' is no file"),
        (loss_file([node("Hinge", "z y", "l")], [SCORES, info("y", FLOAT, ["N", "C"])]), {}, "is no operator of opset"),
    ],
)
def test_a_loss_file_that_does_not_fit_is_one_line(file, how, message):
    with pytest.raises(BnfuseError, match=message) as caught:
        build(network(), loss=file, **how)
    assert "\n" not in str(caught.value)


def test_the_command_takes_both(tmp_path):
    from bnfuse.cli import main

    onnx.save(CASES["bce"][0], tmp_path / "own.onnx")
    onnx.save(network(), tmp_path / "net.onnx")
    onnx.save(MSE_FILE, tmp_path / "mse.onnx")
    own = ["build", str(tmp_path / "own.onnx"), "--loss", "own", "--labels", "y", "-o", str(tmp_path / "a.onnx")]
    file = ["build", str(tmp_path / "net.onnx"), "--loss", str(tmp_path / "mse.onnx"), "-o", str(tmp_path / "b.onnx")]
    for arguments in (own, file):
        assert main(arguments) == 0
        roles = {entry.key: entry.value for entry in onnx.load(arguments[-1]).metadata_props}[METADATA_KEY]
        assert json.loads(roles)["labels"] == ["y"]


def test_labels_that_the_loss_does_not_read_are_refused():
    model = with_loss([node("ReduceMean", "z", "l", keepdims=0)], CLASS_LABELS)
    with pytest.raises(BnfuseError, match="labels input 'y' is read by nothing: the loss does not depend on it"):
        build(model, loss="own")
