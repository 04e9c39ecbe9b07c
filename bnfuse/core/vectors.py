"""Lists of numbers in files: one for each class, say."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from bnfuse.core.errors import BnfuseError

MAX_TEXT = 1 << 24  # bytes


def read_vector(path: str | os.PathLike[str]) -> np.ndarray:
    """Read an array of an .npy file, or the numbers of a text, float64 [N], between them spaces, commas or line ends.

    Raises BnfuseError, with the file, where there are none.
    """
    place = Path(path)
    try:
        return np.load(place, allow_pickle=False) if place.suffix == ".npy" else numbers_in(place)
    except (OSError, ValueError, EOFError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise BnfuseError(f"{place}: cannot be read: {what}. It must be an .npy file, or a text of numbers") from None


def numbers_in(path: Path) -> np.ndarray:
    """Read the numbers of a text file. Raises ValueError for what is no number."""
    if path.stat().st_size > MAX_TEXT:
        raise ValueError("it is too large for a list of numbers")
    return np.array([float(word) for word in path.read_text(encoding="utf-8").replace(",", " ").split()])
