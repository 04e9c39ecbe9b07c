"""Losses: their values against torch's own in float64, what can be asked for, and graphs without a loss."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from bnfuse.build import build
from bnfuse.build.losses import LOSSES, Formula, Term, parse_loss, with_options
from bnfuse.core.errors import BnfuseError
from bnfuse.core.vectors import read_vector
from bnfuse.graph.protos import fresh
from bnfuse.graph.signature import METADATA_KEY, GraphSignature

SCORES = (5, 4, 3)
WEIGHTS = np.array([0.5, 1.0, 2.0, 0.25], np.float32)


def value_of(kind: str, scores: np.ndarray, labels: np.ndarray, options: dict) -> float:
    """The loss of the formula, by onnx's reference implementation."""
    taken: set[str] = set()

    def unused(base: str) -> str:
        name = fresh(base, taken)
        taken.add(name)
        return name

    formula = Formula("loss", unused, scores.shape)
    result = LOSSES[kind].formula(formula, "scores", "labels", options)
    element, shape = LOSSES[kind].label_type(scores.shape)
    inputs = [
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, scores.shape),
        helper.make_tensor_value_info("labels", element, shape),
    ]
    outputs = [helper.make_tensor_value_info(result, TensorProto.FLOAT, [])]
    graph = helper.make_graph(formula.nodes, "loss", inputs, outputs, formula.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return float(ReferenceEvaluator(model).run(None, {"scores": scores, "labels": labels})[0])


def focal_of_torch(f, x, y, gamma=2.0, alpha=1.0):
    import torch

    loss = f.cross_entropy(x, y, reduction="none")
    return alpha * ((1 - torch.exp(-loss)) ** gamma * loss).mean()


def sigmoid_focal_of_torch(f, x, y, gamma=2.0, alpha=0.25):
    p, loss = x.sigmoid(), f.binary_cross_entropy_with_logits(x, y, reduction="none")
    wrong = 1 - (p * y + (1 - p) * (1 - y))
    return ((alpha * y + (1 - alpha) * (1 - y)) * wrong**gamma * loss).mean()


def tensor(values):
    import torch

    return torch.tensor(values, dtype=torch.float64)


CASES = {
    "cross-entropy": (lambda f, x, y: f.cross_entropy(x, y), {}),
    "cross-entropy ignoring": (lambda f, x, y: f.cross_entropy(x, y, ignore_index=2), {"ignore_index": 2.0}),
    "cross-entropy weighted": (
        lambda f, x, y: f.cross_entropy(x, y, weight=tensor(WEIGHTS)),
        {"class_weights": WEIGHTS},
    ),
    "cross-entropy smoothed": (lambda f, x, y: f.cross_entropy(x, y, label_smoothing=0.1), {"label_smoothing": 0.1}),
    "cross-entropy all": (
        lambda f, x, y: f.cross_entropy(x, y, weight=tensor(WEIGHTS), ignore_index=1, label_smoothing=0.3),
        {"label_smoothing": 0.3, "ignore_index": 1.0, "class_weights": WEIGHTS},
    ),
    "cross-entropy smoothed, ignoring": (
        lambda f, x, y: f.cross_entropy(x, y, ignore_index=0, label_smoothing=0.2),
        {"label_smoothing": 0.2, "ignore_index": 0.0},
    ),
    "soft-cross-entropy": (lambda f, x, y: f.cross_entropy(x, y), {}),
    "bce": (lambda f, x, y: f.binary_cross_entropy_with_logits(x, y), {}),
    "bce weighted": (
        lambda f, x, y: f.binary_cross_entropy_with_logits(x, y, pos_weight=tensor(WEIGHTS)[:, None]),
        {"pos_weight": WEIGHTS},
    ),
    "mse": (lambda f, x, y: f.mse_loss(x, y), {}),
    "l1": (lambda f, x, y: f.l1_loss(x, y), {}),
    "huber": (lambda f, x, y: f.huber_loss(x, y, delta=0.5), {"delta": 0.5}),
    "smooth-l1": (lambda f, x, y: f.smooth_l1_loss(x, y, beta=0.7), {"beta": 0.7}),
    "focal": (lambda f, x, y: focal_of_torch(f, x, y), {}),
    "focal sharp": (lambda f, x, y: focal_of_torch(f, x, y, 3.0, 0.5), {"gamma": 3.0, "alpha": 0.5}),
    "sigmoid-focal": (lambda f, x, y: sigmoid_focal_of_torch(f, x, y), {}),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_torchs(name):
    import torch

    function, options = CASES[name]
    kind = name.split()[0]
    rng = np.random.default_rng(len(name))
    scores = rng.normal(0, 2, SCORES).astype(np.float32)
    if LOSSES[kind].classes:
        labels = rng.integers(0, 4, (5, 3))
    elif kind == "soft-cross-entropy":
        labels = rng.dirichlet(np.ones(4), (5, 3)).transpose(0, 2, 1).astype(np.float32)
    else:
        labels = rng.uniform(0, 1, SCORES).astype(np.float32)
    theirs = function(
        torch.nn.functional,
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(labels) if LOSSES[kind].classes else torch.tensor(labels, dtype=torch.float64),
    )
    assert value_of(kind, scores, labels, options) == pytest.approx(float(theirs), rel=2e-6)


def test_every_kind_has_a_case():
    assert {name.split()[0] for name in CASES} == set(LOSSES)


def test_scores_far_out_stay_finite():
    scores = np.array([[200.0, -200.0]], np.float32)
    for kind in ("bce", "sigmoid-focal"):
        assert value_of(kind, scores, np.array([[1.0, 0.0]], np.float32), {}) == pytest.approx(0, abs=1e-6)
        assert np.isfinite(value_of(kind, scores, np.array([[0.0, 1.0]], np.float32), {}))


def test_terms_are_read():
    first, second = parse_loss("cross-entropy(ignore_index=255,label_smoothing=0.1)@main + 0.4*mse@aux.1")
    assert first == Term("cross-entropy", "main", 1.0, {"ignore_index": 255.0, "label_smoothing": 0.1})
    assert second == Term("mse", "aux.1", 0.4)
    assert parse_loss(" none ") == ()


def test_vectors_are_files(tmp_path):
    np.save(tmp_path / "w.npy", WEIGHTS)
    (term,) = parse_loss(f"cross-entropy(class_weights={tmp_path / 'w.npy'})")
    assert np.array_equal(term.options["class_weights"], WEIGHTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cross_entropy", "is not"),
        ("hinge", "'hinge' is unknown: it is cross-entropy"),
        ("mse(delta=1)", "'mse' has no option 'delta': there are none"),
        ("huber(delta=0)", "delta=0.0 is out of range"),
        ("huber(delta)", "'delta' of loss 'huber(delta)' is not name=value"),
        ("cross-entropy(label_smoothing=much)", "'much' in loss"),
        ("cross-entropy(class_weights=lost.npy)", "'lost.npy' in loss"),
        ("x*mse", "'x' in loss|is not"),
        ("cross-entropy(class_weights=3)", "class_weights must be a vector"),
    ],
)
def test_a_wrong_loss_is_one_line(text, message):
    with pytest.raises(BnfuseError, match=message.replace("(", r"\(").replace(")", r"\)").replace("|", "|")):
        parse_loss(text)


def heads() -> onnx.ModelProto:
    """A trunk of one Gemm, and two heads."""
    rng = np.random.default_rng(0)
    weights = {"w": (6, 5), "a": (5, 3), "b": (5, 2)}
    tensors = [
        onnx.numpy_helper.from_array(rng.normal(0, 1, shape).astype(np.float32), name)
        for name, shape in weights.items()
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"], name="trunk"),
        helper.make_node("MatMul", ["z", "a"], ["ya"], name="head_a"),
        helper.make_node("MatMul", ["z", "b"], ["yb"], name="head_b"),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, n]) for name, n in (("ya", 3), ("yb", 2))]
    graph = helper.make_graph(
        nodes, "heads", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 6])], outputs, tensors
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def signature_of(model: onnx.ModelProto) -> GraphSignature:
    entries = {entry.key: entry.value for entry in model.metadata_props}
    return GraphSignature.from_json(entries[METADATA_KEY])


