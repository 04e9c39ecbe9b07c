"""A command with something wrong about it: files to give to it, and the one line that it ends with."""

import subprocess
import sys
from pathlib import Path

import onnx

from bnfuse.cli import main

SMALL = {"batch": 2, "image": 8, "growth": 4, "depth": 2}


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def refused(capsys, *arguments: str) -> str:
    """The one line of a command that ends with status 2."""
    status = main(list(arguments))
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("[")]  # progress lines begin with [
    assert status == 2, (status, captured)
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("bnfuse: ")
    assert "Traceback" not in captured.err and "internal error" not in captured.err
    return lines[0]


def process(*arguments: str, cwd: Path, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bnfuse", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, **options)
