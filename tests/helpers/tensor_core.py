"""How a GPU's tensor cores sum products: what mma gives on sm_90.

A float32 sum and the exact products of an instruction are aligned to the largest exponent among them, where a product's
is the sum of its factors'. Of each, what lies more than EXTRA bits below a float32 of that exponent is cut off; so is
what the result has no bits for. All cuts are towards zero: errors of a long chain add up.

As in the models of [Khattak25]: the 5000 results in TF32 and 5000 in bfloat16 that they recorded of an H200 come out to
the last bit, and so do those of an H100.
"""

from __future__ import annotations

import numpy as np

EXTRA = 2  # bits below a float32's; 1 on sm_80, where a group is of half as many products
LEAST = -133  # the smallest exponent that others are aligned to
NOTHING = -1024  # the exponent of a zero


def accumulate(left: np.ndarray, right: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c + left x right, float32 (..., m, n): left is (..., m, k), right (..., k, n), of floats of 11 bits or fewer."""
    left, right, c = left.astype(np.float64), np.swapaxes(right, -1, -2).astype(np.float64), c.astype(np.float64)
    left_powers, right_powers = _powers(left), _powers(right)
    largest = np.maximum(_powers(c), LEAST)
    for k in range(left.shape[-1]):
        np.maximum(largest, left_powers[..., :, None, k] + right_powers[..., None, :, k], out=largest)
    scale = np.ldexp(1.0, 23 + EXTRA - largest)
    total = np.trunc(c * scale)
    for k in range(left.shape[-1]):
        total += np.trunc(left[..., :, None, k] * right[..., None, :, k] * scale)
    return towards_zero(total / scale)


def towards_zero(values: np.ndarray) -> np.ndarray:
    """float64 cut to float32."""
    nearest = values.astype(np.float32)
    return np.where(np.abs(nearest) > np.abs(values), np.nextafter(nearest, np.float32(0)), nearest)


def _powers(values: np.ndarray) -> np.ndarray:
    """Exponents of numbers from 1 to 2."""
    return np.where(values == 0, NOTHING, np.frexp(values)[1] - 1)
