"""Commands for a GPU on a machine without one: compiled for two architectures, loaded, refused in one line."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import onnx
import pytest
from cuda.bindings.driver import CUresult
from fake_cuda import FakeCuda, install
from source_files import load

from bnfuse.cli import main
from bnfuse.runtime import load_step
from bnfuse.runtime.kernels.cuda import compile as compiling

nets = load(pathlib.Path(__file__).parents[2] / "runtime" / "test_session.py")

ARCHITECTURES = ("sm_80", "sm_90")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    """train.onnx, fused.onnx and for each architecture ARCHITECTURE.bnf in bf16."""
    folder = tmp_path_factory.mktemp("files")
    net = nets.Net()
    x = net.op("Relu", net.bn(net.conv("image", 3, 8, 3), 8))
    onnx.save(net.model(x, 8), folder / "forward.onnx")
    train, fused = str(folder / "train.onnx"), str(folder / "fused.onnx")
    assert main(["build", str(folder / "forward.onnx"), "-o", train]) == 0
    assert main(["rewrite", train, "-o", fused]) == 0
    for arch in ARCHITECTURES:
        to = str(folder / f"{arch}.bnf")
        assert main(["compile", fused, "--target", f"cuda:{arch}", "--precision", "bf16", "-o", to]) == 0
    return folder


@pytest.fixture
def no_gpu(monkeypatch):
    """A driver that finds no GPU, whatever this machine has."""
    fake = install(monkeypatch, FakeCuda())
    fake.fail["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE


def refused(capsys, *arguments: str) -> str:
    """The one line of a command that ends with status 2."""
    capsys.readouterr()
    status = main(list(arguments))
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]  # of progress
    assert (status, len(lines)) == (2, 1), lines
    return lines[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_compiled_step_is_loaded_and_holds_the_network_s_state(files, arch):
    step = load_step(files / f"{arch}.bnf")
    assert str(step.target) == f"cuda {arch}, bf16"
    assert step.report.launches["forward"] > 0 and step.report.launches["update"] > 0
    stored = onnx.load(files / "train.onnx").graph.initializer
    state = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in stored}
    assert step.state_dict() and all((state[name] == value).all() for name, value in step.state_dict().items())


def test_loading_takes_no_compiler(files):
    """Neither TVM nor NVRTC is imported where a step is loaded."""
    program = "import sys; import bnfuse.runtime as r; r.load_step(sys.argv[1]); print('tvm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, files / "sm_90.bnf"], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_running_it_without_a_gpu_is_one_line(files, capsys, no_gpu):
    line = refused(capsys, "run", str(files / "sm_90.bnf"))
    assert line == ("bnfuse: there is no NVIDIA GPU here: compile for cpu, or run the exported step on a GPU machine")


def test_running_it_on_another_gpu_is_one_line(files, capsys, monkeypatch):
    install(monkeypatch, FakeCuda("sm_80"))
    line = refused(capsys, "run", str(files / "sm_90.bnf"))
    assert "was compiled for sm_90; the GPU here (Fake GPU) is sm_80" in line


@pytest.mark.parametrize(
    "command",
    [
        ("run", "fused.onnx"),
        ("train", "fused.onnx", "--data", "digits"),
        ("verify", "train.onnx", "fused.onnx", "--runtime", "tvm"),
    ],
)
def test_without_a_gpu_nothing_is_compiled_in_vain(files, capsys, monkeypatch, no_gpu, command):
    monkeypatch.chdir(files)
    monkeypatch.setattr("bnfuse.runtime.compile.objects", lambda *_, **__: pytest.fail("compiles"))
    assert "there is no NVIDIA GPU here" in refused(capsys, *command, "--target", "cuda:sm_90", "--precision", "bf16")


def test_without_a_compiler_it_is_one_line(files, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("BNFUSE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(compiling, "compiler_version", lambda: "none")
    to = ("--target", "cuda:sm_90", "-o", str(tmp_path / "step.bnf"))
    line = refused(capsys, "compile", str(files / "fused.onnx"), *to)
    assert line == "bnfuse: there is no CUDA compiler: install bnfuse[cuda], or put nvcc on the PATH"


def test_without_bindings_headers_and_nvcc_there_is_no_compiler(monkeypatch):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiling, "include_folders", lambda: ())
    assert compiling.compiler_version.__wrapped__() == "none"


@pytest.mark.parametrize("arch", ["sm_95", "sm_75", "volta"])
def test_an_unknown_architecture_is_one_line(files, capsys, arch):
    line = refused(capsys, "compile", str(files / "fused.onnx"), "--target", f"cuda:{arch}", "-o", str(files / "x.bnf"))
    assert f"{arch}'" in line and line.endswith("use one of sm_80, sm_86, sm_89, sm_90, sm_100")
