"""The example of docs/torch.md, as it is printed."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = DOCS / "torch.md"


@pytest.mark.torch
@pytest.mark.exporter
def test_the_example_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert sum("# the one line" in line for line in block.splitlines()) == 1
    exec(compile(block, str(PAGE), "exec"), {})
    assert (
        "torch.Size([5, 10]) the whole module: fused at level icf (1 BatchNorms, 0 unfused)" in capsys.readouterr().out
    )


@pytest.mark.torch
@pytest.mark.exporter
def test_the_script_trains_alike_with_and_without_its_one_line(monkeypatch, capsys):
    script = DOCS / "examples" / "torch_loop.py"
    assert len(re.findall(r"# the one line$", script.read_text(encoding="utf-8"), re.MULTILINE)) == 1
    losses = []
    for fused in ([], ["--fused"]):
        sizes = ["--image", "8", "--batch", "8", "--depth", "1", "--steps", "3"]
        monkeypatch.setattr(sys, "argv", [str(script), *sizes, *fused])
        runpy.run_path(str(script), run_name="__main__")
        losses.append(float(re.findall(r"loss ([\d.]+)", capsys.readouterr().out)[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
