"""The README's commands and Python, run as they are printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import bnfuse
from bnfuse.cli import main

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
MARKER = "test_readme.py"


def blocks(language: str) -> list[str]:
    """Code blocks of a language that come right after a comment that names this file."""
    return re.findall(rf"<!--[^>]*{MARKER}[^>]*-->\n```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.timeout(900)
def test_the_commands_and_then_the_python_run_as_printed(tmp_path, monkeypatch, capfd):
    """The first command and the Python as processes, whose start takes longer than most commands do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (commands,), (python,) = blocks("sh"), blocks("python")
    first, *others = commands.splitlines()
    done = subprocess.run(first, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, f"{first}\n{done.stdout}\n{done.stderr}"
    for line in others:
        program, *arguments = shlex.split(line, comments=True)
        assert (program, main(arguments)) == ("bnfuse", 0), f"{line}\n{capfd.readouterr()}"
    done = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Feature maps read and written" in done.stdout and "Equal" in done.stdout


def test_every_file_that_the_documents_link_to_is_there():
    top = Path(__file__).resolve().parents[2]
    for document in (top / "README.md", top / "CONTRIBUTING.md", *sorted((top / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_set_up_is_two_commands():
    set_up = README.split("## Set-up")[1].split("##")[0]
    assert re.findall(r"```\n(.*?)\n```", set_up, re.DOTALL) == [
        "pip install . && bnfuse demo",
        "pip install '.[test]' && pytest -n auto --dist loadfile",
    ]


def test_the_version_is_the_same_wherever_it_is_told():
    top = Path(__file__).resolve().parents[2]
    newest = re.search(r"^## (\S+)", (top / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (.+)$", (top / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest and cited
    assert newest[1] == cited[1] == bnfuse.__version__
