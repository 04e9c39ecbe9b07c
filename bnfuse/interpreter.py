"""Fresh interpreters that import this very bnfuse: for compiling beside each other, and for measuring apart."""

from __future__ import annotations

from pathlib import Path


def import_root() -> Path:
    """The folder to start them in, with `python -m`."""
    import bnfuse

    return Path(bnfuse.__file__).resolve().parent.parent
