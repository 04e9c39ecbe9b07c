"""The C interface of onnxruntime-training-cpu, or one line that says what is wrong with the install.

onnxruntime and onnxruntime-training-cpu unpack into the same folder: installed one after the other, the later one
overwrites the native library while pip believes in both. So what counts is what the library can do, not what pip lists.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from bnfuse.core.errors import BnfuseError

PACKAGE = "onnxruntime-training-cpu==1.19.2"
NEEDED = ("GradientGraphBuilder", "get_optimized_model", "register_gradient_definition", "load_checkpoint")
SILENT = 4  # onnxruntime's log level at which only fatal errors are printed; failures are raised anyway
RIVALS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "ort-nightly")


def training_library() -> ModuleType:
    """Import `onnxruntime.capi._pybind_state` with the training functions in it."""
    try:
        onnxruntime()
        library = importlib.import_module("onnxruntime.capi._pybind_state")
    except Exception as error:
        raise BnfuseError(f"onnxruntime does not load ({_one_line(error)}). {_remedy(_installed_rivals())}") from None
    missing = [name for name in NEEDED if not hasattr(library, name)]
    if missing:
        raise BnfuseError(f"the installed onnxruntime cannot build gradients. {_remedy(_installed_rivals())}")
    return library


def onnxruntime() -> ModuleType:
    """Give the package, imported without torch.

    Its training build imports torch where there is one, seconds and 200 MB for nothing that is used here; while it is
    imported, torch is not to be found.
    """
    hide = "torch" not in sys.modules and "onnxruntime" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("onnxruntime")
    finally:
        if hide:
            del sys.modules["torch"]


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


def _installed_rivals() -> list[str]:
    found = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions() if dist.metadata["Name"]}
    return [name for name in RIVALS if name in found]


def _remedy(rivals: list[str]) -> str:
    if not rivals:
        return f"Install it: pip install --force-reinstall {PACKAGE}"
    names = " ".join(rivals)
    return (
        f"{names} shares its folder with {PACKAGE.split('=')[0]}: "
        f"pip uninstall -y {names} && pip install --force-reinstall --no-deps {PACKAGE}"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
