"""What the documents print: their commands print it, and their Python runs."""

import re
from pathlib import Path

import pytest

from bnfuse.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(document: str, language: str = "") -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / document).read_text(encoding="utf-8"), re.DOTALL | re.M)


def printed(capsys, command: str) -> list[str]:
    program, *arguments = command.split()
    assert (program, main(arguments)) == ("bnfuse", 0)
    return capsys.readouterr().out.splitlines()


def test_the_exploration_of_the_squeeze_ratio(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (shown,) = [block for block in blocks("design-space.md") if block.startswith("$ cat published.csv")]
    _, published, explored = re.split(r"^\$ ", shown, flags=re.M)
    (tmp_path / "published.csv").write_text(published.split("\n", 1)[1])
    command, table = explored.split("\n", 1)
    assert printed(capsys, command) == table.splitlines()
    assert (tmp_path / "explore.png").exists()


def test_the_estimate_of_resnet50(capsys):
    commands, shown = blocks("estimate.md")[:2]
    *lines, rest = shown.splitlines()
    assert rest == "..."
    assert printed(capsys, commands.splitlines()[0])[: len(lines)] == lines


@pytest.mark.parametrize(
    "document, place",
    [
        pytest.param("design-space.md", 0, id="inspect"),
        pytest.param("reram.md", 0, id="a pipeline"),
    ],
)
def test_python(document, place):
    exec(compile(blocks(document, "python")[place], document, "exec"), {"bnfuse": __import__("bnfuse")})
