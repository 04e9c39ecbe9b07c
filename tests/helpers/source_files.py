"""Modules that are in no package, by their files: tests beside a test, the benchmarks."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys
import types


@functools.cache
def load(path: pathlib.Path) -> types.ModuleType:
    """The module of a file, under a name that no other has."""
    spec = importlib.util.spec_from_file_location(f"bnfuse_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module
