"""`bnfuse train` killed by SIGKILL goes on where it was, and no file is ever half written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import onnx
import pytest
from small_training import save_npz, small_data

import bnfuse
from bnfuse.core.tensor_files import read_safetensors

SETTINGS = {"epochs": 30, "seed": 3, "augment": "flip,pad-crop:1", "checkpoint_every": 3, "log_every": 1, "threads": 1}
OPTIONS = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
KILLS = (7, 61, 118)  # lines of metrics, of 180, after which the process is killed
TIMES = ("seconds", "images_per_second", "waited")


@pytest.fixture
def files(graph, new_step, tmp_path, monkeypatch) -> Path:
    new_step()  # its kernels are cached
    onnx.save(graph, tmp_path / "train.onnx")
    save_npz(tmp_path / "data.npz", small_data())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(name: str) -> None:
    """In this process, to the end."""
    optimizer = bnfuse.SGD(lr=0.1, momentum=0.9)
    places: dict[str, Any] = {"save_to": name, "metrics": f"{name}.jsonl", "resume": "auto"}
    bnfuse.train("train.onnx", "data.npz", optimizer=optimizer, **SETTINGS, **places)  # type: ignore[arg-type]


def start(name: str) -> subprocess.Popen[bytes]:
    """In a process of its own."""
    places = ("--save", name, "--metrics", f"{name}.jsonl", "--resume", "auto")
    command = [sys.executable, "-m", "bnfuse.cli", "train", "train.onnx", "--data", "data.npz", *OPTIONS, *places]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def killed_after(process: subprocess.Popen[bytes], path: Path, count: int) -> bool:
    """Whether it lived to see the kill."""
    end = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < end:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            os.kill(process.pid, signal.SIGKILL)
            return process.wait() == -signal.SIGKILL
        time.sleep(0.001)
    return False


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in found]


def test_three_kills_change_nothing(files):
    train("whole")
    for count in KILLS:
        process = start("killed")
        assert killed_after(process, files / "killed.jsonl", count), process.stderr.read()
        for path in (files / "killed").glob("*.safetensors"):
            read_safetensors(path)  # whole
    train("killed")
    for name in ("last.safetensors", "best.safetensors"):
        ours, theirs = (read_safetensors(files / run / name)[0] for run in ("killed", "whole"))
        assert {k: v.tobytes() for k, v in ours.items()} == {k: v.tobytes() for k, v in theirs.items()}, name
    assert lines(files / "killed.jsonl") == lines(files / "whole.jsonl")
    assert len(lines(files / "whole.jsonl")) == 180
    assert not list((files / "killed").glob(".*.safetensors.*"))
