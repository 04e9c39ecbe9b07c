"""Arrays of one exchange as one message, and sums in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SMALL = 1 << 16  # bytes: what several arrays have together is copied rather than sent one by one


def is_small(arrays: Sequence[np.ndarray]) -> bool:
    """Tell whether several arrays are better copied into one message."""
    return len(arrays) > 1 and sum(array.nbytes for array in arrays) <= SMALL


def packed(arrays: Sequence[np.ndarray], parts: int = 1) -> np.ndarray:
    """Copy arrays of one dtype one behind the other, filled up with zeros to a multiple of `parts` elements."""
    elements = sum(array.size for array in arrays)
    found = np.zeros(-(-elements // parts) * parts, arrays[0].dtype)
    place = 0
    for array in arrays:
        found[place : place + array.size] = array.reshape(-1)
        place += array.size
    return found


def unpack(message: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
    """Copy a message to where its parts belong."""
    place = 0
    for array in arrays:
        array.reshape(-1)[:] = message[place : place + array.size]
        place += array.size


def sum_in_order(rows: np.ndarray) -> np.ndarray:
    """Sum what each rank gave, [ranks, elements], from the first rank to the last, in the arrays' own precision."""
    total: np.ndarray = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total
