"""How much memory this process may take yet."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

from bnfuse.core import processors

MEMORY = pathlib.Path("/proc/meminfo")


def free_memory() -> int | None:
    """Count the bytes that the system says are available, or fewer where a cgroup's limit leaves less (docker
    --memory); None where it says nothing."""
    return min([*available(), *left_by_limits()], default=None)


def available() -> Iterator[int]:
    """Give what the system says."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10


def left_by_limits() -> Iterator[int]:
    """Give what the limits of this process's cgroups, of version 2, and their parents leave. Pages of files that lie in
    memory unused count as free."""
    for folder in processors.cgroups():
        with contextlib.suppress(OSError, ValueError):
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                used = int((folder / "memory.current").read_text())
                lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                unused = sum(int(count) for name, count in lines if name == "inactive_file")
                yield max(0, int(limit) - used + unused)
