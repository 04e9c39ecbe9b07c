"""What the documents print: their commands print it, and their Python runs."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest
from source_files import load

from bnfuse.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = load(ROOT / "benchmarks" / "documents.py")
CITATION = r"\[([A-Z][a-z]+\d\d)\]"
FOLDERS = ("bnfuse", "passes", "runtime", "models", "tests", "benchmarks", "docs")


def texts() -> list[Path]:
    """The text files of the project, without results and golden texts."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True)
    files = listed.stdout.splitlines() if listed.returncode == 0 else []
    return [ROOT / name for name in files] or [p for p in ROOT.rglob("*") if p.suffix in (".py", ".md")]


def blocks(document: str, language: str = "") -> list[str]:
    """The code blocks of a language."""
    text = (DOCS / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def printed(capsys, command: str) -> list[str]:
    program, *arguments = command.split()
    assert (program, main(arguments)) == ("bnfuse", 0)
    return capsys.readouterr().out.splitlines()


def test_the_exploration_of_the_squeeze_ratio(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (shown,) = [block for block in blocks("design-space.md") if block.startswith("$ cat published.csv")]
    _, published, explored = re.split(r"^\$ ", shown, flags=re.MULTILINE)
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


@pytest.mark.parametrize("name", DOCUMENTS.GENERATED)
def test_what_is_generated_is_what_its_program_writes(name):
    stored = (DOCS / name).read_text(encoding="utf-8")
    assert stored == DOCUMENTS.GENERATED[name](), "run: python benchmarks/documents.py"


def test_decisions_are_numbered_in_the_order_of_their_dates():
    text = (DOCS / "decisions.md").read_text(encoding="utf-8")
    found = DOCUMENTS.DECISION.findall(text)
    assert len(found) == len(re.findall(r"^## ", text, re.MULTILINE)) > 50
    assert [(anchor, number) for anchor, number, _, _ in found] == [
        (f"d{i}", f"D{i}") for i in range(1, len(found) + 1)
    ]
    dates = [date for *_, date in found]
    assert dates == sorted(dates)


def test_every_paper_that_is_cited_is_in_the_bibliography():
    known = set(re.findall(r"^## ([A-Z][a-z]+\d\d)$", (DOCS / "papers.md").read_text(encoding="utf-8"), re.MULTILINE))
    cited = {}
    for file in texts():
        text = file.read_text(encoding="utf-8")
        cited.update(dict.fromkeys(re.findall(CITATION, text), file))
        if file.suffix == ".md":
            used = set(re.findall(CITATION + "(?!:)", re.sub("`[^`\n]*`", "", text)))
            defined = dict(re.findall(rf"^{CITATION}: (\S+)$", text, re.MULTILINE))
            assert used == set(defined), f"{file}: {used ^ set(defined)} (a link definition for each citation)"
            for key, target in defined.items():
                place, anchor = target.split("#")
                assert (file.parent / place).resolve() == DOCS / "papers.md" or file == DOCS / "papers.md"
                assert anchor == key.lower()
    assert set(cited) == known


def test_every_path_that_a_document_names_is_there():
    files = {file.name for file in texts()}
    named = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./{{}},*-]*\w")
    for document in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks" / "RESULTS.md",
        *DOCS.rglob("*.md"),
    ):
        text = document.read_text(encoding="utf-8")
        for place in named.findall(text):
            assert list(ROOT.glob(place)), f"{document.name} names {place}"
        for file in re.findall(r"(?<![\w/])\w+\.py\b", text):
            assert file in files | YOURS, f"{document.name} names {file}"


YOURS = {"model.py"}
"""Files of users, which documents speak of."""


METADATA = {
    f"bnfuse.{key}" for key in ("classes", "input_", "input_crop_share", "input_mean", "input_scale", "input_std")
}
METADATA |= {f"bnfuse.{key}" for key in ("module", "notes", "pass", "roles", "sampling", "sources")}
"""Keys of files, which read like modules."""


def test_every_module_that_a_document_names_is_there():
    named = re.compile(r"(?<![\w./])bnfuse(?:\.[A-Za-z_]\w*)+")
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        for name in set(named.findall(document.read_text(encoding="utf-8"))) - METADATA:
            assert exists(name), f"{document.name} names {name}"


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[count:])
    return False
