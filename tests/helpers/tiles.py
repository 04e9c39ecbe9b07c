"""AMX emulated: kernels call functions of tests/emulation/amx.c where they have its instructions."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from halves import HALVES
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.backends.cpu import permission
from bnfuse.runtime.kernels.cpu import amx

SOURCE = pathlib.Path(__file__).resolve().parents[1] / "emulation" / "amx.c"
TARGET = dataclasses.replace(HALVES, amx=True)
NEEDS = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("cc") is None or HALVES.lanes < 8,
    reason="AMX is emulated on x86-64 with AVX2, by a C compiler",
)


@functools.cache
def emulator() -> ctypes.CDLL:
    """The emulator in this process, where code that is loaded later finds its functions."""
    with tempfile.TemporaryDirectory(prefix="bnfuse-amx-") as folder:
        library = pathlib.Path(folder) / "amx.so"
        command = ["cc", "-O3", "-mavx2", "-mfma", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
        subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def emulate(patch: pytest.MonkeyPatch) -> None:
    """Let kernels that are built from now on call the emulator."""
    emulator()
    patch.setattr(amx, "instruction", lambda name, *operands: T.evaluate(call(name, *operands)))
    patch.setattr(permission, "is_granted", lambda: True)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test's kernels call the emulator, and see that they do."""
    emulate(monkeypatch)
    emulator().amx_products()
    yield
    assert emulator().amx_products(), "no tile was multiplied"


def call(name: str, *operands: Any) -> Any:
    return tirx.call_extern("void", f"amx_{name}", *operands)
