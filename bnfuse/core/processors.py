"""The processors that this process may use: how many, and how many threads are worth having on them."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import pathlib
from collections.abc import Iterator

from bnfuse.core.errors import BnfuseError

MAX_THREADS = 1024

CGROUPS = pathlib.Path("/sys/fs/cgroup")
OWN_CGROUPS = pathlib.Path("/proc/self/cgroup")


def physical_cores() -> int:
    """Count the cores that this process may use, two hardware threads of one core once."""
    return max(1, min(len({_siblings(cpu) for cpu in _allowed()}), usable_cpus()))


def usable_cpus() -> int:
    """Count the processors that the affinity mask allows (taskset), or fewer where a cgroup's quota grants less time
    (docker --cpus): more threads than these take turns."""
    return max(1, min([len(_allowed()), *(math.ceil(quota) for quota in quotas())]))


def bounded_threads(threads: int | None) -> int | None:
    """Bound a number of threads by the processors that this machine has for us; what is lowered is logged once."""
    if threads is None:
        return None
    check_threads(threads)
    usable = usable_cpus()
    if threads > usable:
        _tell(threads, usable)
    return min(threads, usable)


@functools.cache
def _tell(threads: int, usable: int) -> None:
    """One line on stderr, unless the host process has its own logging."""
    logging.getLogger("bnfuse").warning(
        "bnfuse: %d threads are more than the processors that this process may use: taking %d", threads, usable
    )


def check_threads(threads: int) -> None:
    """Refuse a number of threads that no machine could be meant by."""
    if not 1 <= threads <= MAX_THREADS:
        raise BnfuseError(
            f"{threads} threads make no step: use 1 to {MAX_THREADS}, or leave it out for one a physical core"
        )


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> str:
    path = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def quotas() -> Iterator[float]:
    """List the processors' worth of time that this process's cgroups grant, those of both versions and their
    parents."""
    for folder in cgroups():
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                yield int(quota) / int(period)
        with contextlib.suppress(OSError, ValueError):
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                yield int(quota) / int(period)


def cgroups() -> Iterator[pathlib.Path]:
    """Folders that may hold a quota: of version 2, and of version 1's controller `cpu`; within a container the path
    that the kernel names is not there, and the root is the container's own."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUPS / controllers if controllers else CGROUPS
        place = root / own.strip("/")
        yield from (folder for folder in (place, *place.parents) if folder.is_relative_to(root))
