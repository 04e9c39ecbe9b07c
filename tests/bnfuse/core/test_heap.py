"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

MIB = 1 << 20
CODE = """
import pathlib
from bnfuse.core.heap import release_heap

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

large = bytearray(31 << 20)  # glibc keeps more from now on
del large
blocks = [bytearray(1 << 20) for _ in range(48)]
top = blocks.pop()  # the heap cannot shrink below it
before = resident()
del blocks
kept = resident()
release_heap()
print(before - kept, before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="a C library that has no malloc_trim")
def test_the_heap_is_released() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    kept, released = map(int, done.stdout.split())
    assert kept < 8 * MIB and released > 40 * MIB
