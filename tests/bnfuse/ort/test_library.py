"""Which onnxruntime is there, what it can do, and the line that says what is wrong with it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import types

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.measuring.machine import versions
from bnfuse.ort import library

PLAIN, TRAINING = library.REQUIRED[library.PLAIN], library.REQUIRED[library.TRAINING]
BOTH = {library.PLAIN: "1.32.0", library.TRAINING: "1.19.2"}


def package(*functions: str) -> tuple[types.ModuleType, types.ModuleType]:
    """An onnxruntime that runs files, and its C interface with these functions."""
    module, interface = types.ModuleType("onnxruntime"), types.ModuleType("onnxruntime.capi._pybind_state")
    module.InferenceSession = object  # type: ignore[attr-defined]
    for name in functions:
        setattr(interface, name, object)
    return module, interface


@pytest.fixture
def there(monkeypatch):
    """Let this be what is found: a module, or None for one that does not load; what pip lists; whether the training
    build has wheels here."""

    def put(
        found: tuple[types.ModuleType | None, types.ModuleType | None], listed: dict[str, str], wheels: bool
    ) -> None:
        monkeypatch.setitem(sys.modules, "onnxruntime", found[0])
        monkeypatch.setitem(sys.modules, "onnxruntime.capi._pybind_state", found[1])
        monkeypatch.setattr(library, "installed", lambda: listed)
        monkeypatch.setattr(library, "training_has_wheels", lambda: wheels)

    return put


def message(function, *arguments: str) -> str:
    with pytest.raises(BnfuseError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("listed", [{}, BOTH])
def test_what_the_library_can_do_counts_and_not_what_pip_lists(listed, there):
    trains, plain = package(*library.NEEDED), package()
    there(trains, listed, False)
    assert library.onnxruntime() is trains[0] and library.training_library("this") is trains[1]
    there(plain, listed, True)
    assert library.onnxruntime() is plain[0]


@pytest.mark.parametrize("wheels, wanted", [(True, TRAINING), (False, PLAIN)])
@pytest.mark.parametrize("left", [None, types.ModuleType("onnxruntime")])
def test_where_there_is_none_the_line_says_which_to_install(left, wheels, wanted, there):
    there((left, None), {}, wheels)
    expected = f"onnxruntime is not installed. Install it: pip install '{wanted}'"
    assert message(library.onnxruntime) == message(library.training_library, "this") == expected


def test_one_that_does_not_load_is_installed_anew(there):
    there((None, None), {"onnxruntime-gpu": "1.30.0"}, True)
    text = message(library.onnxruntime)
    assert text.startswith("onnxruntime does not load (")
    assert text.endswith("Install it: pip uninstall -y onnxruntime-gpu && pip install 'onnxruntime-gpu'")


@pytest.mark.parametrize("wheels, wanted", [(True, TRAINING), (False, PLAIN)])
def test_of_two_that_share_a_folder_one_is_named_to_keep(wheels, wanted, there):
    remedy = (
        "onnxruntime and onnxruntime-training-cpu share a folder: "
        f"pip uninstall -y onnxruntime onnxruntime-training-cpu && pip install '{wanted}'"
    )
    there((types.ModuleType("onnxruntime"), None), BOTH, wheels)
    text = message(library.onnxruntime)
    assert text == f"onnxruntime lacks files, as where one of two packages of it was removed. {remedy}"
    there((None, None), BOTH, wheels)
    assert message(library.onnxruntime).endswith(f"). {remedy}")


def test_gradients_and_checkpoints_say_which_package_they_need(there):
    there(package("load_checkpoint"), {library.PLAIN: "1.32.0"}, True)
    assert message(library.training_library, "reading it") == (
        f"reading it needs {TRAINING}, and another onnxruntime is in its place. "
        f"Install it: pip uninstall -y onnxruntime && pip install '{TRAINING}'"
    )
    there(package(), BOTH, True)
    assert "onnxruntime and onnxruntime-training-cpu share a folder: pip uninstall" in message(
        library.training_library, "this"
    )


def test_where_the_package_has_no_wheels_the_line_says_so(there):
    there(package(), {library.PLAIN: "1.32.0"}, False)
    text = message(library.training_library, "reading it")
    assert text.startswith(f"reading it needs {TRAINING}, which has wheels for Python 3.10 to 3.12 on x86-64 and macOS")
    assert text.endswith(f"; this is {platform.python_version()} on {platform.machine()}")


def test_a_process_without_onnxruntime_says_so_once_it_is_asked(tmp_path):
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('libc is too old')")
    code = """
import onnx.helper as h, onnx_ir as ir
from bnfuse.core.errors import BnfuseError
from bnfuse.ort.oracle import OrtGraph
x, y = (h.make_tensor_value_info(name, 1, [2]) for name in "xy")
model = ir.from_proto(h.make_model(h.make_graph([h.make_node("Relu", ["x"], ["y"])], "g", [x], [y])))
try:
    OrtGraph(model, name="g.onnx")
except BnfuseError as error:
    print(error)
"""
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("onnxruntime does not load (libc is too old). Install it: pip"), done.stderr


def test_a_benchmark_tells_the_version_whichever_it_is(monkeypatch):
    assert versions()["onnxruntime"] == " or ".join(library.installed().values())
    monkeypatch.setattr(library.importlib.metadata, "version", lambda name: BOTH.get(name, "1"))
    assert versions()["onnxruntime"].startswith("1.32.0 or 1.19.2")
