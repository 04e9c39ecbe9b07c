"""The document's tables are what benchmarks/estimate_figures.py prints (all but GNMT's, which take minutes)."""

from __future__ import annotations

from pathlib import Path

import pytest
from source_files import load

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("matplotlib")
    return load(ROOT / "benchmarks" / "estimate_figures.py")


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
