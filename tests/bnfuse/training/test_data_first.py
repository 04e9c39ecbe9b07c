"""Data, options and places are looked at before anything is compiled, and each line says what to do."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import onnx
import onnx.helper as h
import pytest
from small_training import forward_model, save_npz

import bnfuse
from bnfuse import api
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import open_graph
from bnfuse.training import Loader, data_for, train_step


@pytest.fixture
def nothing_compiles(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("compiled before the data was looked at")

    monkeypatch.setattr("bnfuse.runtime.compile_step", fail)


def message_of(function, *arguments, **options) -> str:
    with pytest.raises(BnfuseError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("work", [bnfuse.train, bnfuse.search, lambda model, data: api.run(model, data=data)])
def test_data_that_does_not_fit_is_told_before_the_work(work, nothing_compiles, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = build_training_graph(forward_model())
    assert message_of(work, model, "nothing").startswith("nothing: is no data: give digits")
    few = save_npz(tmp_path / "few.npz", dataclasses.replace(data, train_x=data.train_x[:9], train_y=data.train_y[:9]))
    said = message_of(work, model, few)
    assert (
        said
        == f"{few}: 9 images do not fill a batch of 16, and the graph's batch is fixed: build it with --batch 9 or less"
    )
    wide = dataclasses.replace(data, train_y=data.train_y + 3)
    assert "has 13 classes, the network 10: its last layer must give 13" in message_of(
        work, model, save_npz(tmp_path / "wide.npz", wide)
    )
    large = dataclasses.replace(data, train_x=np.zeros((83, 1, 9, 8), np.float32))
    assert "data" in message_of(work, model, dataclasses.replace(large, name="data"))


def test_places_and_states_are_looked_at_before_the_work(nothing_compiles, data, tmp_path):
    model = build_training_graph(forward_model())
    assert "cannot be written" in message_of(bnfuse.train, model, data, export=tmp_path / "no" / "a.onnx")
    assert "cannot be written" in message_of(api.run, model, data=data, save_to=tmp_path / "no" / "a.safetensors")
    state = tmp_path / "state.safetensors"
    assert "no checkpoint in safetensors form" in message_of(bnfuse.train, model, data, resume=state)


def test_a_dataset_of_another_size_is_refused(data):
    graph = open_graph(build_training_graph(forward_model()))
    large = dataclasses.replace(data, test_x=np.zeros((40, 3, 8, 8), np.float32))
    assert message_of(data_for, graph, large) == (
        "digits: test_x has the shape [40, 3, 8, 8], the graph takes images of [1, 8, 8]"
    )
    assert "train_y has labels up to 10, the graph 10 classes" in message_of(
        data_for, graph, dataclasses.replace(data, train_y=data.train_y + 1)
    )
    assert "data is a ndarray: give a name, a path, DataLoaders of torch, or a bnfuse.data.Dataset" in message_of(
        data_for, graph, data.train_x
    )


def changed_input(shape: list[int]) -> onnx.ModelProto:
    """The small network behind a Transpose."""
    model = forward_model()
    model.graph.input[0].CopyFrom(h.make_tensor_value_info("image_last", onnx.TensorProto.FLOAT, shape))
    turn = h.make_node("Transpose", ["image_last"], ["image"], name="turn", perm=[0, 3, 1, 2])
    model.graph.node.insert(0, turn)
    return build_training_graph(model)


def test_a_graph_with_its_channels_last_is_told_so(nothing_compiles):
    said = message_of(bnfuse.train, changed_input([16, 8, 8, 1]), "digits")
    assert said.startswith(
        "the graph's input 'image_last' is [16, 8, 8, 1], with the channels last: data sets are fed as"
    )


def test_what_an_epoch_leaves_out_is_counted(data):
    assert Loader(data, 16).about == "5 batches of 16 an epoch; 3 images wait for the next epoch's order"
    assert Loader(data, 83).about == "1 batch of 83 an epoch"
    assert Loader(data, 41).about.endswith("; 1 image waits for the next epoch's order")


def test_a_batch_of_another_size_has_a_hint(new_step, data):
    said = message_of(new_step(), data.test_x, data.test_y)
    assert "has the shape [40, 1, 8, 8], the graph takes [16, 1, 8, 8]: it is compiled for that batch" in said
    assert said.endswith("bnfuse.add_batch(step, 40) compiles it for another one too")


def test_validation_chooses_and_the_test_part_is_scored_once_at_the_end(new_step, data, tmp_path):
    """Labels of the test part are wrong on purpose: what is scored on it cannot choose anything."""
    first, second = slice(0, 24), slice(24, 40)
    parts = dataclasses.replace(
        data,
        val_x=data.test_x[first],
        val_y=data.test_y[first],
        test_x=data.test_x[second],
        test_y=(data.test_y[second] + 1) % 10,
    )
    step, told = new_step(), []
    history = train_step(step, parts, epochs=3, progress=told.append, save_to=tmp_path)
    assert (history.held_out, history.tested) == (24, 16)

    def right(x, y):
        logits = [step.evaluate(np.resize(x[at : at + 16], (16, 1, 8, 8)))[: len(x[at : at + 16])] for at in (0, 16)]
        return float((np.concatenate(logits)[: len(y)].argmax(1) == y).mean())

    assert history.accuracy == right(parts.val_x, parts.val_y)
    assert history.test_accuracy == right(parts.test_x, parts.test_y)
    score = {"images": 16, "accuracy": history.test_accuracy, "loss": history.test_loss, "top5": history.test_top5}
    assert history.to_json()["test"] == score
    assert told[-1].endswith("right on the test images, after the last epoch")
    assert len(told) == 4
    again = train_step(new_step(), parts, epochs=3, resume=tmp_path)
    assert again.test_accuracy == history.test_accuracy
    other = dataclasses.replace(parts, val_x=parts.val_x + 1)
    assert "is a run with another data" in message_of(train_step, new_step(), other, epochs=3, resume=tmp_path)


@pytest.mark.parametrize(("factor", "dtype", "scale"), [(16, np.uint8, 255.0), (255, np.float32, 1.0)])
def test_the_exported_mean_is_of_the_numbers_of_the_file_divided_by_the_scale(factor, dtype, scale, data, tmp_path):
    x = np.round(data.train_x * factor).astype(dtype)
    np.savez(tmp_path / "a.npz", x=x, y=data.train_y, x_test=x[:20], y_test=data.train_y[:20])
    model = build_training_graph(forward_model(dropout=0.0))
    told: list[str] = []
    bnfuse.train(model, tmp_path / "a.npz", epochs=1, threads=1, export=tmp_path / "a.onnx", progress=told.append)
    about = {entry.key: json.loads(entry.value) for entry in onnx.load(tmp_path / "a.onnx").metadata_props}
    assert about["bnfuse.input_scale"] == scale
    assert about["bnfuse.input_mean"] == pytest.approx([(x / scale).mean()], rel=1e-5)
    assert about["bnfuse.input_std"] == pytest.approx([(x / scale).std()], rel=1e-5)
    assert ": 83 to train on, 20 held out (x_test) to choose the best epoch by; 10 classes" in told[0]
    assert told[1].endswith("x_test chooses the best epoch, for there is no val: its accuracy flatters")
    assert told[2] == "5 batches of 16 an epoch; 3 images wait for the next epoch's order"


def test_a_smaller_last_batch_is_told(data):
    assert Loader(data, 16, partial=True).about == "5 batches of 16 and one of 3 an epoch"
    assert Loader(data, 83, partial=True).about == "1 batch of 83 an epoch"


def test_a_graph_that_has_no_smaller_batch_is_refused_before_it_is_compiled(graph, data, nothing_compiles):
    with pytest.raises(BnfuseError, match=r"part of the batch.*or leave the last 3 images out with --last-batch drop"):
        bnfuse.train(graph, data, epochs=1, last_batch="train")
    with pytest.raises(BnfuseError, match="last batch 'pad' is unknown: it is drop or train"):
        bnfuse.train(graph, data, epochs=1, last_batch="pad")
