"""Packed weights (kernels/cuda/weights.py) as numpy defines them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from bnfuse.runtime.kernels.cuda.weights import BACKWARD, VECTOR, is_flat


def round_tf32(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest of TF32, ties away from zero."""
    return ((np.ascontiguousarray(x).view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


ROUNDED = {
    "bf16": lambda x: x.astype(ml_dtypes.bfloat16),
    "fp16": lambda x: x.astype(np.float16),
    "tf32": round_tf32,
    "fp32": lambda x: x,
}


def packed(weight: np.ndarray, group: int, form: str, merged: int = 1) -> np.ndarray:
    """The elements of an OIHW weight in the order of a form, with zeros behind each row, and where a row has those of
    `merged` groups off its own."""
    outputs, per_group, h, w = weight.shape
    if form == BACKWARD:
        split = weight.reshape(group, outputs // group, per_group, h * w)
        rows = split.transpose(0, 2, 3, 1).reshape(group * per_group, h * w, outputs // group)
    elif is_flat(weight.shape, merged):
        rows = weight.transpose(0, 2, 3, 1).reshape(outputs, h, w * per_group)
    else:
        rows = weight.reshape(outputs, per_group, h * w).transpose(0, 2, 1)
    if merged > 1:
        own, count = rows.shape[2], rows.shape[0] // group
        wide = np.zeros((*rows.shape[:2], merged, own), rows.dtype)
        for row, values in enumerate(rows):
            wide[row, :, row // count % merged] = values
        rows = wide.reshape(*rows.shape[:2], merged * own)
    return np.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % VECTOR))).reshape(-1)


def packed_raw(weight: np.ndarray, group: int, form: str, precision: str, merged: int = 1) -> np.ndarray:
    """The same of a float32 weight, as a kernel of that precision takes it; 16-bit floats are raw uint16."""
    found = ROUNDED[precision](packed(weight, group, form, merged))
    return found.view(np.uint16) if found.itemsize == 2 else found
