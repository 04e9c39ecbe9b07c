"""A training whose updates have a recipe in them: averages evaluated, gradients added up, runs that go on."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest
from small_training import BATCH, save_npz, small_data, small_graph

import bnfuse
from bnfuse.cli import main
from bnfuse.commands.updates import OPTIONS
from bnfuse.core.errors import BnfuseError, DivergedError
from bnfuse.core.tensor_files import read_metadata, read_safetensors
from bnfuse.exporting import read_state
from bnfuse.runtime import EMA, SGD, Group
from bnfuse.runtime.program.optim import NAMES
from bnfuse.training import evaluate_step, train_step

RECIPE = {"groups": (Group("head/*", lr=2),), "clip_norm": 1.0, "accumulate": 2, "ema": EMA(0.7, warm_up=True)}
RUN = {"epochs": 3, "checkpoint_every": 1, "seed": 3}
STEPS = 5  # of an epoch: two updates, and one of what is left over


@functools.cache
def graph():
    return small_graph(None)


def new_step(**more):
    return bnfuse.compile(graph(), optimizer=SGD(0.1, 0.9, **{**RECIPE, **more}), threads=1)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    step, folder, said = new_step(), tmp_path_factory.mktemp("unbroken"), []
    places = {"save_to": folder, "metrics": folder / "run.jsonl"}
    history = train_step(step, small_data(), **RUN, **places, progress=said.append)
    assert said[0] == "updates are of 2 batches; the last one of an epoch is of 1"
    return step, history, folder


def test_both_networks_are_evaluated_and_the_average_decides(unbroken):
    step, history, folder = unbroken
    data = small_data()
    assert (step.steps, step.pending) == (3 * RUN["epochs"], 0)  # what an epoch leaves over is an update
    last = history.epochs[-1]
    plain = evaluate_step(step, *data.held_out)
    assert (last.accuracy, last.held_out_loss) == (plain.accuracy, plain.loss)
    other = new_step()
    other.load_state_dict(step.state_dict(ema=True))
    average = evaluate_step(other, *data.held_out)
    assert (last.ema_accuracy, last.ema_loss) == (average.accuracy, average.loss)
    assert last.ema_loss != last.held_out_loss
    best = max(history.epochs, key=lambda epoch: epoch.ema_accuracy)
    assert (history.best.epoch, history.accuracy) == (best.epoch, last.ema_accuracy)
    assert "average's" in str(history)
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    assert [line["ema_accuracy"] for line in lines] == [epoch.ema_accuracy for epoch in history.epochs]
    found = bnfuse.evaluate(other, data, state=folder / "last.safetensors", ema=True)
    assert (found.accuracy, found.loss) == (average.accuracy, average.loss)


@pytest.mark.parametrize("count", [2, 6, 8])  # with a gradient that waits for the next one, and without
def test_a_run_that_is_interrupted_goes_on_to_the_same_end(count, unbroken, tmp_path):
    _, history, folder = unbroken
    step = new_step()
    forward, calls = step.forward, 0

    def counted(*inputs):
        nonlocal calls
        calls += 1
        if calls == count:
            raise KeyboardInterrupt
        return forward(*inputs)

    step.forward = counted
    with pytest.raises(KeyboardInterrupt):
        train_step(step, small_data(), **RUN, save_to=tmp_path)
    waiting = int(read_metadata(tmp_path / "last.safetensors").get("optimizer.added", 0))
    assert waiting == (count - 1) % STEPS % 2
    again = train_step(new_step(), small_data(), **RUN, save_to=tmp_path, resume="auto")
    for name in ("last.safetensors", "best.safetensors"):
        found, wanted = (read_safetensors(place / name)[0] for place in (tmp_path, folder))
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)
    assert [epoch.ema_loss for epoch in again.epochs] == [epoch.ema_loss for epoch in history.epochs]


def test_another_recipe_is_another_run(unbroken, tmp_path):
    _, _, folder = unbroken
    with pytest.raises(BnfuseError, match=r"optimizer SGD.*clip_norm=1\.0.*, not SGD.*clip_norm=2\.0"):
        train_step(new_step(clip_norm=2.0), small_data(), **RUN, resume=folder)


def test_the_exported_network_is_the_average(unbroken, tmp_path):
    step, history, folder = unbroken
    for number, source in enumerate((step, graph())):
        state = None if source is step else folder / "last.safetensors"
        bnfuse.export_inference(source, tmp_path / f"{number}.onnx", state=state, ema=True)
        found = bnfuse.evaluate(tmp_path / f"{number}.onnx", small_data())
        assert found.accuracy == history.epochs[-1].ema_accuracy
        assert found.loss == pytest.approx(history.epochs[-1].ema_loss, rel=1e-4)
    with pytest.raises(BnfuseError, match="with one set of values: leave ema out"):
        bnfuse.evaluate(tmp_path / "0.onnx", small_data(), ema=True)
    with pytest.raises(BnfuseError, match="a graph has no average of its weights"):
        bnfuse.export_inference(graph(), tmp_path / "none.onnx", ema=True)
    new_step(ema=None).save(tmp_path / "plain.safetensors")
    with pytest.raises(BnfuseError, match="holds no average of the weights: train with --ema"):
        read_state(tmp_path / "plain.safetensors", ema=True)


def test_a_gradient_that_is_not_finite_is_named(monkeypatch):
    """A loss that is finite tells nothing of it, and clipping carries it to all parameters."""
    step = new_step(accumulate=1, ema=None)
    kernels = step.backward

    def spoilt():
        kernels()
        if step.steps == 2:
            for name in ("conv1/weight", "conv2/weight"):
                step.gradient_views().of(step.gradient_views().flat)[name].flat[3] = np.nan

    step.backward = spoilt
    with pytest.raises(DivergedError, match=r"norm of the gradients is nan in step 3 .*gradient of 'conv2/weight' is"):
        train_step(step, small_data(), epochs=1)


def test_the_command_line_asks_for_all_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bnfuse.save(graph(), "fused.onnx")
    save_npz(tmp_path / "data.npz", small_data(train=3 * BATCH))
    asked = ["--lr-of", "head/*=2", "--decay-of", "*/bias=0", "--clip-norm", "1", "--accumulate", "2", "--ema", "0.7"]
    asked += [
        "--ema-warm-up",
        "--layer-decay",
        "0.9",
        "--opt",
        "epsilon=1e-3",
        "--opt",
        "alpha=0.9",
        "--freeze",
        "conv1/*",
    ]
    asked += ["--optimizer", "rmsprop", "--weight-decay", "0.01", "--no-decay", "head/bias", "--threads", "1"]
    places = ["--data", "data.npz", "--save", "run", "--export", "model.onnx"]
    assert main(["train", "fused.onnx", *asked, *places, "--epochs", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["epochs"][0]["ema_accuracy"] is not None
    wanted = bnfuse.runtime.RMSprop(
        0.1,
        momentum=0.9,
        weight_decay=0.01,
        alpha=0.9,
        epsilon=1e-3,
        no_decay=("head/bias",),
        groups=(Group("head/*", lr=2.0), Group("*/bias", weight_decay=0.0)),
        layer_decay=0.9,
        clip_norm=1.0,
        accumulate=2,
        ema=EMA(0.7, True),
    )
    saved = json.loads(read_metadata(tmp_path / "run" / "last.safetensors")["bnfuse.training"])
    assert saved["settings"]["optimizer"] == str(wanted)
    tensors = read_safetensors(tmp_path / "run" / "last.safetensors")[0]
    assert "optimizer.second_moment.conv2/weight" in tensors
    assert "optimizer.second_moment.conv1/weight" not in tensors
    assert main(["compile", "fused.onnx", "-o", "step.bnf", *asked]) == 0
    assert "gradients of several batches" in capsys.readouterr().out
    assert bnfuse.open_step("step.bnf", threads=1).optimizer == wanted


def test_no_option_of_an_optimiser_has_two_ways():
    fields = {field.name for kind, _ in NAMES.values() for field in dataclasses.fields(kind)}
    assert set(OPTIONS) == {"name", *fields} - {"betas", "epsilon", "alpha"}


def test_a_new_run_has_none_of_the_gradients_of_the_run_that_its_state_is_of(tmp_path):
    step = new_step()
    train_step(step, small_data(), epochs=1)
    data = small_data()
    step(data.train_x[:BATCH], data.train_y[:BATCH])
    assert step.pending == 1
    step.save(tmp_path / "mid.safetensors")
    seen, other = [], new_step()
    backward = other.backward

    def counted():
        seen.append(other.pending)
        return backward()

    other.backward = counted
    train_step(other, data, epochs=1, resume=tmp_path / "mid.safetensors")
    assert seen == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--lr-of", "head"], "write it as GLOB=NUMBER"),
        (["--lr-of", "head=much"], "'much' is no number"),
        (["--ema-warm-up"], "is of the average that --ema DECAY keeps"),
        (["--opt", "alpha=0.9"], "optimizer sgd has no 'alpha': it has momentum, nesterov, no_decay, weight_decay"),
        (["--opt", "clip_norm=1"], "--opt clip_norm: has an option of its own: --clip-norm"),
        (["--opt", "lr=1"], "--opt lr: has an option of its own: --lr"),
        (["--clip-norm", "1", "--clip-value", "1"], "give one of them"),
        (["--freeze", "stem*"], "--freeze 'stem*' matches no parameter"),
        (["--lr-of", "stem*=2"], "group: no parameter is named like 'stem*'"),
        (["--accumulate", "1000"], "accumulate=1000: an epoch has 89 batches"),
    ],
)
def test_what_cannot_be_followed_is_one_line(options, what, tmp_path, capsys):
    bnfuse.save(graph(), tmp_path / "fused.onnx")
    assert main(["train", str(tmp_path / "fused.onnx"), "--data", "digits", *options]) == 2
    assert what in capsys.readouterr().err
