"""A network with two heads and labels for each, trained from arrays by their names."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper as h
import pytest

import bnfuse
from bnfuse import api
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.data import Dataset
from bnfuse.data.targets import joined

BATCH = 8
RNG = np.random.default_rng(0)


def two_heads(loss: str) -> onnx.ModelProto:
    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(0.3 * RNG.standard_normal(shape).astype(np.float32), name)

    nodes = [
        h.make_node("Flatten", ["image"], ["flat"], name="flatten"),
        h.make_node("Gemm", ["flat", "main/w"], ["main"], name="main"),
        h.make_node("Gemm", ["flat", "side/w"], ["side"], name="side"),
    ]
    outputs = [h.make_tensor_value_info(name, 1, [BATCH, n]) for name, n in (("main", 3), ("side", 2))]
    image = h.make_tensor_value_info("image", 1, [BATCH, 1, 3, 3])
    graph = h.make_graph(nodes, "heads", [image], outputs, [weight("main/w", 9, 3), weight("side/w", 9, 2)])
    forward = h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=8)
    return build_training_graph(forward, loss=loss)


def arrays(count: int) -> dict[str, np.ndarray]:
    """Both labels follow from the image."""
    x = RNG.standard_normal((count, 1, 3, 3)).astype(np.float32)
    return {"x": x, "labels_main": x[:, 0, 0].argmax(1), "labels_side": x[:, 0, 1, :2]}


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return two_heads("mse@side + cross-entropy@main")


def test_both_heads_learn_from_arrays_by_their_names(model, tmp_path):
    held_out = {f"{name}_test": array for name, array in arrays(40).items()}
    np.savez(tmp_path / "a.npz", **arrays(160), **held_out)
    history = bnfuse.train(model, tmp_path / "a.npz", epochs=8, optimizer=bnfuse.SGD(lr=0.2), seed=0)
    assert history.epochs[-1].loss < 0.3 * history.epochs[0].loss
    assert history.epochs[-1].accuracy > 0.8  # of the head with classes, though its labels are the second input
    losses = api.run(model, data=tmp_path / "a.npz", steps=2)
    assert len(losses) == 2 and np.isfinite(losses).all()


def test_what_a_dataset_in_python_lacks_is_told_before_the_work(model, monkeypatch):
    monkeypatch.setattr("bnfuse.runtime.compile_step", lambda *_, **__: pytest.fail("compiled before"))
    given = arrays(40)
    x, main, side = given.values()

    def train(y: np.ndarray) -> None:
        bnfuse.train(model, Dataset(x, y, x, y, 3))

    for y, said in (
        (main, "train_y is one label for each image, the graph takes 'labels_main'"),
        (joined({"labels_main": main}), "has the fields labels_main, the graph takes labels_main, labels_side"),
        (joined({"labels_main": main, "labels_side": side.astype(float)}), "labels_side of train_y is float64"),
        (joined({"labels_main": main + 1, "labels_side": side}), "labels_main of train_y has labels from 1 to 3"),
    ):
        with pytest.raises(BnfuseError, match=said):
            train(y)


def test_a_graph_without_a_class_for_each_image_is_refused_before_the_work():
    with pytest.raises(BnfuseError, match="of data sets one must be an integer for each image"):
        bnfuse.train(two_heads("mse@side + mse@main"), "digits")
