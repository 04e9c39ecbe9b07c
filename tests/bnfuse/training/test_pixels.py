"""A network that gives classes of pixels, trained from arrays with masks."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper as h
import pytest

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.data import load_data
from bnfuse.data.targets import Target
from bnfuse.training import Loader, parse_augment

BATCH, SIDE, CLASSES = 4, 8, 3
RNG = np.random.default_rng(0)


def network(loss: str) -> onnx.ModelProto:
    """Two convolutions with a BatchNorm between them."""

    def weight(name: str, values: np.ndarray) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(values.astype(np.float32), name)

    tensors = [
        weight("w1", 0.3 * RNG.standard_normal((8, 1, 3, 3))),
        weight("w2", 0.3 * RNG.standard_normal((CLASSES, 8, 1, 1))),
        *(weight(name, np.full(8, value)) for name, value in (("s", 1), ("b", 0), ("m", 0), ("v", 1))),
    ]
    nodes = [
        h.make_node("Conv", ["image", "w1"], ["y"], pads=[1] * 4),
        h.make_node("BatchNormalization", ["y", "s", "b", "m", "v"], ["z", "m2", "v2"], training_mode=1),
        h.make_node("Relu", ["z"], ["a"]),
        h.make_node("Conv", ["a", "w2"], ["logits"]),
    ]
    image = h.make_tensor_value_info("image", 1, [BATCH, 1, SIDE, SIDE])
    logits = h.make_tensor_value_info("logits", 1, [BATCH, CLASSES, SIDE, SIDE])
    graph = h.make_graph(nodes, "pixels", [image], [logits], tensors)
    model = build_training_graph(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), loss=loss)
    return bnfuse.rewrite(model).model


def arrays(count: int = 22, ignored: int | None = None) -> dict[str, np.ndarray]:
    """Masks by the brightness of pixels, in images that are brighter to the right."""
    x = RNG.integers(0, 180, (count, SIDE, SIDE)) + 10 * np.arange(SIDE)
    y = np.digitize(x, [80, 160])
    if ignored is not None:
        y[:, 0] = ignored
    return {"x": x.astype(np.uint8), "y": y}


@pytest.fixture(scope="module")
def graph():
    return network("cross-entropy(ignore_index=255)")


def test_it_trains_and_is_scored_by_the_pixels_that_count(graph, tmp_path):
    np.savez(tmp_path / "masks.npz", **arrays(42, ignored=255))
    asked = {"optimizer": bnfuse.AdamW(lr=0.05), "augment": "flip", "threads": 1}
    history = bnfuse.train(graph, tmp_path / "masks.npz", epochs=12, export=tmp_path / "model.onnx", **asked)
    first, last = history.epochs[0], history.epochs[-1]
    assert last.accuracy > max(0.8, first.accuracy) and last.mean_iou > first.mean_iou
    assert (last.top5, last.balanced_accuracy > 0.5) == (None, True)
    found = bnfuse.evaluate(tmp_path / "model.onnx", unmarked(tmp_path))
    assert found.pixels == 8 * SIDE * SIDE and found.accuracy > 0.7


def unmarked(folder):
    """The same images, with a class for every pixel: what an exported model cannot know is what was ignored."""
    with np.load(folder / "masks.npz") as given:
        x, y = given["x"], given["y"]
    np.savez(folder / "all.npz", x=x, y=np.where(y == 255, 0, y))
    return folder / "all.npz"


def test_masks_are_mirrored_with_their_images():
    x = RNG.standard_normal((22, 1, SIDE, SIDE)).astype(np.float32)
    data = bnfuse.data.Dataset(x, (x[:, 0] > 0).astype(np.int64), x[:4], (x[:4, 0] > 0).astype(np.int64), classes=2)
    loader = Loader(data, BATCH, seed=3, augment=parse_augment("flip"))
    mirrored = 0
    for batch in loader.batches(1, 2):
        assert np.array_equal(batch.y, batch.x[:, 0] > 0)
        chosen = loader.order(batch.epoch)[batch.index * BATCH :][:BATCH]
        mirrored += int((batch.x != x[chosen]).any((1, 2, 3)).sum())
    assert 5 < mirrored < 35


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"y": np.zeros(22, np.int64)}, {}, "has the shape|one label for each image"),
        ({"y": np.full((22, SIDE, SIDE), 3)}, {}, "labels from 3 to 3: they must be from 0 to 2 .or 255"),
        ({"x": np.zeros((22, 9, 9), np.uint8), "y": np.zeros((22, 9, 9), np.int64)}, {}, "9, 9"),
        ({}, {"augment": "flip,pad-crop"}, "follow --augment flip and nothing else"),
        ({}, {"label_smoothing": 0.1}, "is not a class for each image"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(
    graph, changed, options, message, tmp_path, monkeypatch
):
    monkeypatch.setattr("bnfuse.training.run.Compiling.step", None)
    np.savez(tmp_path / "masks.npz", **{**arrays(), **changed})
    with pytest.raises(BnfuseError, match=message):
        bnfuse.train(graph, tmp_path / "masks.npz", epochs=1, **options)


def test_maps_for_a_network_of_images_are_refused(tmp_path):
    np.savez(tmp_path / "masks.npz", **arrays())
    with pytest.raises(BnfuseError, match="labels of shape"):
        load_data(tmp_path / "masks.npz", targets=[Target("labels", (), np.dtype(np.int64), 3)])
    with pytest.raises(BnfuseError, match="has one label for each image, the graph takes"):
        load_data("digits", targets=[Target("labels", (8, 8), np.dtype(np.int64), 3)])
