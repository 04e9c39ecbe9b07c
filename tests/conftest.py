"""Fixtures of all tests: golden texts, the float64 yardstick, honest handling of tests that need what is not here."""

from __future__ import annotations

import collections
import functools
import gc
import importlib.util
import os
import re
import shutil
import sys
import types
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tvm_ffi  # noqa: F401 - its handler of crashes writes where pytest captures; pytest's own comes after it and is heard
from slowest_first import SlowestFirst
from source_files import load

from bnfuse.core.errors import BnfuseError
from bnfuse.ort.library import training_library
from bnfuse.runtime.codegen import build

HERE = Path(__file__).resolve().parent
EMULATION_TOOLS = ("aarch64-linux-gnu-gcc", "aarch64-linux-gnu-objcopy", "qemu-aarch64")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
TRACED = 2  # cases of a test that coverage is measured in: further ones run the same lines, and tracing takes time
DESELECTED = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden texts instead of comparing")
    parser.addoption("--update-slowest", action="store_true", help="rewrite tests/slowest_first.txt from this run")


def chromium() -> str | None:
    """The browser that tests of pages run in."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


@functools.cache
def builds_gradients() -> bool:
    """Whether the installed onnxruntime is the one that trains."""
    try:
        training_library("this")
    except BnfuseError:
        return False
    return True


@functools.cache
def imports_torchvision() -> bool:
    """Whether torchvision is there, and for the torch that is there."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def needs(config: pytest.Config, marked: Collection[str] = ()) -> dict[str, tuple[bool, str]]:
    """By marker: whether its tests run, and what to say where they do not. What takes long to find out is asked for the
    markers that there are alone."""
    tools = all(shutil.which(tool) for tool in EMULATION_TOOLS)
    asked = "emulation" in str(config.getoption("markexpr"))
    return {
        "mpi": (
            importlib.util.find_spec("mpi4py") is not None and (Path(sys.executable).parent / "mpirun").exists(),
            "start ranks under mpirun, which is not installed (pip install '.[mpi]')",
        ),
        "torch": (
            importlib.util.find_spec("torch") is not None,
            "need torch, which is not installed (pip install torch)",
        ),
        "exporter": (
            importlib.util.find_spec("onnxscript") is not None,
            "need onnxscript, which the exporter of torch needs and which is not installed (pip install onnxscript)",
        ),
        "accelerate": (
            importlib.util.find_spec("accelerate") is not None,
            "need accelerate, which is not installed (pip install accelerate)",
        ),
        "lightning": (
            importlib.util.find_spec("pytorch_lightning") is not None,
            "need pytorch-lightning, which is not installed (pip install pytorch-lightning)",
        ),
        "timm": (
            importlib.util.find_spec("timm") is not None,
            "compare with timm, which is not installed (pip install timm)",
        ),
        "tensorboard": (
            importlib.util.find_spec("tensorboardX") is not None,
            "write for TensorBoard, which needs tensorboardX (pip install '.[tensorboard]')",
        ),
        "torchvision": (
            "torchvision" not in marked or imports_torchvision(),
            "need torchvision, which is not installed, or not for this torch (pip install torchvision)",
        ),
        "datasets": (
            importlib.util.find_spec("datasets") is not None,
            "need Hugging Face's datasets, which is not installed (pip install '.[hf]')",
        ),
        "ort_training": (
            builds_gradients(),
            "need onnxruntime-training-cpu, which is not installed and has no wheels for Python 3.13 (docs/install.md)",
        ),
        "emulation": (
            tools and asked,
            "run Arm code under emulation for minutes (pytest -m emulation)"
            if tools
            else "need an Arm cross compiler and an emulator, which are not installed (docs/runtime.md)",
        ),
        "browser": (
            importlib.util.find_spec("playwright") is not None and chromium() is not None,
            "open pages in Chromium through playwright, which are not installed (docs/diff.md)",
        ),
        "docs": (
            all(
                importlib.util.find_spec(name) is not None
                for name in ("mkdocs", "material", "mkdocstrings", "onnxscript")
            ),
            "build the site of the documentation or follow it, whose tools are not installed (pip install '.[docs]')",
        ),
    }


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests run where what their marker names is there; elsewhere they are deselected, and the summary counts them."""
    counts = config.stash.setdefault(DESELECTED, {})
    marked = {marker.name for item in items for marker in item.iter_markers()}
    for marker, (runs, _) in needs(config, marked).items():
        out = [] if runs else [item for item in items if item.get_closest_marker(marker)]
        if out:
            items[:] = [item for item in items if item not in out]
            config.hook.pytest_deselected(items=out)
        counts[marker] = len(out)
    if config.pluginmanager.hasplugin("_cov"):
        leave_repeats_untraced(items)


def leave_repeats_untraced(items: list[pytest.Item]) -> None:
    """Mark what pytest-cov shall not follow: the cases of a test after the first ones."""
    cases: dict[str, int] = collections.Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        if cases[test] > TRACED:
            item.add_marker("no_cover")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells what it left out: the process that reports collects nothing itself."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = session.config.stash.get(DESELECTED, {})


class Workers:
    """What the workers of pytest-xdist left out; each collects all tests."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if hasattr(node, "workeroutput"):  # it did not crash
            node.config.stash[DESELECTED] = node.workeroutput["deselected"]


