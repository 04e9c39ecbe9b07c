"""The tutorials run as they are printed: their Python, their commands, and what these print."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from bnfuse.cli import main

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
EXPORTED = [
    pytest.param(name, marks=[pytest.mark.torch, pytest.mark.exporter])
    for name in ("torch.md", "folder.md", "pixels.md")
]
BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def follow(tutorial: str) -> int:
    """Run a tutorial's blocks in order, in one namespace and the current folder; how many outputs were compared.

    A `text` block is what the block before it printed: `...` in a line stands for anything, a line of `...` for lines.
    """
    namespace: dict[str, object] = {"__name__": "tutorial"}
    printed, compared = "", 0
    for language, body in BLOCK.findall((TUTORIALS / tutorial).read_text(encoding="utf-8")):
        if language == "text":
            assert matches(body, printed), f"{tutorial} shows\n{body}\nand this was printed:\n{printed}"
            compared += 1
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if language == "python":
                exec(compile(body, tutorial, "exec"), namespace)
            else:
                run(body)
        printed = out.getvalue()
    return compared


def run(commands: str) -> None:
    for line in commands.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert (program, main(arguments)) == ("bnfuse", 0), line


def matches(shown: str, printed: str) -> bool:
    lines = [re.escape(line.rstrip()).replace(r"\.\.\.", ".*") for line in shown.splitlines()]
    pattern = "\n".join("(?:.*\n)*?.*" if line == ".*" else line for line in lines)
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in printed.rstrip().splitlines())) is not None


@pytest.mark.parametrize(
    "tutorial",
    [*EXPORTED, "unfused.md", "fewer.md"],
)
def test_it_runs_as_printed(tutorial, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert follow(tutorial) >= 3


def test_what_is_shown_has_to_match():
    assert matches("a ... c\n...\nend", "a b c\nmore\nlines\nend\n")
    assert matches("one\n...", "one\ntwo\n")
    assert not matches("a\nend", "a\nmore\nend\n")
    assert not matches("a ... d", "a b c\n")
