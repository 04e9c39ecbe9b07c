"""The format of `step.bnf`: a compiled step in one file.

It is a zip of

    manifest.json        format version, target, the CPU features its code uses, optimiser, both programs
    code/<hash>.o        object code of the kernels; for a GPU a header and a cubin (cuda/container.py)
    state.safetensors    parameters, running statistics
    initial.safetensors  constants that launches read
    model.onnx           the graph that it was made of, without the initial values of its state

It holds native code: trust it as you would trust a program. Nothing in it is a pickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import write_atomically
from bnfuse.runtime.backends.backend import backend_of
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.program import optim
from bnfuse.runtime.program import program as p
from bnfuse.runtime.targets.target import Target, target_of

FORMAT = "bnfuse step"
VERSION = 2
MAX_MANIFEST = 64 << 20  # bytes; that of a network of 1000 nodes has less than one of these megabytes
PARTS = ("training", "evaluation")


@dataclasses.dataclass(frozen=True)
class Artifact:
    """What the file holds: `compiled` are the programs of training and of evaluation, with their code, of each batch
    size, the first one's first."""

    target: Target
    optimizer: optim.Optimizer | None
    compiled: tuple[tuple[Compiled, Compiled], ...]
    state: Mapping[str, np.ndarray]
    model: bytes


def write_artifact(artifact: Artifact, path: pathlib.Path) -> None:
    """Write the file; readers never see a part of it."""
    pairs = enumerate(artifact.compiled)
    parts = {part_name(part, size): one for size, pair in pairs for part, one in zip(PARTS, pair, strict=True)}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        hashes, initial = {}, {}
        written: set[str] = set()
        for part, compiled in parts.items():
            hashes[part] = [hashlib.sha256(code).hexdigest() for code in compiled.codes]
            for name, code in zip(hashes[part], compiled.codes, strict=True):
                if name not in written:
                    file.writestr(f"code/{name}.o", code)
                    written.add(name)
            initial.update({f"{part}.{index}": value for index, value in compiled.program.initial.items()})
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "target": artifact.target.to_data(),
            "features": backend_of(artifact.target).features(artifact.target),
            "optimizer": optim.to_data(artifact.optimizer),
            "kernels": hashes,
            "programs": {part: p.to_json(compiled.program) for part, compiled in parts.items()},
        }
        file.writestr("manifest.json", json.dumps(manifest))
        file.writestr("state.safetensors", safetensors.numpy.save(dict(artifact.state)))
        file.writestr("initial.safetensors", safetensors.numpy.save(initial))
        file.writestr("model.onnx", artifact.model)
    write_atomically(path, archive.getvalue())


def read_artifact(path: pathlib.Path, threads: int | None = None) -> Artifact:
    """Read what a file holds.

    Refuses one for another kind of CPU, and one for another number of `threads` than asked for. What is wrong with it
    shows in many ways: `reading` makes one line of each.
    """
    with zipfile.ZipFile(path) as file:
        return _read(file, str(path), threads)


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
    """Raise BnfuseError, one line that begins with the path, for whatever a file is found to lack in this context."""
    try:
        yield
    except FileNotFoundError:
        raise BnfuseError(f"{path}: there is no such file") from None
    except OSError as error:
        raise BnfuseError(f"{path}: cannot be read: {error.strerror or error}") from None
    except BnfuseError as error:
        raise BnfuseError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except Exception as error:  # damage shows in any form: zip, zlib, JSON, safetensors, an index, no memory
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise BnfuseError(f"{path}: not a complete compiled step ({what}): compile the model again") from None


def _read(file: zipfile.ZipFile, path: str, threads: int | None) -> Artifact:
    if file.getinfo("manifest.json").file_size > MAX_MANIFEST:
        raise ValueError("its manifest is too large")
    manifest = json.loads(file.read("manifest.json"))
    check_format(manifest, path)
    target = target_of(manifest["target"])
    backend_of(target).check(target, tuple(manifest["features"]), threads)
    initial = safetensors.numpy.load(file.read("initial.safetensors"))
    sizes = range(len(manifest["programs"]) // len(PARTS))
    training, evaluation = ([_part(file, manifest, part_name(part, size), initial) for size in sizes] for part in PARTS)
    return Artifact(
        target,
        optim.from_data(manifest["optimizer"]),
        tuple(zip(training, evaluation, strict=True)),
        safetensors.numpy.load(file.read("state.safetensors")),
        file.read("model.onnx"),
    )


def _part(file: zipfile.ZipFile, manifest: Mapping[str, Any], part: str, initial: Mapping[str, np.ndarray]) -> Compiled:
    own = {int(k.rpartition(".")[2]): v for k, v in initial.items() if k.rpartition(".")[0] == part}
    codes = []
    for name in manifest["kernels"][part]:
        code = file.read(f"code/{name}.o")
        if hashlib.sha256(code).hexdigest() != name:
            raise ValueError(f"code/{name}.o is damaged")
        codes.append(code)
    return Compiled(p.from_json(manifest["programs"][part], own), codes)


def part_name(part: str, size: int) -> str:
    """Name the program of a batch size in the file."""
    return f"{part}/{size}" if size else part


def check_format(manifest: Mapping[str, Any], path: str) -> None:
    """Raise BnfuseError for what is no step, and for one of another version."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BnfuseError(f"{path}: not a compiled step of bnfuse")
    if manifest["version"] != VERSION:
        raise BnfuseError(
            f"{path}: has format version {manifest['version']}, this bnfuse reads {VERSION}: compile the model again"
        )
