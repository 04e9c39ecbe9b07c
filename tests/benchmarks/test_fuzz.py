"""A hundred cases of benchmarks/fuzz.py, which says what must hold of each; in a process of its own, for it forks."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_hundred_mutated_inputs(tmp_path):
    found = tmp_path / "found.json"
    command = [sys.executable, ROOT / "benchmarks" / "fuzz.py", "--cases", "100", "--seed", "1", "--json", found]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    report = json.loads(found.read_text())
    assert (done.returncode, report["findings"]) == (0, {}), done.stdout
    assert report["cases"] == 100 and all(
        report["commands"].get(name) for name in ("rewrite", "verify", "build", "run")
    )
