"""What a run tells and leaves: history, metrics, a plot, and what it refuses before any work."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.targets.target import CudaTarget
from bnfuse.training import Options, data_for, evaluate_step, train_step
from bnfuse.training.feeding import evaluate_data, fed_statistics
from bnfuse.training.history import Epoch, History, best_of, without_gain
from bnfuse.training.metrics import kept_lines
from bnfuse.training.scoring import Evaluation


def epochs_of(*accuracies):
    return tuple(Epoch(index, 1.0, accuracy, 0.1, 1.0) for index, accuracy in enumerate(accuracies, 1))


def test_metrics_are_a_line_an_epoch_and_one_every_few_steps(new_step, data, tmp_path):
    path = tmp_path / "run.jsonl"
    history = train_step(new_step(), data, epochs=2, eval_every=2, metrics=path, log_every=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["epoch"], line["step"]) for line in lines] == [
        *(("step", 1, 2), ("step", 1, 4), ("epoch", 1, 5), ("step", 2, 6), ("step", 2, 8), ("step", 2, 10)),
        ("epoch", 2, 10),
    ]
    first, second = (line for line in lines if line["kind"] == "epoch")
    assert first["accuracy"] is None
    assert (second["loss"], second["accuracy"]) == (history.epochs[1].loss, history.accuracy)
    assert all(line["images_per_second"] > 0 and line["lr"] > 0 for line in lines)


def test_a_new_run_begins_its_metrics_anew(new_step, data, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1}\n')
    train_step(new_step(), data, epochs=1, metrics=path)
    assert len(path.read_text().splitlines()) == 1


def test_metrics_beyond_a_checkpoint_are_cut_off(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = [json.dumps({"kind": "step", "step": step}) + "\n" for step in (1, 2, 3)]
    path.write_text("".join(lines) + '{"kind": "st')
    assert kept_lines(path, 9).decode() == "".join(lines)
    assert kept_lines(path, 2).decode() == "".join(lines[:2])
    assert kept_lines(path, 0) == b""
    path.write_text(lines[0] + "[1]\n" + lines[1])
    assert kept_lines(path, 9).decode() == lines[0]


def test_an_epoch_is_evaluated_every_so_often_and_at_the_end(new_step, data):
    history = train_step(new_step(), data, epochs=5, eval_every=2)
    assert [epoch.accuracy is not None for epoch in history.epochs] == [False, True, False, True, True]
    assert history.accuracy == history.epochs[-1].accuracy


def test_the_best_epoch_is_the_first_of_the_best():
    epochs = epochs_of(0.5, 0.7, None, 0.7, 0.6)
    assert best_of(epochs).epoch == 2
    assert without_gain(epochs) == 2
    assert without_gain(epochs_of(0.1, 0.2)) == 0
    assert without_gain(epochs_of(0.5, 0.52, 0.54, 0.56), 0.05) == 0
    assert without_gain(epochs_of(0.5, 0.52, 0.54, None, 0.549), 0.05) == 3
    assert best_of(()) is None
    assert History(epochs, 1, 1).to_json()["best"] == {"epoch": 2, "accuracy": 0.7}


def test_patience_ends_a_run_that_gains_nothing(new_step, data, monkeypatch, tmp_path):
    accuracies = iter([0.2, 0.5, 0.4, 0.5, 0.9])
    monkeypatch.setattr(
        "bnfuse.training.loop.evaluate_data", lambda *_, **__: Evaluation(100, round(100 * next(accuracies)), 0.5)
    )
    history = train_step(new_step(), data, epochs=5, patience=2, save_to=tmp_path)
    assert [epoch.accuracy for epoch in history.epochs] == [0.2, 0.5, 0.4, 0.5]
    assert history.stopped.startswith("after epoch 4: 2 evaluations in a row")
    again = train_step(new_step(), data, epochs=5, patience=2, resume=tmp_path)
    assert again.epochs == history.epochs


def test_a_plot_is_a_picture(new_step, data, tmp_path):
    train_step(new_step(), data, epochs=2, plot=tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(BnfuseError, match=r"pip install 'bnfuse\[plot\]'"):
        Options(1, plot=tmp_path / "run.png").check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0 is out of range"),
        ({"seed": -1}, "seed=-1"),
        ({"patience": 0}, "patience=0"),
        ({"warm_up": 3}, "warm-up of 3 epochs leaves none of 3"),
        ({"resume": "auto"}, "folder of --save"),
        ({"checkpoint_every": 5}, "need a folder"),
        ({"log_every": 5}, "--metrics"),
        ({"min_delta": 0.1}, "give --patience too"),
        ({"min_lr": -1}, "min_lr"),
        ({"schedule": "one-cycle", "warm_up": 1}, "climbs by itself"),
        ({"schedule": "linear"}, "schedule 'linear'"),
        ({"augment": "rotate"}, "augmentation 'rotate'"),
        ({"plot": "run.txt"}, "a plot ends in"),
        ({"metrics": "no/such/folder/run.jsonl"}, "cannot be written"),
        ({"save_to": "file.txt/run"}, "cannot be written"),
        ({"save_to": "file.txt"}, "name a folder for checkpoints"),
        ({"save_to": "no/such/run"}, "cannot be written"),
    ],
)
def test_what_is_impossible_is_refused_before_any_work(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("no folder")
    with pytest.raises(BnfuseError, match=message):
        Options(**{"epochs": 3, **options}).check()


def test_metrics_and_plot_may_lie_in_the_folder_of_a_new_run(tmp_path):
    run = tmp_path / "new"
    Options(1, save_to=run, metrics=run / "run.jsonl", log_every=1, plot=run / "run.png").check()


def test_the_bar_says_where_the_run_stands(new_step, data, monkeypatch):
    monkeypatch.setattr("bnfuse.training.loop.REFRESH", 0.0)
    seen = []

    class Watched:
        def __call__(self, text):
            seen.append(text)

        def bar(self, done, total, text):
            seen.append((done, total, text))

    train_step(new_step(), data, epochs=1, progress=Watched())
    done, total, text = seen[1]
    assert (done, total) == (2, 5)
    assert text.startswith("epoch 1 of 1  loss ")
    assert text.endswith("images/s")
    assert "lr 0.0" in text


def test_evaluation_counts_every_image_once(new_step, data):
    step = new_step()
    fed = data_for(step, data.normalised())
    right = 0
    for start in range(0, 40, 8):
        part = np.zeros((16, 1, 8, 8), np.float32)
        part[:8] = fed.test_x[start : start + 8]
        right += int((step.evaluate(part)[:8].argmax(1) == fed.test_y[start : start + 8]).sum())
    found = evaluate_step(step, fed.test_x, fed.test_y)
    assert (found.images, found.right, found.accuracy) == (40, right, right / 40)
    assert evaluate_data(step, data, normalise=True) == found
    logits = np.concatenate([step.evaluate(fed.test_x[i : i + 1]) for i in range(40)]).astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert np.isclose(found.loss, -np.log(p[np.arange(40), fed.test_y]).mean(), rtol=1e-6)


def test_virtual_samples_are_drawn_like_the_data_that_is_fed(new_step, data):
    mean, std = fed_statistics(data)
    assert np.allclose(mean, data.train_x.mean((0, 2, 3)), atol=1e-6)
    assert np.allclose(std, data.train_x.std((0, 2, 3)), rtol=1e-5)
    step = new_step()
    train_step(step, data, epochs=1)
    assert np.allclose(np.ravel(step.virtual_statistics[0]), mean)
    assert np.allclose(np.ravel(step.virtual_statistics[1]), std)


def test_the_rate_of_the_step_is_its_own_again_after_a_run(new_step, data):
    step = new_step()
    train_step(step, data, epochs=1)
    assert step.lr == 0.05


def test_the_epoch_moves_the_samples(new_step, data):
    step, seen = new_step(), []
    train_step(step, data, epochs=2, seed=4, progress=lambda _: seen.append((step.seed, step.epoch)))
    assert seen == [(4, 1), (4, 2)]


def test_a_step_in_one_call_as_on_a_gpu_trains_alike(new_step, data):
    step = new_step()
    step.target = CudaTarget("sm_90", 132)
    whole, apart = (train_step(s, data, epochs=2, augment="flip") for s in (step, new_step()))
    assert [(e.loss, e.accuracy) for e in whole.epochs] == [(e.loss, e.accuracy) for e in apart.epochs]
