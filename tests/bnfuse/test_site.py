"""The documentation as a site: it builds without a warning, its links lead somewhere, and it fetches nothing."""

import os
import re
import shutil
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from source_files import load

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.docs


class Page(HTMLParser):
    """What a page links to, what it loads, and where it can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.loads += [given[name] for name in ("src", "srcset", "data") if name in given]
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given["href"])


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site. What the build warns of fails it."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_link_leads_to_a_page_and_a_place_on_it(site, pages):
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_relative_to(site), f"{path.name}: {link}"
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name}: {link}"
            if parts.fragment and target.suffix == ".html" and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site, pages):
    loads = {load for page in pages.values() for load in page.loads}
    loads |= {url for sheet in site.rglob("*.css") for url in re.findall(r"url\(([^)]*)\)", sheet.read_text("utf-8"))}
    assert loads
    assert not [load for load in loads if re.match(r"['\"]?(https?:)?//", load)]


def test_documents_outside_the_folder_are_pages_and_their_links_are_turned(site, pages):
    home = pages[site / "index.html"]
    assert "training-file.html#from-pytorch" in home.links
    assert {"numbers.html", "contributing.html", "decisions.html"} <= set(home.links)
    assert (site / "changelog.html").exists()
    assert "papers.html#tsai21" in pages[site / "numbers.html"].links


def test_the_reference_has_the_functions_and_what_they_return(site):
    functions = (site / "reference" / "functions.html").read_text(encoding="utf-8")
    for name in ("rewrite", "compile", "verify", "SGD"):
        assert re.search(rf'id="bnfuse\.[\w.]*\b{name}"', functions), name
    assert 'id="bnfuse.runtime.session.Step"' in (site / "reference" / "results.html").read_text(encoding="utf-8")


def test_a_dead_link_and_a_dead_anchor_fail_the_build(tmp_path):
    for entry in ROOT.iterdir():
        if entry.name != "docs" and not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("reference"))  # half of the time
    dead = ("nothing.md", "../benchmarks/nothing.py", "cli.md#nothing")
    with (tmp_path / "docs" / "glossary.md").open("a", encoding="utf-8") as file:
        file.writelines(f"\n[dead]({link}) [alive](cli.md#json)\n" for link in dead)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    warned = [line for line in done.stderr.splitlines() if "glossary.md" in line]
    assert [link for link in dead if any(link in line for line in warned)] == list(dead)
    assert len(warned) == len(dead)


def test_links_and_blank_lines_of_a_page():
    hooks = load(ROOT / "docs" / "site" / "hooks.py")
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="index.md"))
    text = "see:\n- one\n- two\n\n```\na:\n- b\n```\n[x](LICENSE), [y](CHANGELOG.md)\n| `a\\|b` | c\\|d | 1 s |"
    wanted = "see:\n\n- one\n- two\n\n```\na:\n- b\n```\nx, [y](changelog.md)\n\n| `a|b` | c\\|d | 1\u00a0s |"
    assert hooks.on_page_markdown(text, page) == wanted
    assert hooks.address("../../benchmarks/RESULTS.md#a", "docs/tutorials/a.md", "tutorials/a.md") == "../numbers.md#a"


def test_columns_of_a_docstring_stay_columns():
    laid_out = load(ROOT / "docs" / "site" / "docstrings.py").laid_out
    assert (
        laid_out("Runs.\n\na    one\nlong two\nlong  three") == "Runs.\n\n    a    one\n    long two\n    long  three"
    )
    assert laid_out("One.  Two of it\nand three.") == "One.  Two of it\nand three."


@pytest.mark.browser
def test_pages_fit_a_narrow_window_and_ask_for_nothing(site, browser):
    tab = browser.new_page(viewport={"width": 400, "height": 800})
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    wide = []
    for path in sorted(site.rglob("*.html")):
        tab.goto(path.as_uri(), wait_until="domcontentloaded")
        if tab.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            wide.append(path.name)
    tab.close()
    assert not wide
    assert asked and not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
