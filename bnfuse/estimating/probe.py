"""`--hardware host`: what this machine reaches, measured once and remembered.

    flops            the best matrix product of several libraries          (bnfuse/measuring/limits.py)
    bandwidth        a copy between arrays of 256 MiB, read and written
    cache            the largest working set that a chain of copies still moves faster than that
    cache_bandwidth  of such a chain

The cache is measured, not read from the system: what a processor shares with others, or a hypervisor passes on, is not
this machine's to fill. It is measured as layers use it: each copy of a chain reads what the one before it wrote, and
writes where nothing has been for long (runtime/codegen/limits.py). Copies to and fro between the same two arrays would
find a cache that layers do not: a processor fetches what a layer overwrites, so that its results cost memory their
transfers even where they fit. Where no chain is faster than memory, no cache beyond the smallest working set counts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import write_atomically
from bnfuse.core.processors import bounded_threads, physical_cores
from bnfuse.core.progress import Progress, quiet
from bnfuse.estimating.assumptions import Assumptions
from bnfuse.estimating.hardware import HOST, MIB, Hardware
from bnfuse.measuring import idle, limits
from bnfuse.measuring.machine import cpu_model

if TYPE_CHECKING:
    from bnfuse.measuring.limits import Limits

VERSION = 2  # of what is remembered
LARGEST = 512 * MIB  # working set of the copy that counts as memory's
WORKING_SETS = tuple(MIB << k for k in range(8))  # 1 to 128 MiB
FASTER = 1.5  # than memory: what a chain within a cache has to be; noise reaches 1.35
INSIDE = 8  # the cache's bandwidth is that of working sets down to this part of it
PATIENCE = 5.0  # seconds that an idle machine is waited for
BUSY = 0.1  # cores: what was measured beside others that used more is slow

# What a processor does of its own accord. Lines come when a layer asks for them: nothing is fetched for a later layer,
# and what was written leaves when its place is needed. Computing waits for them: of the shorter of both, computing and
# moving, a plain 1x1 convolution hides at most about a half behind the other (benchmarks/experiments/overlap.py), and a
# fused one, which has more to do with each element, less. Both are added, then. Matrix products are measured with a
# multiply-add as two operations, so layers count it as two.
ASSUMPTIONS = Assumptions(
    mac_operations=2,
    prefetch="none",
    look_ahead=False,
    streams_overlap=False,
    loads_overlap=False,
    leaving_holds_space=False,
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """`by_working_set`: (bytes of both arrays of a copy, bytes/s), from the smallest to the largest, memory's."""

    flops_by: dict[str, float]
    by_working_set: tuple[tuple[int, float], ...]
    others: float | None  # cores that others used just before

    def hardware(self, about: str) -> Hardware:
        """Give the machine as hardware to estimate on, with the cache that working sets show."""
        cache, cache_bandwidth = effective_cache(self.by_working_set)
        memory = self.by_working_set[-1][1]
        if self.others is not None and self.others > BUSY:
            about += f", measured while others used {self.others:.1f} cores"
        return Hardware(HOST, about, max(self.flops_by.values()), memory, cache, cache_bandwidth)


def host(*, fresh: bool = False, threads: int | None = None, progress: Progress = quiet) -> Hardware:
    """Describe this machine, as it was measured before; it is measured now if it was not, or `fresh`."""
    machine = describe(threads)
    path = remembered(machine)
    found = None if fresh or path is None else read(path, machine)
    if found is None:
        progress("measuring what the machine can do")
        found = measure(machine["threads"], progress)
        if path is not None:
            write(path, machine, found)
    return found.hardware(about(machine))


def describe(threads: int | None) -> dict[str, Any]:
    """Describe what tells one machine from another."""

    cores = physical_cores()
    return {
        "cpu_model": cpu_model(),
        "identity": identity(),
        "cores": cores,
        "threads": bounded_threads(threads) or cores,
    }


def identity() -> str:
    """Describe the processor, finer than its name, which a hypervisor may leave vague: family, stepping, features,
    cache."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        first = [platform.processor(), platform.machine()]
    lasting = [line for line in first if not line.startswith(("cpu MHz", "bogomips", "processor", "apicid", "core id"))]
    return hashlib.sha256("\n".join(lasting).encode()).hexdigest()[:16]


def about(machine: dict[str, Any]) -> str:
    """Write the machine in a line."""
    return f"{machine['cpu_model']}, {machine['threads']} of {machine['cores']} cores"


# -- measuring -----------------------------------------------------------------------------------------------------


def measure(threads: int, progress: Progress) -> Measured:
    """Measure this machine in a process of its own."""
    quiet = idle.wait_for_idle(PATIENCE, progress)
    return measured(limits.measured_limits(threads, WORKING_SETS), quiet.others)


def measured(limits: Limits, others: float | None = None) -> Measured:
    """Make it from limits that were measured with `WORKING_SETS`."""
    return Measured(limits.flops_by, (*limits.by_working_set, (LARGEST, limits.bytes_per_s)), others)


def effective_cache(by_working_set: Sequence[tuple[int, float]]) -> tuple[int, float | None]:
    """Find the bytes of the last level and its bandwidth, from chains of growing working sets and, last, a copy in
    memory.

    Where no working set is faster than memory the smallest stands for the cache, and its bandwidth is not known.
    """
    *inside, (_, memory) = by_working_set
    fast = [size for size, rate in inside if rate >= FASTER * memory]
    if not fast:
        return inside[0][0], None
    cache = max(fast)
    return cache, statistics.median(rate for size, rate in inside if cache / INSIDE <= size <= cache)


# -- remembering ---------------------------------------------------------------------------------------------------


def remembered(machine: dict[str, Any]) -> Path | None:
    """Give the file of a machine in the user's cache folder; None for a user without one."""
    from bnfuse.runtime.codegen.cache import default_folder

    folder = default_folder()
    text = json.dumps([VERSION, machine], sort_keys=True)
    return folder / f"host-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json" if folder is not None else None


def read(path: Path, machine: dict[str, Any]) -> Measured | None:
    """Read what is remembered of this machine; nothing where the file is not there, or is not whole."""
    try:
        fields = json.loads(path.read_text())
        if fields.pop("machine") != machine:
            return None
        fields["by_working_set"] = tuple((int(size), float(rate)) for size, rate in fields["by_working_set"])
        found = Measured(**fields)
        rates = [found.others or 1.0, *found.flops_by.values(), *(rate for _, rate in found.by_working_set)]
        usable = len(found.by_working_set) > 1 and bool(found.flops_by)
        return found if usable and all(math.isfinite(rate) and rate > 0 for rate in rates) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def write(path: Path, machine: dict[str, Any], found: Measured) -> None:
    """Remember what was measured. That is a convenience: where the folder cannot be written, the machine is measured
    again next time."""

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"machine": machine, **dataclasses.asdict(found)}).encode())
    except (OSError, BnfuseError):
        return
