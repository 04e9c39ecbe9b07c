"""Where the encoded images of a data set lie: what is held of each in memory is its place alone.

items = Files(Path("photos/train"), ("cat/1.jpg", "dog/7.jpg"))
items.name(1)                        # for people
with items.open(1) as stream: ...    # the file, or what a tar or a table holds of it
items.take(np.array([1]))            # some of them
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from bnfuse.core.errors import BnfuseError


class Items(Protocol):
    """Encoded images, by their number."""

    def __len__(self) -> int:
        """Count them."""

    def name(self, index: int) -> str:
        """Say which one it is."""

    def identity(self, index: int) -> str:
        """Tell it from another one: its name, and its size in bytes."""

    def open(self, index: int) -> IO[bytes]:
        """Open what is encoded. Raises OSError where it is not there."""

    def take(self, indices: np.ndarray) -> Items:
        """Give those of these numbers, in that order."""


@dataclasses.dataclass(frozen=True)
class Files:
    """Files below a folder, by their paths."""

    root: Path
    paths: Sequence[str]

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """Give the path."""
        return f"{self.root}/{self.paths[index]}"

    def identity(self, index: int) -> str:
        """Give the path below the folder, and the size; -1 where there is no such file."""
        try:
            size = (self.root / self.paths[index]).stat().st_size
        except OSError:
            size = -1
        return f"{self.paths[index]} {size}"

    def open(self, index: int) -> IO[bytes]:
        """Open the file."""
        return (self.root / self.paths[index]).open("rb")

    def take(self, indices: np.ndarray) -> Files:
        """Give some of them."""
        return Files(self.root, tuple(self.paths[index] for index in indices))


def stamp_of(found: os.stat_result) -> tuple[int, int]:
    """Give the size of a file and when it was written: another one has another."""
    return found.st_size, found.st_mtime_ns


@dataclasses.dataclass(frozen=True)
class Shards:
    """Members of tar files: each is a range of bytes in one of them (tars.py)."""

    tars: Sequence[Path]
    names: Sequence[str]
    places: np.ndarray  # int64 [N, 3]: which tar, the first byte, how many
    stamps: Sequence[tuple[int, int]]  # of each tar when it was looked through

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Give the tar, and the member in it."""
        return f"{self.tars[self.places[index, 0]]}: {self.names[index]}"

    def identity(self, index: int) -> str:
        """Give the tar's name, the member and its size."""
        return f"{self.tars[self.places[index, 0]].name} {self.names[index]} {self.places[index, 2]}"

    def open(self, index: int) -> IO[bytes]:
        """Read the member."""
        tar, start, size = (int(number) for number in self.places[index])
        with self.tars[tar].open("rb", buffering=0) as stream:
            if stamp_of(os.fstat(stream.fileno())) != self.stamps[tar]:
                raise BnfuseError(f"{self.tars[tar]}: is another file than when the run began: begin it anew")
            stream.seek(start)
            return io.BytesIO(stream.read(size))

    def take(self, indices: np.ndarray) -> Shards:
        """Give some of them."""
        return Shards(self.tars, tuple(self.names[index] for index in indices), self.places[indices], self.stamps)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a table of Hugging Face's `datasets` (hugging_face.py), whose column holds encoded images."""

    table: Any  # datasets.Dataset, its images not decoded
    column: str
    label: str  # of the table, for people
    rows: np.ndarray  # int64 [N]

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        """Give the table, and the number of the row."""
        return f"{self.label}: row {self.rows[index]}"

    def identity(self, index: int) -> str:
        """Give the number of the row; which table it is has a digest of its own."""
        return str(self.rows[index])

    def open(self, index: int) -> IO[bytes]:
        """Read the bytes of the image, or the file that the table names."""
        found = self.table[int(self.rows[index])][self.column]
        if not isinstance(found, dict) or (found.get("bytes") is None and not found.get("path")):
            raise BnfuseError(f"{self.name(index)}: has no image in '{self.column}'")
        if found.get("bytes") is not None:
            return io.BytesIO(found["bytes"])
        return Path(found["path"]).open("rb")

    def take(self, indices: np.ndarray) -> Rows:
        """Give some of them."""
        return dataclasses.replace(self, rows=self.rows[indices])
