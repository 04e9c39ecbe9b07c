"""The scripts of docs/examples run, and train as they do without their one line; the notebook prints what it shows."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
TINY = ("--image", "8", "--batch", "8", "--width", "4", "--epochs", "1", "--steps", "3")
ONE_LINE = re.compile(r"^ *model = .*  # the one line\n|^ *self\.network = .*  # the one line\n", re.MULTILINE)

pytestmark = [pytest.mark.torch, pytest.mark.exporter]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    import torch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.set_num_threads(1)


def written(name: str, folder: Path) -> dict[str, Path]:
    """The script as it is, and without its one line."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    without, count = ONE_LINE.subn("", text)
    assert count == text.count("# the one line") == 1
    scripts = {"fused": folder / name, "plain": folder / f"plain_{name}"}
    for path, code in zip(scripts.values(), (text, without), strict=True):
        path.write_text(code, encoding="utf-8")
    return scripts


def loss_in(printed: str) -> float:
    (loss,) = re.findall(r"loss ([\d.]+), ", printed)
    return float(loss)


def losses(name: str, monkeypatch, capsys, folder: Path, *arguments: str) -> dict[str, float]:
    """The last loss that each prints, run in this process."""
    monkeypatch.chdir(folder)
    found = {}
    for kind, script in written(name, folder).items():
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")
        found[kind] = loss_in(capsys.readouterr().out)
    return found


def check(found: dict[str, float]) -> None:
    assert found["fused"] == pytest.approx(found["plain"], rel=1e-3)


def test_a_unet(monkeypatch, capsys, tmp_path):
    check(losses("segmentation.py", monkeypatch, capsys, tmp_path, *TINY, "--depth", "1"))


def test_torch_compile(monkeypatch, capsys, tmp_path):
    import torch
    from torch._dynamo.backends.registry import register_backend

    from bnfuse.torch.backend import backend

    torch._dynamo.reset()
    if "bnfuse" not in torch._dynamo.list_backends():
        register_backend(backend, name="bnfuse")
    check(losses("compiled.py", monkeypatch, capsys, tmp_path, *TINY, "--depth", "1"))
    torch._dynamo.reset()


@pytest.mark.lightning
def test_lightning(monkeypatch, capsys, tmp_path):
    check(losses("lightning_module.py", monkeypatch, capsys, tmp_path, *TINY))


@pytest.mark.accelerate
def test_accelerate(monkeypatch, capsys, tmp_path):
    from accelerate.state import AcceleratorState, GradientState

    try:
        check(losses("accelerate_loop.py", monkeypatch, capsys, tmp_path, *TINY))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.timm
@pytest.mark.torchvision
def test_a_timm_model_on_a_folder(monkeypatch, capsys, tmp_path):
    from PIL import Image

    for part, count in {"train": 8, "val": 3}.items():
        for k, kind in enumerate(("dark", "light")):
            (tmp_path / "data" / part / kind).mkdir(parents=True)
            for n in range(count):
                Image.new("RGB", (40, 36), (100 * k + n, 90 * k, 80)).save(tmp_path / f"data/{part}/{kind}/{n}.png")
    sizes = ["--image", "32", "--batch", "4", "--epochs", "1", "--steps", "3", "--workers", "0"]
    check(losses("timm_loop.py", monkeypatch, capsys, tmp_path, "--data", "data", *sizes))
    assert (tmp_path / "model.onnx").exists()


def test_the_notebook_prints_what_it_shows(monkeypatch, tmp_path):
    """Its code runs cell by cell, in one namespace. Its outputs were written by a run of it, from first to last."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads((EXAMPLES / "fuse.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    namespace: dict[str, object] = {"__name__": "notebook"}
    for cell in code:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"fuse.ipynb [{cell['execution_count']}]", "exec"), namespace)
        shown = "".join(line for output in cell["outputs"] for line in output.get("text", ()))
        assert out.getvalue() == shown, "differs from the notebook, whose first cell says how to run it anew"
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell["outputs"])


def test_two_processes(tmp_path):
    """torchrun starts them, with the script's line and without it."""
    losses = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for way, script in written("ddp.py", tmp_path).items():
        with (tmp_path / "errors").open("w+") as errors:
            run = subprocess.Popen(
                [*torchrun, str(script), *TINY], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            try:
                printed, _ = run.communicate(timeout=120)
            finally:
                run.terminate()  # torchrun ends its processes
            assert run.returncode == 0, (tmp_path / "errors").read_text()
        first, last = printed.splitlines()[-2:]
        assert first.startswith("2 processes: ") and last.startswith("equal to one process"), printed
        losses[way] = loss_in(first)
    check(losses)
