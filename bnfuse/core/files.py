"""Files written whole: a reader sees all of one or what was there before."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from bnfuse.core.errors import BnfuseError


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write all of `data` under that name, or leave what was there before; with `durable` even where the power fails. A
    pipe, a terminal or /dev/null stays what it is and is written to."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise BnfuseError(f"{path}: cannot be written: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except OSError as error:
        raise BnfuseError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()


def append_line(stream: IO[bytes], path: Path, fields: Mapping[str, Any]) -> None:
    """Append a line of JSON to `stream`, which was opened without a buffer."""
    append(
        stream, path, json.dumps(fields, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace") + b"\n"
    )


def append(stream: IO[bytes], path: Path, data: bytes) -> None:
    """Append all of `data` to `stream`, which was opened without a buffer. Raises BnfuseError where it does not go."""
    left = memoryview(data)
    try:
        while left:  # a disk that is nearly full takes a part
            left = left[stream.write(left) :]
    except OSError as error:
        raise BnfuseError(f"{path}: cannot be written: {error.strerror or error}") from None


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raise where a file of that name could not be written: before the work that it is for, not after it."""
    path = Path(path)
    if path.is_dir():
        raise BnfuseError(f"{path}: cannot be written: it is a folder. Name a file in it.")
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced
        raise BnfuseError(f"{path}: cannot be written: it is no ordinary file. Name another.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        what = error.strerror or error
        raise BnfuseError(f"{path}: cannot be written: {what}. Make the folder, or name another.") from None


def require_apart(*paths: object) -> None:
    """Raise where two of the files are one: a result would be written over the model, or over another result."""
    seen: set[Path] = set()
    for path in paths:
        if isinstance(path, str | os.PathLike):
            place = Path(path).resolve()
            if place in seen:
                raise BnfuseError(f"{path}: is named twice: it would be written over. Name another file.")
            seen.add(place)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
