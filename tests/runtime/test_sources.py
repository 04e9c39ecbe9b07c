"""What a kernel's key in the cache knows of the sources that make it."""

from __future__ import annotations

import ast
import pathlib
import shutil
import time

import pytest

import bnfuse
from bnfuse.runtime.codegen.sources import OWN, Sources
from bnfuse.runtime.kernels.registry import KERNELS

ROOT = pathlib.Path(bnfuse.__file__).resolve().parent
RBN = ("cpu", "norm_baseline")  # of rewrite --sample rbn: takes a constant from the numpy reference


@pytest.fixture
def copied(tmp_path) -> pathlib.Path:
    """The package's kernels and what they import, in another place."""
    for module in OWN.closure([*OWN._modules(f"{KERNELS}.cpu"), *OWN._modules(f"{KERNELS}.cuda")]):
        path = OWN._path(module)
        assert path is not None
        place = tmp_path / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    return tmp_path


def change(root: pathlib.Path, module: str, old: str = "", new: str = "\n# changed\n") -> None:
    path = Sources(root)._path(module)
    assert path is not None
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1) if old else text + new)


def test_every_module_that_a_generator_imports_is_part_of_its_hash(copied):
    for kernels in (RBN, ("cpu", "conv_backward"), ("cuda", "conv_forward")):
        before = Sources(copied).hash(*kernels)
        for module in OWN.closure([".".join((KERNELS, *kernels))]):
            change(copied, module)
            after = Sources(copied).hash(*kernels)
            assert after != before, (kernels, module)
            before = after


def test_a_constant_of_a_reference_changes_the_keys_of_the_kernels_that_use_it(copied):
    before = [Sources(copied).hash(*kernels) for kernels in (RBN, ("cpu", "conv_forward"))]
    change(copied, "bnfuse.opset.reference_sampling", "def range_factor", "SCALE = 3\n\n\ndef range_factor")
    after = [Sources(copied).hash(*kernels) for kernels in (RBN, ("cpu", "conv_forward"))]
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_the_order_of_operands_is_part_of_all_that_parse_operators(copied):
    of_cpu, of_gpu = ("pointwise", "conv_backward"), ("pointwise", "conv_forward")
    names = (RBN, *(("cpu", name) for name in of_cpu), *(("cuda", name) for name in of_gpu))
    before = [Sources(copied).hash(*name) for name in names]
    change(copied, "bnfuse.opset.spec")
    assert all(Sources(copied).hash(*name) != old for name, old in zip(names, before, strict=True))


def test_a_comment_in_one_kernel_leaves_the_others_compiled(copied):
    names = (("cpu", "pointwise"), ("cpu", "conv_forward"), ("cuda", "pointwise"), ("cuda", "dense"))
    before = [Sources(copied).hash(*name) for name in names]
    change(copied, f"{KERNELS}.cpu.loss")
    change(copied, f"{KERNELS}.cuda.weights")
    assert [Sources(copied).hash(*name) for name in names] == before


def test_a_new_version_of_the_package_is_part_of_every_hash(monkeypatch):
    before = Sources(ROOT).hash("cpu", "pointwise")
    monkeypatch.setattr("bnfuse.core.version.__version__", "9.9")
    assert Sources(ROOT).hash("cpu", "pointwise") != before


def test_imports_are_read_as_python_reads_them():
    """All that makes kernels, against their syntax trees."""
    for module in OWN.closure([*OWN._modules(f"{KERNELS}.cpu"), *OWN._modules(f"{KERNELS}.cuda")]):
        path = OWN._path(module)
        assert path is not None
        text = path.read_text()
        assert OWN.imports(text) == imported(ast.parse(text)), path


def imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            source = node.module or ""
            if source.split(".")[0] == "bnfuse":
                modules = [f"{source}.{alias.name}" for alias in node.names]
                found |= {module if OWN._path(module) else source for module in modules}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "bnfuse"}
        found |= imported(node)
    return found


def test_reading_the_sources_of_all_kernels_of_a_cpu_takes_no_time():
    best = 1.0
    for _ in range(5):
        start, sources = time.process_time(), Sources(ROOT)
        for module in sources._modules(f"{KERNELS}.cpu"):
            sources.hash("cpu", module.rpartition(".")[2])
        best = min(best, time.process_time() - start)
    assert best < 0.1  # seconds; 0.01 on an idle machine
