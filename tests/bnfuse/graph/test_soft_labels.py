"""Probabilities of classes in the place of classes: the loss and its gradients are torch's, at every level."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper as h
import onnx_ir as ir
import pytest
from fake_cuda import FakeCuda, install
from gpu_step import interpreted_step
from small_training import forward_model

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.batches import with_batch
from bnfuse.graph.soft_labels import with_soft_labels
from bnfuse.graph.training_graph import open_graph
from bnfuse.runtime.targets.target import CudaTarget
from bnfuse.training.labelling import Labelling
from bnfuse.training.mixing import Mix, Mixing
from bnfuse.verifying.interpreter import run, widened

BATCH, CLASSES = 6, 4
RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((BATCH, 1, 3, 3))
LABELS = np.array([0, 3, 1, 1, 2, 0])
WEIGHTS = np.array([0.5, 2.0, 1.0, 0.25])


def head(loss: str = "cross-entropy", pixels: bool = False) -> onnx.ModelProto:
    """A linear classifier of images, or of their pixels."""
    weight = onnx.numpy_helper.from_array(RNG.standard_normal((CLASSES, 1 if pixels else 9)).astype(np.float32), "w")
    nodes = [h.make_node("Flatten", ["image"], ["flat"]), h.make_node("Gemm", ["flat", "w"], ["logits"], transB=1)]
    if pixels:
        shape = onnx.numpy_helper.from_array(np.array([CLASSES, 1, 1, 1]), "shape")
        nodes = [h.make_node("Reshape", ["w", "shape"], ["k"]), h.make_node("Conv", ["image", "k"], ["logits"])]
    given = [weight, *([shape] if pixels else [])]
    image = h.make_tensor_value_info("image", 1, [BATCH, 1, 3, 3])
    logits = h.make_tensor_value_info("logits", 1, [BATCH, CLASSES, 3, 3] if pixels else [BATCH, CLASSES])
    graph = h.make_graph(nodes, "head", [image], [logits], given)
    return build_training_graph(
        h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=8), loss=loss, file="head.onnx"
    )


def results(graph, labels, images=IMAGES):
    """Loss and gradients in float64."""
    feeds = {**{name: value.astype(np.float64) for name, value in graph.state().items()}, "labels": labels}
    feeds[graph.signature.data[0]] = images
    wanted = [graph.loss, *graph.signature.gradients.values()]
    return run(widened(ir.to_proto(graph.model)), feeds, wanted)


LABELLINGS = {
    "plain": (Labelling(CLASSES), {}),
    "smoothed": (Labelling(CLASSES, 0.1), {"label_smoothing": 0.1}),
    "weighted": (Labelling(CLASSES, 0.0, WEIGHTS), {"weight": WEIGHTS}),
    "both": (Labelling(CLASSES, 0.3, WEIGHTS), {"label_smoothing": 0.3, "weight": WEIGHTS}),
}


@pytest.mark.torch
@pytest.mark.parametrize("mixed", [False, True], ids=["classes", "mixed"])
@pytest.mark.parametrize("name", LABELLINGS)
def test_the_loss_and_its_gradients_are_torchs(name, mixed):
    import torch

    labelling, options = LABELLINGS[name]
    graph = open_graph(head())
    soft = with_soft_labels(graph)
    options = {k: torch.tensor(v) if k == "weight" else v for k, v in options.items()}
    target = torch.tensor(LABELS)
    mix = Mix(0.7) if mixed else None
    if mixed:  # torch's own target of probabilities
        labelling = Labelling(CLASSES, labelling.smoothing, labelling.weights, Mixing(mixup=1.0))
        one = torch.nn.functional.one_hot(target, CLASSES).double()
        target = 0.7 * one + (1 - 0.7) * one.flip(0)
    rows = labelling.rows(LABELS, mix)
    assert rows.dtype == np.float32
    found = results(soft, rows.astype(np.float64))
    weight = torch.tensor(graph.state()["w"], dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(torch.tensor(IMAGES).flatten(1) @ weight.T, target, **options)
    loss.backward()
    assert np.isclose(found["loss"], loss.item(), rtol=1e-6)  # labels are float32
    np.testing.assert_allclose(found["w_grad"], weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", ["none", "icf"])
def test_a_fused_network_has_the_gradients_that_it_had(level):
    graph = open_graph(bnfuse.rewrite(build_training_graph(forward_model(dropout=0.0)), level=level))
    images, labels = RNG.standard_normal((16, 1, 8, 8)), np.arange(16) % 10
    soft = with_soft_labels(graph)
    before = results(graph, labels, images)
    after = results(soft, Labelling(10).rows(labels).astype(np.float64), images)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
    assert graph.model.graph.inputs[1].dtype == ir.DataType.INT64  # it is a copy that is changed


def test_it_is_a_valid_file_that_compiles_to_the_same_steps(tmp_path):
    graph = open_graph(head())
    soft = with_soft_labels(graph)
    onnx.checker.check_model(ir.to_proto(soft.model), full_check=True)
    bnfuse.save(soft.model, tmp_path / "soft.onnx")
    steps = [
        bnfuse.compile(source, optimizer=bnfuse.SGD(lr=0.5), threads=1) for source in (graph, tmp_path / "soft.onnx")
    ]
    rows, images = Labelling(CLASSES).rows(LABELS), IMAGES.astype(np.float32)
    for _ in range(3):
        ours, theirs = steps[1](images, rows), steps[0](images, LABELS)
        assert np.isclose(ours, theirs, rtol=1e-5)
    with_batch(soft, 3)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (lambda: head("cross-entropy(ignore_index=2)"), "a label to ignore"),
        (
            lambda: head("cross-entropy(label_smoothing=0.1)"),
            "has more than the cross-entropy .*, such as label smoothing",
        ),
        (lambda: head("focal"), "of its own"),
        (lambda: head("mse"), "is not a class for each image"),
        (lambda: head(pixels=True), "is not a class for each image"),
    ],
    ids=["ignore", "smoothed", "focal", "mse", "pixels"],
)
def test_what_is_no_plain_cross_entropy_is_refused_with_the_remedy(graph, message):
    with pytest.raises(BnfuseError, match=message) as caught:
        with_soft_labels(open_graph(graph(), name="head.onnx"))
    assert "build the graph with --loss cross-entropy" in str(caught.value)


def test_a_gpu_takes_the_same_step(monkeypatch):
    """Its kernels are interpreted."""
    soft = with_soft_labels(open_graph(head()))
    fake, optimizer = install(monkeypatch, FakeCuda(seed=5)), bnfuse.SGD(lr=0.5)
    cpu = bnfuse.compile(soft, optimizer=optimizer, threads=1)
    gpu = interpreted_step(soft, CudaTarget("sm_90", 4, "fp32"), fake, optimizer)
    mix, images = Mix(0.7), IMAGES.astype(np.float32)
    rows = Labelling(CLASSES, 0.1, WEIGHTS, Mixing(mixup=1.0)).rows(LABELS, mix)
    for _ in range(2):
        assert np.isclose(float(gpu(images, rows)), float(cpu(images, rows)), rtol=1e-5)
    np.testing.assert_allclose(gpu.state_dict()["w"], cpu.state_dict()["w"], rtol=1e-4, atol=1e-6)
