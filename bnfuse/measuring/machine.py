"""What a benchmark ran on: processor, versions, threads and how they wait for each other."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bnfuse.core.processors import physical_cores
from bnfuse.measuring.idle import Quiet
from bnfuse.ort.library import installed

# threads spin between the operators of a run, as by default, and no longer than that: they would tax the next candidate
ORT_SPINNING = {"session.intra_op.allow_spinning": "1", "session.force_spinning_stop": "1"}

PACKAGES = {
    "bnfuse": "bnfuse",
    "tvm": "apache-tvm",
    "onnx": "onnx",
    "torch": "torch",
    "numpy": "numpy",
}
SPINNING = {
    "bnfuse": ("TVM_THREAD_POOL_SPIN_COUNT", "TVM_BIND_THREADS", "TVM_NUM_THREADS"),
    "torch": ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS"),
}


def describe_machine(threads: int, baselines: Iterable[str], before: Quiet, during: float | None) -> dict[str, Any]:
    """Describe this machine. `before` is how the wait for an idle machine ended, `during` the cores that others had
    while we measured."""
    from bnfuse.runtime.targets.cpus import host_cpu

    return {
        "cpu": host_cpu(),
        "cpu_model": cpu_model(),
        "caches": caches(),
        "cores": physical_cores(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "others_cpu_before": None if before.others is None else round(before.others, 3),
        "others_cpu_during": None if during is None else round(during, 3),
        "idle": before.is_idle,
        "waited_s": round(before.waited, 1),
        "spinning": spinning(baselines),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def cpu_model() -> str:
    """Give the name that the processor gives itself."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def caches() -> dict[str, str]:
    """Name -> size of the first processor's caches, as Linux has them: L1d, L1i, L2, L3."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
            found[f"L{level}{kind[0].lower() if kind != 'Unified' else ''}"] = size
    return found


def spinning(baselines: Iterable[str]) -> dict[str, dict[str, str]]:
    """Tell how threads wait for work, for each runtime: what the environment sets, else "default"."""
    found = {"bnfuse": from_environment(SPINNING["bnfuse"])}
    if any(baseline.startswith("torch") for baseline in baselines):
        found["torch"] = from_environment(SPINNING["torch"])
    if "ort" in baselines:
        found["ort"] = dict(ORT_SPINNING)
    return found


def from_environment(names: Iterable[str]) -> dict[str, str]:
    """Read variables of the environment; default where one is not set."""
    return {name: os.environ.get(name, "default") for name in names}


def versions() -> dict[str, str]:
    """Give the versions of the packages that are installed."""
    found = {}
    for name, package in PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(package)
    if ort := installed():
        found["onnxruntime"] = " or ".join(ort.values())  # one has overwritten the other
    return found
