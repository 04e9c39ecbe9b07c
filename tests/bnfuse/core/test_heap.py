"""Garbage is looked for among what is new, and freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import pytest

from bnfuse.core.heap import young_garbage

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


@pytest.fixture
def thawed(monkeypatch):
    """Nothing is frozen, as where no test runs (conftest.py), and what is frozen is counted anew."""
    monkeypatch.setattr(gc, "get_freeze_count", getattr(gc.get_freeze_count, "__wrapped__", gc.get_freeze_count))
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def test_what_is_there_is_not_looked_through_within_the_block(thawed):
    """Not twice at a time, and not where the caller has frozen something."""
    with young_garbage():
        assert gc.get_freeze_count()
        with young_garbage():
            pass
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
    gc.freeze()
    try:
        with young_garbage():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_garbage_of_the_block_is_found(thawed):
    found = []

    class Circle:
        def __init__(self) -> None:
            self.self = self

        def __del__(self) -> None:
            found.append(True)

    with young_garbage():
        Circle()
        gc.collect()
        assert found
