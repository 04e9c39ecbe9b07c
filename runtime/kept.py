"""Compiled programs on disk, beside the kernels of the cache: what was compiled before is read, and not lowered again.

    graph without the values of its state, target, optimizer, ranks, this package's sources   ->   key   ->   programs

An entry is a file like that of `Step.export` (artifact.py) without state and graph. One that is damaged, or of a CPU
that this one is not, is made anew. A folder that remembers measurements (tuning.py) keeps none: they change what is
compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import pathlib

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.initial_values import structure_of
from bnfuse.parallel.ranks import Ranks
from bnfuse.runtime.artifact import Artifact, read_artifact, reading, write_artifact
from bnfuse.runtime.backends.backend import backend_of
from bnfuse.runtime.codegen.cache import compiler_versions
from bnfuse.runtime.codegen.sources import programs_hash
from bnfuse.runtime.program.optim import Optimizer
from bnfuse.runtime.sizes import Pair
from bnfuse.runtime.targets.target import Target

KEPT = "steps"  # folder of a cache
LIBRARIES = ("numpy", "onnx", "onnx-ir")  # that lowering computes with


@dataclasses.dataclass(frozen=True)
class Making:
    """What programs are compiled of, beside the graph."""

    target: Target
    optimizer: Optimizer | None
    evaluates: bool
    ranks: Ranks


def key_of(name: str, model: bytes, making: Making) -> str:
    """Hash all that the programs of a graph depend on. `model` is the graph without values, `name` is in messages."""
    target = making.target
    parts = (
        name,
        structure_of(model),
        repr(making),
        programs_hash(target.backend),
        compiler_versions(),
        *backend_of(target).versions(target),
        *(f"{library} {importlib.metadata.version(library)}" for library in LIBRARIES),
    )
    return hashlib.sha256("\n".join(parts).encode(errors="backslashreplace")).hexdigest()


def read(folder: pathlib.Path, key: str) -> Pair | None:
    """Read the programs that were kept under a key; None where there are none that run here."""
    path = place_of(folder, key)
    with contextlib.suppress(BnfuseError), reading(path):
        (pair,) = read_artifact(path).compiled
        return pair
    return None


def write(folder: pathlib.Path, key: str, pair: Pair, making: Making) -> None:
    """Keep programs. A folder that cannot be written to costs time when they are next compiled, nothing else."""
    path = place_of(folder, key)
    with contextlib.suppress(OSError, BnfuseError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_artifact(Artifact(making.target, making.optimizer, (pair,), {}, b""), path)


def place_of(folder: pathlib.Path, key: str) -> pathlib.Path:
    """Say where an entry lies."""
    return folder / KEPT / f"{key}.bnf"
