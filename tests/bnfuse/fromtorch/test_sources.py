"""Code that makes a module, and saved programs, on the command line."""

from __future__ import annotations

import io
import pickle
import shutil
import sys
import textwrap
import zipfile

import onnx
import pytest
from onnx import numpy_helper

from bnfuse.build.named import build_model
from bnfuse.cli import main
from bnfuse.core.errors import BnfuseError
from bnfuse.fromtorch.sources import is_code, make_arguments, module_of

CODE = """
    import torch
    from torch import nn
    from parts import Block

    def make(width=2, act="relu"):
        return nn.Sequential(Block(width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))

    def broken():
        return 1 / 0

    def number():
        return 7

    ready = make()
"""
PARTS = """
    from torch import nn

    def Block(width):
        return nn.Sequential(nn.Conv2d(2, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(textwrap.dedent(CODE))
    (tmp_path / "parts.py").write_text(textwrap.dedent(PARTS))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("model", "parts", "bnfuse_source_model"):
        sys.modules.pop(name, None)


def built(path="train.onnx"):
    model = onnx.load(path)
    return model, {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.torch
@pytest.mark.exporter
def test_a_function_of_a_file_is_run_with_its_arguments(folder, capsys):
    command = ["build", "model.py:make", "--make-arg", "width=4", "--make-arg", "act=silu", "--example", "2,2,8,8"]
    assert main([*command, "-o", "train.onnx"]) == 0
    model, values = built()
    assert values["0.0.weight"].shape == (4, 2, 3, 3)
    assert [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim] == [2, 2, 8, 8]
    assert "5 parameters to train" in capsys.readouterr().out


@pytest.mark.torch
@pytest.mark.exporter
def test_parameters_are_drawn_by_the_seed(folder):
    import torch

    first, same, other = (module_of("model.py:make", seed=seed).state_dict()["0.0.weight"] for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.torch
@pytest.mark.exporter
def test_a_module_of_a_package_and_one_that_is_there_already(folder):
    sizes = ["--batch", "3", "--channels", "2", "--image", "8x9", "-o", "train.onnx"]
    assert main(["build", "model:make", *sizes]) == 0
    assert [dim.dim_value for dim in built()[0].graph.input[0].type.tensor_type.shape.dim] == [3, 2, 8, 9]
    assert type(module_of("model.py:ready")).__name__ == "Sequential"


@pytest.mark.torch
@pytest.mark.exporter
@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("model.py:mak", {}, r"model.py:mak: model.py has no 'mak': it has make, broken, number"),
        ("nothing.py:make", {}, "nothing.py: there is no such file"),
        ("no_package.net:make", {}, "no_package.net: there is no module of that name"),
        ("model.py:broken", {}, r"ZeroDivisionError: division by zero \(line 10 of model.py\)"),
        ("model.py:number", {}, "gives a int: it must give a torch.nn.Module"),
        ("model.py:nn", {}, "is a module: name a function, a class or a torch module"),
        ("model.py:ready", {"make_arg": ["width=3"]}, "takes no --make-arg width"),
        ("model.py:make", {"make_arg": ["size=3"]}, "TypeError: .*'size'"),
        ("model.py:make", {"make_arg": ["width"]}, "--make-arg width: write it as NAME=VALUE"),
        ("model.py:make", {"example": ["2,0,8"]}, "--example 2,0,8: write it as"),
        ("model.py:make", {"example": ["2,2,8,8"], "zoo": {"batch": 4}}, "--batch and --example say the same"),
        ("model.py:make", {"zoo": {"classes": 4}}, "classes can be chosen for networks of the zoo only, not for code"),
        ("net.onnx", {"example": ["2,2"]}, "--example is for code"),
    ],
)
def test_what_is_wrong_with_code_is_one_line(folder, source, options, message):
    with pytest.raises(BnfuseError, match=message) as caught:
        build_model(source, **options)
    assert "\n" not in str(caught.value)


def test_arguments_are_literals_or_text():
    assert make_arguments(["a=2", "b=(1, 2)", "c=silu", "d='2'"]) == {"a": 2, "b": (1, 2), "c": "silu", "d": "2"}


def test_code_is_told_from_files_and_networks():
    assert is_code("model.py:make")
    assert is_code("../nets/model.py:Net.small")
    assert is_code("torchvision.models:resnet18")
    assert not any(map(is_code, ("densenet121", "net.onnx", "model.py", "C:\\net.onnx", "a:b:c")))


# -- programs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    import torch
    from torch_modules import images, small

    path = tmp_path_factory.mktemp("program") / "net.pt2"
    torch.export.save(torch.export.export(small(), (images(),), strict=False), path)
    return path


@pytest.mark.torch
@pytest.mark.exporter
def test_a_saved_program_is_built_like_its_module(program, tmp_path, capsys):
    from torch_modules import small

    out = tmp_path / "train.onnx"
    assert main(["build", str(program), "-o", str(out)]) == 0
    state, (_, values) = small().state_dict(), built(out)
    assert all((values[name] == state[name].numpy()).all() for name in ("stem.weight", "norm2.running_var"))


class Evil:
    ran = False

    def __reduce__(self):
        return setattr, (Evil, "ran", True)


def rewritten(source, target, name, content):
    """A copy of an archive with other contents of one member, or one more."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        names = [one for one in old.namelist() if not one.endswith(name)]
        for one in names:
            new.writestr(one, old.read(one))
        full = next((one for one in old.namelist() if one.endswith(name)), f"{names[0].partition('/')[0]}/{name}")
        new.writestr(full, content)


@pytest.mark.torch
@pytest.mark.exporter
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data/sample_inputs/model.pt", "is not tensors alone, and its pickle may run code"),
        ("data/constants/custom_obj_0", "holds an object that is no tensor"),
        ("data/aotinductor/model/a.so", "holds compiled code"),
        ("data/weights/model.pt", "is not tensors alone"),
    ],
)
def test_a_program_with_code_in_it_is_refused_before_it_runs(program, tmp_path, name, message):
    import torch

    bad = tmp_path / "bad.pt2"
    content = io.BytesIO()
    torch.save(Evil(), content)
    rewritten(program, bad, name, content.getvalue())
    with pytest.raises(BnfuseError, match=message):
        build_model(str(bad))
    rewritten(program, bad, "data/constants/plain.pkl", pickle.dumps(Evil()))
    with pytest.raises(BnfuseError, match="is not tensors alone"):
        build_model(str(bad))
    assert not Evil.ran


@pytest.mark.torch
@pytest.mark.exporter
def test_a_file_that_is_no_program_is_one_line(program, tmp_path):
    bad = tmp_path / "bad.pt2"
    bad.write_bytes(b"nonsense")
    with pytest.raises(BnfuseError, match=r"bad.pt2: was not written by torch.export.save"):
        build_model(str(bad))
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("a/version", "1")
    with pytest.raises(BnfuseError, match=r"bad.pt2: was not written by torch.export.save of a torch from 2.8 on"):
        build_model(str(bad))
    with pytest.raises(BnfuseError, match=r"none.pt2: cannot be read: No such file"):
        build_model(str(tmp_path / "none.pt2"))
    shutil.copy(program, bad)
    with pytest.raises(BnfuseError, match="image can be chosen for networks of the zoo only, not for a program"):
        build_model(str(bad), zoo={"image": (8, 8)})
