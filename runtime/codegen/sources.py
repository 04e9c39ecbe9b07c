"""What a kernel's code, and a program, is made from: sources, and all that they import from the package.

They are read as text, not imported, which takes some milliseconds a process. Imports within functions count, those for
type checkers alone do not. A package counts where a name is taken from it, not where it is on the way to a module.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Iterable

from bnfuse.core import version
from bnfuse.core.interpreter import import_root
from bnfuse.runtime.kernels.registry import KERNELS

COMPILERS = {"cpu": f"{KERNELS}.cpu.tir", "cuda": f"{KERNELS}.cuda.compile"}  # what compiles a target's kernels
PROGRAMS = "bnfuse.runtime.compile"

TYPE_CHECKING = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|[ \t]*\n)+", re.MULTILINE)
IMPORT = re.compile(r"^[ \t]*(?:from (bnfuse[\w.]*) import (\([^)]*\)|[^\n]*)|import (bnfuse[\w.]*))", re.MULTILINE)
NAME = re.compile(r"^[ \t(]*(\w+)", re.MULTILINE)


class Sources:
    """The files of a package, `root` being its folder."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self._read: dict[str, tuple[bytes, frozenset[str]]] = {}
        self._paths: dict[str, pathlib.Path | None] = {}

    def hash(self, target: str, module: str | None = None) -> str:
        """Of all that makes a target's kernels (`cpu`, `cuda`), or those of one module of them (`pointwise`)."""
        name = f"{KERNELS}.{target}" if module is None else f"{KERNELS}.{target}.{module}"
        return self._hash([*self._modules(name), COMPILERS[target]])

    def hash_of_programs(self, target: str) -> str:
        """Of all that makes programs for a target, their kernels included."""
        return self._hash([PROGRAMS, *self._modules(f"{KERNELS}.{target}"), COMPILERS[target]])

    def _hash(self, modules: Iterable[str]) -> str:
        digest = hashlib.sha256(version.__version__.encode())
        for module in sorted(self.closure(modules)):
            digest.update(module.encode() + b"\0" + self._file(module)[0])
        return digest.hexdigest()

    def closure(self, modules: Iterable[str]) -> set[str]:
        """Find these modules and all that they import, directly or not."""
        found: set[str] = set()
        left = list(modules)
        while left:
            module = left.pop()
            if module not in found:
                found.add(module)
                left += self._file(module)[1]
        return found

    def imports(self, text: str) -> frozenset[str]:
        """Modules of the package that a source takes something from."""
        found = set()
        for source, names, plain in IMPORT.findall(TYPE_CHECKING.sub("", text)):
            for name in [match.group(1) for part in names.split(",") if (match := NAME.match(part.strip()))]:
                module = f"{source}.{name}"
                found.add(module if self._path(module) else source)
            if plain:
                found.add(plain)
        return frozenset(found)

    def _file(self, module: str) -> tuple[bytes, frozenset[str]]:
        """Give the digest of a module's source, and what it imports."""
        if module not in self._read:
            path = self._path(module)
            text = path.read_bytes() if path else b""
            self._read[module] = hashlib.sha256(text).digest(), self.imports(text.decode())
        return self._read[module]

    def _path(self, module: str) -> pathlib.Path | None:
        if module not in self._paths:
            place = os.path.join(self.root, *module.split(".")[1:])  # noqa: PTH118 (pathlib takes ten times as long)
            found = next(filter(os.path.isfile, (f"{place}.py", f"{place}/__init__.py")), None)
            self._paths[module] = pathlib.Path(found) if found else None
        return self._paths[module]

    def _modules(self, name: str) -> list[str]:
        """List the module, or all of a folder."""
        place = self.root.joinpath(*name.split(".")[1:])
        return [f"{name}.{path.stem}" for path in place.glob("*.py")] if place.is_dir() else [name]


OWN = Sources(import_root() / "bnfuse")


@functools.cache
def sources_hash(target: str, module: str | None = None) -> str:
    """Of this package's sources that make a target's kernels, or those of one module of them."""
    return OWN.hash(target, module)


@functools.cache
def programs_hash(target: str) -> str:
    """Of this package's sources that make programs for a target, and their kernels."""
    return OWN.hash_of_programs(target)
