"""What is installed where: pyproject.toml, the package's own messages and the documents say the same."""

from __future__ import annotations

import ast
import platform
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bnfuse.ort import library

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ORT = [line for line in map(Requirement, PROJECT["dependencies"]) if line.name.startswith("onnxruntime")]
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
MACHINES = {"x86_64": "linux", "aarch64": "linux", "arm64": "darwin", "AMD64": "win32", "ARM64": "win32"}


def tried() -> list[str]:
    """The Pythons that nox tries."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERSIONS"
    ]
    return ast.literal_eval(lists[0])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("minor", [10, 11, 12, 13, 14])
def test_every_python_has_one_onnxruntime_and_messages_name_it(minor, machine, monkeypatch):
    where = {"python_version": f"3.{minor}", "platform_machine": machine, "sys_platform": MACHINES[machine]}
    wanted = [line for line in ORT if line.marker is not None and line.marker.evaluate(where)]
    monkeypatch.setattr(sys, "version_info", (3, minor, 0))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(library, "installed", dict)
    assert [line.name for line in wanted] == [library.TRAINING if library.training_has_wheels() else library.PLAIN]
    required = Requirement(library.REQUIRED[wanted[0].name])
    assert (required.name, required.specifier) == (wanted[0].name, wanted[0].specifier)
    assert f"pip install '{library.REQUIRED[wanted[0].name]}'" in library._remedy()


def test_documents_name_the_pythons_of_the_project():
    least = PROJECT["requires-python"].removeprefix(">=")
    versions = tried()
    assert least == versions[0]
    (set_up,) = re.findall(
        r"^Python (\S+) or newer on Linux", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set_up == least
    assert f"the tests run on Python {versions[0]} to {versions[-1]}" in " ".join(INSTALL.split())


def test_the_page_about_installing_has_every_extra_and_both_packages():
    rows = re.findall(r"^\| `(\w+)` \|", INSTALL, re.MULTILINE)
    assert set(rows) == set(PROJECT["optional-dependencies"])
    for line in library.REQUIRED.values():
        assert f"`{line}`" in INSTALL
