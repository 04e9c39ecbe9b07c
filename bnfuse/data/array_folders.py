"""A folder of .npy files, read as an .npz is: `x.npy`, `y.npy` or one file for each input with labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np


class ArrayFolder:
    """The .npy files of a folder by their names; like `numpy.load` of an .npz it unpickles nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(path.stem for path in folder.glob("*.npy") if path.is_file())

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __getitem__(self, name: str) -> np.ndarray:
        found: np.ndarray = np.load(self.folder / f"{name}.npy", allow_pickle=False)
        return found

    @contextmanager
    def member(self, name: str) -> Iterator[IO[bytes]]:
        """Open the file of an array, for its header."""
        with (self.folder / f"{name}.npy").open("rb") as stream:
            yield stream


def is_array_folder(folder: Path) -> bool:
    """Tell whether a folder holds images as an array."""
    return (folder / "x.npy").is_file()
