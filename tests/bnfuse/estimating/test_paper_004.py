"""The document's tables are what benchmarks/paper_004.py prints (all but GNMT's, which take minutes)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("paper_004", ROOT / "benchmarks" / "paper_004.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper_004"] = module
    spec.loader.exec_module(module)
    return module


def test_the_document_s_figures_are_the_script_s(script):
    lines = (ROOT / "docs" / "estimate.md").read_text().splitlines()
    cases = (script.RESNET, script.MOBILENET, script.TRANSFORMER)
    runs = {case.label: script.Runs(case) for case in cases}
    tables = [script.ridge_section(), script.figure_section(runs), script.bound_section(runs)]
    for case in cases:
        found = script.variant_section(case)
        tables.append(found)
        assert f"**{found.title}**" in lines
    rows = [f"| {' | '.join(row)} |" for table in tables for row in table.rows]
    assert len(rows) > 50 and [row for row in rows if row not in lines] == []


def test_most_figures_are_within_five_points_of_the_paper(script):
    for figure in script.FIGURES:
        if figure.case is not script.GNMT:
            ours = figure.value(script.Runs(figure.case))
            assert ours < figure.paper if figure.below else abs(ours - figure.paper) < 5, figure


def test_tables_are_written_between_the_marks_alone(script, tmp_path):
    document = tmp_path / "page.md"
    begin, end = "<!-- begin: benchmarks/paper_004.py -->", "<!-- end: benchmarks/paper_004.py -->"
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    script.write_into(document, [script.ridge_section()])
    text = document.read_text()
    assert (
        text.startswith(f"before\n{begin}\n**Ridge points") and text.endswith(f"{end}\nafter\n") and "old" not in text
    )
    document.write_text("no marks")
    with pytest.raises(SystemExit, match="lacks the marks"):
        script.write_into(document, [])