def pytest_configure(config: pytest.Config) -> None:
    """Kernels of tests are kept in a folder that the workers share and later runs find, which is not the user's own."""
    os.environ.setdefault("BNFUSE_CACHE", str(config.rootpath / ".pytest_cache" / "kernels"))
    os.environ.setdefault("BNFUSE_LLVM_LEVEL", "0")  # half of the time; see `optimized`
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads would spin where other workers compute
    config.pluginmanager.register(Workers())
    config.pluginmanager.register(SlowestFirst())
    config.option.loadscopereorder = False  # of pytest-xdist: it would begin with the files of the most tests
    gc.set_threshold(50_000, 20, 20)  # else the objects of all modules are walked again and again: a sixth of the time
    if sys.version_info < (3, 12):  # which keeps the members of a protocol: onnx_ir asks what is an instance of one
        typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """What was imported stays, so that nothing need look whether it is garbage."""
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = functools.cache(gc.get_freeze_count)  # which walks over all of them: 95 ms a rewrite


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for marker, count in config.stash.get(DESELECTED, {}).items():
        if count:
            terminalreporter.write_line(f"{count} tests did not run: they {needs(config)[marker][1]}")


class Golden:
    """Texts kept in `golden/` beside the test that owns them."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        name = re.sub(r"[^\w.-]+", "_", f"{request.path.stem}.{request.node.name}").rstrip("_")
        self.base = request.path.parent / "golden" / name
        self.update = request.config.getoption("--update-golden")
        self.count = 0

    def check(self, model: ir.Model | onnx.ModelProto) -> None:
        """The graph as text equals the stored one."""
        self.check_text(graph_text(model))

    def check_text(self, text: str) -> None:
        self.count += 1
        path = self.base.with_name(self.base.name + ("" if self.count == 1 else f".{self.count}") + ".txt")
        if self.update:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} does not exist: run pytest --update-golden, and read what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"differs from {path} (pytest --update-golden rewrites it)"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request)


def graph_text(model: ir.Model | onnx.ModelProto) -> str:
    """Inputs, outputs and nodes in ONNX's text syntax; of values only those of small constants."""
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    bare = onnx.GraphProto()
    bare.CopyFrom(proto.graph)
    inputs = {value.name for value in bare.input}
    small = [t for t in bare.initializer if t.name not in inputs and np.prod(t.dims) <= 16]
    del bare.initializer[:], bare.value_info[:], bare.metadata_props[:]
    bare.initializer.extend(small)
    lines = [onnx.printer.to_text(bare)]
    for node in bare.node:
        props = {p.key: p.value for p in node.metadata_props}
        if "bnfuse.sources" in props:
            lines.append(f"// {node.name}: {props.get('bnfuse.pass')} from {props['bnfuse.sources']}")
    functions = sorted(f"{f.domain}.{f.name}" for f in proto.functions)
    lines += [f"// function {name}" for name in functions]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n"


@pytest.fixture(scope="session", autouse=True)
def compiles_alone() -> None:
    """No process helps to compile: it would take longer to start than kernels of level 0 take, on a processor that
    another worker of pytest has."""
    build.KERNELS_PER_WORKER = 1000


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for CPUs as users get them: what LLVM makes of aliases and of what is never read shows in these alone."""
    monkeypatch.setenv("BNFUSE_LLVM_LEVEL", "3")


@pytest.fixture
def optimized_by_turns(request: pytest.FixtureRequest) -> None:
    """Tests without parameters (all of hypothesis) with such kernels, and of others every eighth case, the first among
    them: all would take four times as long."""
    case = getattr(request.node, "callspec", None)
    if case is None or sum(case.indices.values()) % 8 == 0:
        request.getfixturevalue("optimized")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window (tests that use it are marked `browser`)."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def oracle() -> types.ModuleType:
    """tests/oracle.py: training graphs evaluated with torch (tests that use it are marked `torch`)."""
    return load(HERE / "oracle.py")
