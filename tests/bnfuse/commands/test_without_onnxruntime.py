"""A machine without onnxruntime: everything but a comparison with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = """
build densenet40 --set growth=4 --set depth=2 --batch 4 --image 8 --channels 1 -o train.onnx
rewrite train.onnx -o fused.onnx
diff train.onnx fused.onnx
inspect train.onnx
estimate train.onnx --hardware h100
compile fused.onnx -o step.bnf --lr 0.05
run step.bnf --data digits --steps 2
"""
SCRIPT = """
import sys
from bnfuse.cli import main
for line in sys.stdin.read().strip().splitlines():
    if status := main(line.split()):
        sys.exit(status)
"""


HIDING = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            raise ModuleNotFoundError("No module named 'onnxruntime'", name=name)

sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture
def bare(tmp_path: Path):
    """A process in which onnxruntime is not to be had, given commands a line each."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDING)
    paths = os.pathsep.join(filter(None, [str(tmp_path / "hidden"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}

    def run(commands: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", SCRIPT]
        return subprocess.run(command, input=commands, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_only_a_comparison_with_it_needs_onnxruntime(bare):
    done = bare(COMMANDS)
    assert done.returncode == 0, done.stderr
    done = bare("verify train.onnx fused.onnx")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("bnfuse: onnxruntime does not load (No module named 'onnxruntime'). Install it: pip ")
