"""docs/passes.md says what the passes' docstrings say."""

from pathlib import Path

from bnfuse.passes.pages import PAGES, page

ROOT = Path(__file__).resolve().parents[2]


def test_the_pass_reference_is_up_to_date():
    stored = (ROOT / "docs" / "passes.md").read_text(encoding="utf-8")
    assert stored == page(), "python -m bnfuse.passes.pages > docs/passes.md"


def test_every_pass_has_its_page():
    passes = ROOT / "passes"
    files = [path for path in passes.rglob("*.py") if "InPlacePass)" in path.read_text(encoding="utf-8")]
    assert {".".join(path.relative_to(passes).with_suffix("").parts) for path in files} <= {*PAGES.values()}
