"""Options of `train` in a file."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from small_training import small_data, small_graph

from bnfuse.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    """What `bnfuse train` asks for, without doing it."""
    found = []

    def train(model, data, **asked):
        found.append({"model": str(model), "data": data, **asked})
        raise KeyboardInterrupt

    monkeypatch.setattr("bnfuse.api.train", train)
    return found


FILES = {
    "recipe.toml": """
        data = "data.npz"
        epochs = 7
        label-smoothing = 0.1
        no-decay = ["*.bias", "b*"]
        nesterov = true""",
    "recipe.yaml": """
        data: data.npz
        epochs: 7
        label_smoothing: 0.1
        no_decay: ['*.bias', 'b*']
        nesterov: true""",
    "recipe.json": """{
        "data": "data.npz", "epochs": 7, "label-smoothing": 0.1, "no-decay": ["*.bias", "b*"], "nesterov": true}""",
}


@pytest.mark.parametrize("name", FILES)
def test_options_come_from_the_file_and_the_command_line_wins(name, folder, calls):
    (folder / name).write_text(FILES[name])
    main(["train", "train.onnx", "--config", name, "--epochs", "9", "--mixup", "0.2"])
    (asked,) = calls
    assert (asked["data"], asked["epochs"], asked["label_smoothing"], asked["mixup"]) == ("data.npz", 9, 0.1, 0.2)
    assert (asked["optimizer"].no_decay, asked["optimizer"].nesterov) == (("*.bias", "b*"), True)


def test_what_is_recorded_is_a_file_that_asks_for_the_same(folder, calls):
    asked = ["--no-decay", 'a "b"\\*', "--warm-up", "0.5", "--target", "cpu", "--clip-norm", "inf"]
    main(["train", "train.onnx", "--data", "data.npz", *asked])
    (folder / "again.toml").write_text(calls[0]["recorded"])
    main(["train", "train.onnx", "--config", "again.toml"])
    first, second = ({k: v for k, v in call.items() if k != "progress"} for call in calls)
    assert first == second


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "'epoch' is no option of train: did you mean 'epochs'?"),
        ("epochs = 2.5", "epochs: "),
        ("epochs = 0", "epochs: "),
        ("epochs = [1, 2]", "epochs: must be a number"),
        ('optimizer = "lamb"', "optimizer: 'lamb' is not one of"),
        ("nesterov = 3.5", "nesterov: "),
        ("epochs", "is no file of options"),
    ],
)
def test_what_is_no_option_is_told_with_the_file(text, message, folder, calls, capsys):
    (folder / "recipe.toml").write_text(text)
    assert main(["train", "train.onnx", "--data", "data.npz", "--config", "recipe.toml"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("bnfuse: recipe.toml: ") and message in error and "\n" not in error
    assert not calls


def test_a_file_that_is_not_there_is_told(folder, capsys):
    assert main(["train", "train.onnx", "--data", "data.npz", "--config", "no.toml"]) == 2
    assert "no.toml: cannot be read: No such file" in capsys.readouterr().err


def test_a_run_records_what_it_was_asked_for(folder, capsys):
    onnx.save(small_graph(sample=None), "train.onnx")
    data = small_data()
    np.savez("data.npz", x=data.train_x, y=data.train_y)
    options = ["--epochs", "1", "--save", "run", "--metrics", "run.csv", "--label-smoothing", "0.1", "--threads", "1"]
    assert main(["train", "train.onnx", "--data", "data.npz", *options, "--json"]) == 0
    out, told = capsys.readouterr()
    assert "label-smoothing = 0.1" in told
    (epoch,) = json.loads(out)["epochs"]
    assert 0 <= epoch["top5"] <= 1 and 0 <= epoch["balanced_accuracy"] <= 1
    recorded = (folder / "run" / "recipe.toml").read_text()
    assert "epochs = 1\n" in recorded and "label-smoothing = 0.1\n" in recorded and 'save = "run"' in recorded
    head, row = (folder / "run.csv").read_text().splitlines()
    assert dict(zip(head.split(","), row.split(","), strict=True))["loss"] == str(epoch["loss"])
