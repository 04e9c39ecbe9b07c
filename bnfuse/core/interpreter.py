"""Fresh interpreters that import this very bnfuse: for compiling beside each other, and for measuring apart."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1


def import_root() -> Path:
    """Give the folder to start them in, with `python -m`."""
    return Path(__file__).resolve().parents[2]


def end_with_parent(parent: int) -> None:
    """Have Linux end the child with the thread that started it, whatever ends that: in the child, first of all.

    `parent` is who started it: where that is gone already, the child ends now.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
