"""Compiled kernels on disk, under a key of everything that their code depends on.

An entry is one file: the SHA-256 of the object code, then the object code. It is written to a temporary name and
moved into place, so that processes may share the folder; an entry that does not match its hash is built anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pathlib

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import write_atomically
from bnfuse.runtime.backends.backend import backend_of
from bnfuse.runtime.codegen.sources import sources_hash
from bnfuse.runtime.kernels.kernel import Kernel
from bnfuse.runtime.kernels.registry import Kind

HASH_BYTES = hashlib.sha256().digest_size


def default_folder() -> pathlib.Path | None:
    """`$BNFUSE_CACHE`, or bnfuse in the user's cache folder (`$XDG_CACHE_HOME`, ~/.cache). None for a user without."""
    if chosen := os.environ.get("BNFUSE_CACHE"):
        return pathlib.Path(chosen)
    if user := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(user) / "bnfuse"
    with contextlib.suppress(RuntimeError):  # no $HOME, and the user has no entry that names one
        return pathlib.Path.home() / ".cache" / "bnfuse"
    return None


def content_key(kernel: Kernel, made_by: Kind) -> str:
    """Hash of the kernel's problem and target, its generator's sources, the compilers, and a CPU's features."""
    target = kernel.target
    parts = (
        kernel.key,
        sources_hash(target.backend, made_by.module),
        compiler_versions(),
        *backend_of(target).versions(target),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def compiler_versions() -> str:
    """Name the versions of what compiles kernels."""
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("apache-tvm", "apache-tvm-ffi"))


class Cache:
    """A folder of compiled kernels. With `folder=None` nothing is kept."""

    def __init__(self, folder: pathlib.Path | None) -> None:
        self.folder = folder

    def read(self, key: str) -> bytes | None:
        """Read the object code; None where there is none or the entry is damaged."""
        if self.folder is None:
            return None
        try:
            entry = self._path(key).read_bytes()
        except OSError:
            return None
        digest, code = entry[:HASH_BYTES], entry[HASH_BYTES:]
        return code if code and hashlib.sha256(code).digest() == digest else None

    def write(self, key: str, code: bytes) -> None:
        """Keep an object. A folder that cannot be written to costs speed next time, nothing else."""
        if self.folder is None:
            return
        path = self._path(key)
        with contextlib.suppress(OSError, BnfuseError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, hashlib.sha256(code).digest() + code)

    def _path(self, key: str) -> pathlib.Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.kernel"
