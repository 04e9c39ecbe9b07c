"""A real search: a small VGG on the embedded digits, by the function and by the command."""

import json

import numpy as np
import pytest

import bnfuse
from bnfuse.cli import main
from bnfuse.core.errors import BnfuseError, DivergedError
from bnfuse.data import load_data
from bnfuse.graph.training_graph import open_graph
from bnfuse.searching.training import Recipe, Training, space_of

VGG = ["vgg11", "--batch", "16", "--image", "32", "--channels", "1", "--classes", "10", "--seed", "1"]
SMALL = ["--set", "width=2", "--set", "hidden=8", "--set", "dropout=0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """train.onnx, and few.npz: a hundred digits."""
    folder = tmp_path_factory.mktemp("search")
    assert main(["build", *VGG, *SMALL, "-o", str(folder / "train.onnx")]) == 0
    digits = load_data("digits", image=32)
    x, y = digits.train_x[:96], digits.train_y[:96]
    np.savez(folder / "few.npz", x=x, y=y, x_test=digits.test_x[:48], y_test=digits.test_y[:48])
    return folder


def test_a_search_trains_stores_goes_on_and_says_what_to_remove(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    common = ["search", "train.onnx", "--data", "few.npz", "--epochs", "1", "--lr", "0.05", "--initial", "2"]
    common += ["--threads", "1", "--tolerance", "0.3", "--cost", "bytes"]
    assert main([*common, "--iterations", "4", "-o", "whole.jsonl", "--json", "--plot", "search.png"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [e["iteration"] for e in found["evaluations"]] == [0, 1, 2, 3]
    assert found["evaluations"][0]["placement"] == "11111111"
    assert found["best"]["valid"]
    assert found["batch_norms"][0] == {"index": 1, "node": "stage1/layer1/norm", "cost": 4.0 * 16 * 2 * 32 * 32}
    assert "evaluation 4 of 4" in err
    assert (folder / "search.png").read_bytes().startswith(b"\x89PNG")

    assert main([*common, "--iterations", "3", "-o", "half.jsonl"]) == 0
    with (folder / "half.jsonl").open("ab") as stream:
        stream.write(b'{"iteration": 3, "plac')  # what a kill leaves
    assert main([*common, "--iterations", "4", "--resume", "half.jsonl"]) == 0
    out, err = capsys.readouterr()
    assert "cut short" in err
    assert out.splitlines()[-1].strip() == found["command"]
    whole, half = (
        [json.loads(line) for line in (folder / f).read_text().splitlines()[1:]] for f in ("whole.jsonl", "half.jsonl")
    )
    assert [{**line, "seconds": 0} for line in whole] == [{**line, "seconds": 0} for line in half]

    assert main(found["command"].split()[1:]) == 0  # the command does what it says
    report = bnfuse.load("fused.onnx")
    kept = {node.name for node in report.graph if node.op_type == "BatchNormFinalize"}
    assert len(kept) == found["best"]["kept"]

    assert main([*common, "--epochs", "2", "--resume", "half.jsonl"]) == 2
    assert "epochs (1 there, 2 here)" in capsys.readouterr().err
    assert main([*common, "-o", "half.jsonl"]) == 2
    assert "--resume half.jsonl" in capsys.readouterr().err


def test_a_training_that_diverges_scores_chance_and_is_counted(folder, monkeypatch):
    graph = open_graph(folder / "train.onnx")
    data = load_data(folder / "few.npz").normalised()
    recipe = Recipe(epochs=1, optimizer=bnfuse.SGD(lr=1e30), threads=1, repeats=2)
    score = Training(graph, data, recipe, space_of(graph, "count"))((0,) * 8)
    assert score.diverged == 2
    assert score.accuracies == (0.1, 0.1)
    with pytest.raises(DivergedError, match="not finite"):
        bnfuse.train(folder / "train.onnx", data, epochs=1, optimizer=bnfuse.SGD(lr=1e30), threads=1)


def test_a_graph_without_batch_norms_is_refused(folder):
    fused = bnfuse.rewrite(folder / "train.onnx")
    with pytest.raises(BnfuseError, match="not a rewritten one"):
        bnfuse.search(fused, "digits", output=folder / "none.jsonl")
    assert not (folder / "none.jsonl").exists()
    with pytest.raises(BnfuseError, match="cost 'watts'"):
        bnfuse.search(folder / "train.onnx", "digits", cost="watts", output=folder / "none.jsonl")


@pytest.mark.parametrize(
    ("option", "message"),
    [({"warm_up": 3}, "warm-up"), ({"schedule": "linear"}, "schedule 'linear'"), ({"augment": "rotate"}, "'rotate'")],
)
def test_what_no_training_takes_is_told_before_a_file_is_begun(option, message, folder):
    with pytest.raises(BnfuseError, match=message):
        bnfuse.search(folder / "train.onnx", folder / "few.npz", epochs=2, output=folder / "none.jsonl", **option)
    assert not (folder / "none.jsonl").exists()


def test_a_batch_that_the_images_do_not_fill_is_told_before_a_file_is_begun(folder):
    with np.load(folder / "few.npz") as few:
        np.savez(folder / "fewer.npz", **{**few, "x": few["x"][:8], "y": few["y"][:8]})
    with pytest.raises(BnfuseError, match="do not fill a batch of 16"):
        bnfuse.search(folder / "train.onnx", folder / "fewer.npz", output=folder / "none.jsonl")
    assert not (folder / "none.jsonl").exists()
