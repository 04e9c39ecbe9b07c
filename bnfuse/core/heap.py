"""What Python and the C library keep of memory: how often it is looked through, and when it goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def young_garbage() -> Iterator[None]:
    """Look for garbage among what is made within the block alone.

    Lowering and rewriting make hundreds of thousands of objects that stay. Each time that they are a quarter more,
    Python looks through all that there are, graphs and modules too: a third of the time of compiling from the cache.
    Does nothing where something is frozen already, which is the caller's, or an outer block's.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release_heap() -> None:
    """Give the free pages of the heap back to the system.

    glibc keeps freed memory of up to 64 MiB once large blocks came and went: as much as the parameters of a network
    that were read from a file. Other C libraries have no such call, and keep less.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
