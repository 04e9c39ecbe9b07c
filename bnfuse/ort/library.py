"""The installed onnxruntime, which runs files, and the C interface of its training build, where it is that one.

Two packages bring a module of that name, and several more do for other devices. They unpack into the same folder: the
one that was installed last is the one that runs, while pip believes in all of them, and removing one takes files of the
others along. So what counts is what the library can do, not what pip lists.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from bnfuse.core.errors import BnfuseError

PLAIN = "onnxruntime"
TRAINING = "onnxruntime-training-cpu"
REQUIRED = {PLAIN: "onnxruntime>=1.20,<2", TRAINING: "onnxruntime-training-cpu==1.19.2"}  # as in pyproject.toml
OTHERS = ("onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-training", "ort-nightly")
TRAINING_BELOW = (3, 13)  # Python, and the machines that it has wheels for
TRAINING_MACHINES = ("x86_64", "AMD64", "arm64")
NEEDED = ("GradientGraphBuilder", "get_optimized_model", "register_gradient_definition", "load_checkpoint")
SILENT = 4  # onnxruntime's log level at which only fatal errors are printed; failures are raised anyway


def onnxruntime() -> ModuleType:
    """Give the package, whichever it is. Raises BnfuseError where none is installed, or it does not load."""
    try:
        package = _import_without_torch()
    except Exception as error:
        why = "is not installed" if not installed() else f"does not load ({_one_line(error)})"
        raise BnfuseError(f"onnxruntime {why}. {_remedy()}") from None
    if not hasattr(package, "InferenceSession"):  # a folder that is left where one of several packages was removed
        why = "is not installed" if not installed() else "lacks files, as where one of two packages of it was removed"
        raise BnfuseError(f"onnxruntime {why}. {_remedy()}")
    return package


def training_library(what: str) -> ModuleType:
    """Import `onnxruntime.capi._pybind_state` with the training functions in it.

    Raises BnfuseError that says that `what` ("reading a checkpoint") needs them, where they are not there.
    """
    onnxruntime()
    library = importlib.import_module("onnxruntime.capi._pybind_state")
    if all(hasattr(library, name) for name in NEEDED):
        return library
    needs = f"{what} needs {REQUIRED[TRAINING]}"
    if training_has_wheels():
        raise BnfuseError(f"{needs}, and another onnxruntime is in its place. {_remedy(TRAINING)}")
    here = f"{platform.python_version()} on {platform.machine()}"
    raise BnfuseError(f"{needs}, which has wheels for Python 3.10 to 3.12 on x86-64 and macOS; this is {here}")


def training_has_wheels() -> bool:
    """Tell whether there is an onnxruntime-training-cpu for this Python on this machine."""
    return sys.version_info < TRAINING_BELOW and platform.machine() in TRAINING_MACHINES


def installed() -> dict[str, str]:
    """List the packages of onnxruntime that pip knows of, with their versions."""
    found = {}
    for name in (PLAIN, TRAINING, *OTHERS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def open_session(
    ort: ModuleType, model: bytes, *, threads: int | None, optimize: bool, config: Mapping[str, str] | None = None
) -> Any:
    """Give a session of onnxruntime in this very process. `config` has its own session settings, by their keys."""
    options = ort.SessionOptions()
    options.log_severity_level = SILENT
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    if threads:
        options.intra_op_num_threads = threads
    for key, value in (config or {}).items():
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _import_without_torch() -> ModuleType:
    """Import the package. Its training build imports torch where there is one, seconds and 200 MB for nothing that is
    used here; while it is imported, torch is not to be found."""
    hide = "torch" not in sys.modules and "onnxruntime" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("onnxruntime")
    finally:
        if hide:
            del sys.modules["torch"]


def _remedy(wanted: str | None = None) -> str:
    """Give the command after which one package has the folder: `wanted`, the only one that is installed, or the one
    that bnfuse asks for here."""
    found = list(installed())
    if wanted is None:
        default = TRAINING if training_has_wheels() else PLAIN
        wanted = found[0] if len(found) == 1 else default
    install = f"pip install '{REQUIRED.get(wanted, wanted)}'"
    if not found:
        return f"Install it: {install}"
    why = f"{' and '.join(found)} share a folder" if len(found) > 1 else "Install it"
    return f"{why}: pip uninstall -y {' '.join(found)} && {install}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