def test_a_sum_over_two_heads(step):
    built = build(heads(), loss="cross-entropy@ya + 0.5*mse@yb").model
    signature = signature_of(built)
    assert signature.labels == ("labels_ya", "labels_yb") and signature.logits == "ya"
    results, feeds = step(built)
    w, a, b = (onnx.numpy_helper.to_array(t).astype(np.float64) for t in heads().graph.initializer)
    z = feeds["x"] @ w
    scores, found = z @ a, z @ b
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    rows = np.arange(4)
    other = found - feeds["labels_yb"]
    assert results["loss"] == pytest.approx(-np.log(p[rows, feeds["labels_ya"]]).mean() + 0.5 * (other**2).mean())
    p[rows, feeds["labels_ya"]] -= 1
    expected = feeds["x"].T @ ((p / 4) @ a.T + (0.5 * 2 * other / 8) @ b.T)
    np.testing.assert_allclose(results["w_grad"], expected, rtol=1e-4, atol=1e-5)


def test_without_a_loss_gradients_of_the_outputs_come_in(step):
    built = build(heads(), loss="none").model
    signature = signature_of(built)
    assert signature.loss is None and signature.labels == ()
    assert signature.output_gradients == {"ya": "ya_grad", "yb": "yb_grad"}
    results, feeds = step(built)
    w, a, b = (onnx.numpy_helper.to_array(t).astype(np.float64) for t in heads().graph.initializer)
    z = feeds["x"] @ w
    np.testing.assert_allclose(results["ya"], z @ a, rtol=1e-5)
    np.testing.assert_allclose(results["a_grad"], z.T @ feeds["ya_grad"], rtol=1e-4, atol=1e-5)
    at_z = feeds["ya_grad"] @ a.T + feeds["yb_grad"] @ b.T
    np.testing.assert_allclose(results["w_grad"], feeds["x"].T @ at_z, rtol=1e-4, atol=1e-5)


