"""Weights of files and libraries, on the command line and in Python."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import numpy_helper
from small_training import forward_model

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.build.named import build_file
from bnfuse.cli import main
from bnfuse.core.errors import BnfuseError
from bnfuse.fromtorch.initial_state import Loading, with_state
from bnfuse.fromtorch.weights import read_weights
from bnfuse.graph.training_graph import open_graph


@pytest.fixture(scope="module")
def forward(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "net.onnx"
    onnx.save(forward_model(), path)
    return path


@pytest.fixture(scope="module")
def state(forward):
    """Other values for all of it."""
    rng = np.random.default_rng(3)
    own = open_graph(build_training_graph(str(forward))).state()
    return {name: rng.uniform(0.5, 1, value.shape).astype(np.float32) for name, value in own.items()}


def values(path):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def same(found, expected):
    return all((found[name] == value).all() for name, value in expected.items())


def test_build_takes_a_file_of_safetensors(forward, state, tmp_path, capsys):
    path, out = tmp_path / "w.safetensors", tmp_path / "train.onnx"
    safetensors.numpy.save_file(state, path)
    assert main(["build", str(forward), "--weights", str(path), "-o", str(out)]) == 0
    assert f"note: {path}: {len(state)} of {len(state)} tensors" in capsys.readouterr().out
    assert same(values(out), state)
    assert main(["build", str(forward), "--weights", str(path), "--init", "head*", "-o", str(out)]) == 0
    found = values(out)
    assert (found["head/weight"] != state["head/weight"]).all()
    assert (found["head/bias"] == 0).all()
    assert same(found, {name: value for name, value in state.items() if not name.startswith("head")})


def test_a_head_for_other_classes_is_left_out_when_asked(forward, state, tmp_path, capsys):
    path, out = tmp_path / "w.safetensors", tmp_path / "train.onnx"
    safetensors.numpy.save_file({**state, "head/weight": np.ones((7, 16), np.float32), "head/bias": np.ones(7)}, path)
    command = ["build", str(forward), "--weights", str(path), "-o", str(out)]
    assert main(command) == 2
    assert "--skip-head leaves the last layer as it is" in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, "--skip-head"]) == 0
    assert "10 of 12 tensors; left as they are: head/bias, head/weight" in capsys.readouterr().out
    found = values(out)
    assert same(found, {name: value for name, value in state.items() if not name.startswith("head")})
    assert same(found, {name: value for name, value in values(forward).items() if name.startswith("head")})


def test_what_is_missing_is_told_and_left_when_asked(forward, state, tmp_path, capsys):
    path, out = tmp_path / "w.safetensors", tmp_path / "train.onnx"
    safetensors.numpy.save_file({"conv1/weight": state["conv1/weight"], "else": np.ones(1)}, path)
    command = ["build", str(forward), "--weights", str(path), "-o", str(out)]
    assert main(command) == 2
    line = capsys.readouterr().err
    assert "w.safetensors: the state lacks" in line
    assert "has 'else'" in line
    assert "--partial-weights takes what there is" in line
    assert main([*command, "--partial-weights"]) == 0
    assert (values(out)["conv1/weight"] == state["conv1/weight"]).all()
    safetensors.numpy.save_file({"else": np.ones(1)}, path)
    assert main([*command, "--partial-weights"]) == 2
    assert "has none of the graph's names" in capsys.readouterr().err
    assert main([*command[:2], "-o", str(out), "--skip-head"]) == 2
    assert "--skip-head: of --weights, which is not given" in capsys.readouterr().err


def test_training_begins_with_the_weights(forward, state, tmp_path, capsys):
    train, path, saved = tmp_path / "train.onnx", tmp_path / "w.safetensors", tmp_path / "end.safetensors"
    build_file(str(forward), train, zoo={})
    safetensors.numpy.save_file(state, path)
    command = ["train", str(train), "--data", "digits", "--epochs", "1", "--lr", "0", "--weights", str(path), "--json"]
    assert main([*command, "--save", str(saved)]) == 0
    assert json.loads(capsys.readouterr().out)
    found = safetensors.numpy.load_file(saved)
    assert same(found, {name: state[name] for name in ("conv1/weight", "head/weight", "conv2/bn/scale")})
    assert main([*command, "--resume", str(saved)]) == 2
    assert "both say what to begin with" in capsys.readouterr().err
    with pytest.raises(BnfuseError, match="names no weights: give a file"):
        bnfuse.train(train, "digits", weights="w.txt")
    with pytest.raises(BnfuseError, match="the weights: the state lacks"):
        bnfuse.train(train, "digits", weights={"conv1/weight": state["conv1/weight"]})


def test_the_graph_that_was_given_keeps_its_values(forward, state):
    graph = open_graph(build_training_graph(str(forward)))
    before = graph.state()
    other, line = with_state(graph, state, Loading(), name="w")
    assert line == f"w: {len(state)} of {len(state)} tensors"
    assert same(graph.state(), before)
    assert same(other.state(), state)


# -- files and libraries -------------------------------------------------------------------------------------------


class Evil:
    ran = False

    def __reduce__(self):
        return setattr, (Evil, "ran", True)


@pytest.mark.torch
@pytest.mark.parametrize("holder", [None, "state_dict", "model"])
def test_files_of_torch_are_read_alone_or_in_a_checkpoint(tmp_path, holder):
    import torch

    state = {"a.weight": torch.ones(2), "a.num_batches_tracked": torch.tensor(3)}
    torch.save(state if holder is None else {"epoch": 3, holder: state, "optimizer": {"lr": 1}}, tmp_path / "w.pth")
    found = read_weights(tmp_path / "w.pth")
    assert found.keys() == state.keys()


@pytest.mark.torch
def test_pickles_that_hold_more_than_tensors_are_not_run(tmp_path):
    import torch

    path = tmp_path / "w.pt"
    torch.save({"a": torch.ones(1), "b": Evil()}, path)
    with pytest.raises(BnfuseError, match=r"w.pt: torch.load\(weights_only=True\) does not read it .*state_dict"):
        read_weights(path)
    assert not Evil.ran
    torch.save({"epoch": 3, "history": [1.0]}, path)
    with pytest.raises(BnfuseError, match="holds the entries epoch, history, and no state_dict"):
        read_weights(path)
    with pytest.raises(BnfuseError, match=r"none.pt: there is no such file"):
        read_weights(tmp_path / "none.pt")


@pytest.mark.torch
def test_safetensors_of_bfloat16_are_read(tmp_path):
    import safetensors.torch
    import torch

    safetensors.torch.save_file(
        {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(1)}, tmp_path / "w.safetensors"
    )
    found = read_weights(tmp_path / "w.safetensors")
    assert [value.dtype for value in found.values()] == [torch.bfloat16, torch.float32]


def test_weights_of_libraries_are_asked_of_them(monkeypatch):
    weights = types.SimpleNamespace(get_state_dict=lambda progress, check_hash: {"a": np.ones(1)} if check_hash else {})
    asked = []
    models = types.ModuleType("torchvision.models")
    models.get_weight = lambda name: asked.append(name) or weights
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    assert list(read_weights("torchvision:Net_Weights.V1")) == ["a"]
    timm = types.ModuleType("timm")

    def create_model(name, pretrained):
        asked.append((name, pretrained))
        if name == "none":
            raise RuntimeError("Unknown model (none)\nmore")
        return types.SimpleNamespace(state_dict=lambda: {"b": np.ones(1)})

    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert list(read_weights("timm:net.a1")) == ["b"]
    assert asked == ["Net_Weights.V1", ("net.a1", True)]
    with pytest.raises(BnfuseError, match=r"^timm:none: timm does not give it: Unknown model \(none\)$"):
        read_weights("timm:none")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(BnfuseError, match="timm:net: needs timm, which is not installed: pip install timm"):
        read_weights("timm:net")
