"""The example of docs/torch.md, as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "torch.md"


@pytest.mark.torch
@pytest.mark.exporter
def test_the_example_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert sum("# the one line" in line for line in block.splitlines()) == 1
    exec(compile(block, str(PAGE), "exec"), {})
    assert (
        "torch.Size([5, 10]) the whole module: fused at level icf (1 BatchNorms, 0 unfused)" in capsys.readouterr().out
    )
