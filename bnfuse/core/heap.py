"""What the C library keeps of memory that was given back to it."""

from __future__ import annotations

import ctypes


def release_heap() -> None:
    """Give the free pages of the heap back to the system.

    glibc keeps freed memory of up to 64 MiB once large blocks came and went: as much as the parameters of a network
    that were read from a file. Other C libraries have no such call, and keep less.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