def test_a_step_without_a_loss_compiles_and_is_verified(tmp_path):
    import bnfuse

    bnfuse.save(build(heads(), loss="none").model, tmp_path / "heads.onnx")
    fused = bnfuse.rewrite(tmp_path / "heads.onnx")
    assert bnfuse.verify(tmp_path / "heads.onnx", fused, runtime="tvm", threads=1).equal
    step = bnfuse.compile(fused, optimizer=bnfuse.SGD(lr=0.1), threads=1)
    x = np.ones((4, 6), np.float32)
    with pytest.raises(BnfuseError, match="the graph has no loss: call forward"):
        step(x)
    ya, yb = step.forward(x)
    before = step.state_dict()
    with pytest.raises(BnfuseError, match="the gradients of 2 outputs: 0 are given"):
        step.backward()
    step.backward(np.ones_like(ya), np.zeros_like(yb))
    step.update()
    moved = before["w"] - step.state_dict()["w"]
    np.testing.assert_allclose(moved, np.tile(0.1 * 4 * before["a"].sum(1), (6, 1)), rtol=1e-4, atol=1e-6)


def test_commands_on_a_graph_without_a_loss_work_or_say_so(tmp_path, capsys):
    import bnfuse
    from bnfuse.cli import main

    train, step = str(tmp_path / "heads.onnx"), str(tmp_path / "step.bnf")
    bnfuse.save(build(heads(), loss="none").model, train)
    verify = ["verify", train, train, "--runtime", "tvm", "--steps", "2", "--threads", "1"]
    for arguments in (["inspect", train], ["diff", train, train], verify, ["compile", train, "-o", step]):
        assert main(arguments) == 0
    capsys.readouterr()
    for arguments in (
        ["run", train],
        ["run", step],
        ["bench", train],
        ["train", train, "--data", "digits"],
    ):
        assert main(arguments) == 2
        text = capsys.readouterr().err
        assert "has no loss, the gradients of its outputs come in" in text and len(text.splitlines()) == 1


def test_labels_of_each_head_are_held_against_its_own_classes():
    import bnfuse

    model = build(heads(), loss="cross-entropy@ya + cross-entropy(ignore_index=255)@yb").model
    step = bnfuse.compile(bnfuse.load(model), threads=1)
    x = np.ones((4, 6), np.float32)
    assert np.isfinite(step(x, np.array([0, 1, 2, 2]), np.array([0, 1, 255, 1])))
    with pytest.raises(BnfuseError, match="input 'labels_yb' has labels from 2 to 2: the graph has the classes 0 to 1"):
        step(x, np.array([0, 1, 2, 2]), np.array([0, 1, 2, 1])[[2] * 4])
    with pytest.raises(BnfuseError, match="'labels_ya' has labels from 0 to 255: the graph has the classes 0 to 2"):
        step(x, np.array([0, 1, 255, 2]), np.array([0, 1, 1, 1]))


def test_roles_of_a_file_name_a_loss_or_gradients_that_come_in():
    built = build(heads(), loss="none").model
    entry = next(entry for entry in built.metadata_props if entry.key == METADATA_KEY)
    entry.value = json.dumps({**json.loads(entry.value), "output_gradients": {}})
    import bnfuse
    from bnfuse.graph.training_graph import open_graph

    with pytest.raises(BnfuseError, match="must name a loss"):
        open_graph(bnfuse.load(built))


def test_options_of_the_command_are_those_of_its_cross_entropies(tmp_path):
    (tmp_path / "w.txt").write_text("1 2 3")
    terms = with_options(
        parse_loss("0.5*cross-entropy@a + mse@b"), label_smoothing=0.1, class_weights=read_vector(tmp_path / "w.txt")
    )
    assert (terms[0].weight, terms[0].options["label_smoothing"], terms[1].options) == (0.5, 0.1, {})
    assert terms[0].options["class_weights"].tolist() == [1, 2, 3]
    with pytest.raises(BnfuseError, match="--label-smoothing is an option of --loss cross-entropy: there is none"):
        with_options(parse_loss("mse"), label_smoothing=0.1)
    with pytest.raises(BnfuseError, match="--label-smoothing is in --loss already"):
        with_options(parse_loss("cross-entropy(label_smoothing=0.2)"), label_smoothing=0.1)
