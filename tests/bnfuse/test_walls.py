"""The walls between the packages, kept by looking at what is really imported."""

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import bnfuse

PACKAGE = Path(bnfuse.__file__).resolve().parent

IMPORT_ALL = """
import importlib, pkgutil, sys
import bnfuse
skip = {skip!r}
for module in pkgutil.walk_packages(bnfuse.__path__, "bnfuse."):
    if not module.name.startswith(skip) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print("\\n".join(sorted(sys.modules)))
"""
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


@functools.cache
def modules_after(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def sources():
    """All files of the package; in a checkout some folders are links."""
    walk = os.walk(PACKAGE, followlinks=True)
    return [Path(folder) / name for folder, _, names in walk for name in names if name.endswith(".py")]


def imports_of(path: Path) -> set[str]:
    """Names of all modules imported anywhere in a file, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_only_a_called_baseline_a_world_of_gloo_and_the_door_for_torch_import_torch():
    """All other modules import where torch cannot be, and none but the runtime's pull it in (tvm_ffi does where it
    is)."""
    loaded = modules_after(WITHOUT_TORCH + IMPORT_ALL.format(skip=("bnfuse.torch.",)))
    assert {"bnfuse.runtime.session", "bnfuse.torch"} <= loaded  # the walk did reach the subpackages
    assert "torch" not in modules_after(IMPORT_ALL.format(skip=("bnfuse.runtime", "bnfuse.torch.")))
    importers = [path for path in sources() if "torch" in {name.split(".")[0] for name in imports_of(path)}]
    assert {path.relative_to(PACKAGE).parts[0] for path in importers} == {"baselines", "fromtorch", "parallel", "torch"}


def test_nothing_but_the_runtime_imports_tvm():
    loaded = modules_after(IMPORT_ALL.format(skip=("bnfuse.runtime", "bnfuse.torch.")))
    assert "bnfuse.verifying.verification" in loaded
    assert not {"tvm", "tvm_ffi"} & loaded
    others = [path for path in sources() if "runtime" not in path.relative_to(PACKAGE).parts]
    assert others
    assert not any({"tvm", "tvm_ffi"} & {name.split(".")[0] for name in imports_of(path)} for path in others)


def test_the_passes_know_no_runtime_and_the_runtime_no_passes():
    for folder, forbidden in (("passes", "bnfuse.runtime"), ("runtime", "bnfuse.passes")):
        files = [path for path in sources() if path.relative_to(PACKAGE).parts[0] == folder]
        assert files
        for path in files:
            assert not any(name.startswith(forbidden) for name in imports_of(path)), path


def test_the_folders_at_the_top_are_no_modules_of_their_own():
    loaded = modules_after(WITHOUT_TORCH + IMPORT_ALL.format(skip=("bnfuse.torch.",)))
    assert not {"passes", "runtime", "models"} & loaded
    assert "passes" not in sys.modules


def test_importing_bnfuse_loads_nothing_heavy():
    loaded = modules_after("import bnfuse, sys; print('\\n'.join(sys.modules))")
    assert not {"onnx", "onnxruntime", "tvm", "numpy", "torch", "typer"} & loaded


def test_an_optimiser_can_be_written_down_without_tvm():
    loaded = modules_after("import bnfuse, sys; bnfuse.SGD(lr=0.1); print('\\n'.join(sys.modules))")
    assert "tvm" not in loaded


def test_every_public_name_is_there_and_documented():
    for name in bnfuse.__all__:
        value = getattr(bnfuse, name)
        assert name == "__version__" or value.__doc__, name
    assert set(bnfuse.__all__) <= set(dir(bnfuse))


def test_the_text_of_the_package_speaks_of_the_package_alone():
    """No paths of anyone's machine in what is shipped."""
    top = Path(__file__).resolve().parents[2]
    files = [*sources(), *top.glob("*.md"), *(top / "docs").glob("*.md")]
    assert not [path for path in files if f"{top}/" in path.read_text() or f"{Path.home()}/" in path.read_text()]
