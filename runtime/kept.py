"""Compiled programs on disk, beside the kernels of the cache: what was compiled before is read, and not lowered again.

    graph without the values of its state, target, optimizer, ranks, this package's sources   ->   key   ->   programs

An entry is a file like that of `Step.export` (artifact.py) without state and graph. One that is damaged is made anew;
of more than MOST the ones that were not read for longest go. A folder that remembers measurements (tuning.py) keeps
none: they change what is compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.initial_values import Bare
from bnfuse.parallel.ranks import ONE, Ranks
from bnfuse.runtime.artifact import Artifact, read_artifact, reading, write_artifact
from bnfuse.runtime.backends.backend import backend_of
from bnfuse.runtime.codegen.cache import compiler_versions
from bnfuse.runtime.codegen.sources import programs_hash
from bnfuse.runtime.program.optim import Optimizer
from bnfuse.runtime.sizes import Pair
from bnfuse.runtime.targets.target import Target

KEPT = "steps"  # folder of a cache
MOST = 200  # entries, a megabyte or two each
LIBRARIES = ("numpy", "onnx", "onnx-ir")  # that lowering computes with


@dataclasses.dataclass(frozen=True)
class Making:
    """What programs are compiled of, beside the graph."""

    target: Target
    optimizer: Optimizer | None
    evaluates: bool
    ranks: Ranks


def key_of(bare: Bare, making: Making) -> str:
    """Hash all that the programs of a graph depend on: its name, too, which is in their messages."""
    target, optimizer, ranks = making.target, making.optimizer, making.ranks
    parts = (
        bare.graph.name,
        bare.structure,
        repr(target),
        repr(optimizer and dataclasses.replace(optimizer, lr=1.0)),  # the rate is given to each step
        repr(making.evaluates),
        repr(ranks if ranks.size > 1 else ONE),
        programs_hash(target.backend),
        compiler_versions(),
        *backend_of(target).versions(target),
        *(f"{library} {importlib.metadata.version(library)}" for library in LIBRARIES),
    )
    return hashlib.sha256("\n".join(parts).encode(errors="backslashreplace")).hexdigest()


def runs_here(target: Target) -> bool:
    """Tell whether code for a target may run on this machine: else what is written here could not be read here."""
    backend = backend_of(target)
    with contextlib.suppress(BnfuseError):
        backend.check(target, backend.features(target), None)
        return True
    return False


def read(folder: pathlib.Path, key: str) -> Pair | None:
    """Read the programs that were kept under a key; None where there are none that run here."""
    path = place_of(folder, key)
    with contextlib.suppress(BnfuseError), reading(path):
        (pair,) = read_artifact(path).compiled
        os.utime(path)
        return pair
    return None


def write(folder: pathlib.Path, key: str, pair: Pair, making: Making) -> None:
    """Keep programs. Whatever goes wrong costs time when they are next compiled, nothing else."""
    path = place_of(folder, key)
    with contextlib.suppress(BnfuseError), reading(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_artifact(Artifact(making.target, making.optimizer, (pair,), {}, b""), path)
        entries = sorted(path.parent.glob("*.bnf"), key=lambda entry: entry.stat().st_mtime)
        for entry in entries[:-MOST]:
            entry.unlink(missing_ok=True)


def place_of(folder: pathlib.Path, key: str) -> pathlib.Path:
    """Say where an entry lies."""
    return folder / KEPT / f"{key}.bnf"
