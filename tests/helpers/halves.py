"""Maps of bfloat16 in tests of a CPU's kernels: operands as they hold them, and how far off results may be for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.targets.target import CpuTarget

TARGET = resolve("cpu", 2)
HALVES = dataclasses.replace(resolve("cpu", 2, "bf16"), amx=False)  # tiles round more: tests of theirs ask for them
targets = st.sampled_from((TARGET, HALVES))

ROUNDING = 2.0**-8  # of a value, at most: half of the distance to its neighbour
WEIGHTS = ("weight", "dweight")


def is_held(name: str, value: np.ndarray) -> bool:
    """Whether an operand or result is a map of more than one pixel: others are float32."""
    return value.ndim == 4 and value.shape[2] * value.shape[3] > 1 and name not in WEIGHTS


def as_held(values: Mapping[str, np.ndarray], target: CpuTarget) -> dict[str, np.ndarray]:
    """Operands, NCHW, rounded to what the target's maps hold; of the type that they had."""
    if target.precision == "fp32":
        return dict(values)
    return {n: v.astype(ml_dtypes.bfloat16).astype(v.dtype) if is_held(n, v) else v for n, v in values.items()}


def rounding(name: str, value: np.ndarray, target: CpuTarget) -> float:
    """How far rounding may take a result, relative to its norm."""
    return ROUNDING if target.precision != "fp32" and is_held(name, value) else 0.0


def of_stored(
    expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], target: CpuTarget
) -> dict[str, np.ndarray]:
    """What is expected; statistics as they are of y as it was stored."""
    if target.precision == "fp32" or "y" not in found:
        return dict(expected)
    y = found["y"].astype(np.float64)
    made = {"mean": y.mean((0, 2, 3)), "variance": y.var((0, 2, 3))}
    made |= {"image_mean": y.mean((2, 3)), "image_variance": y.var((2, 3))}
    return {name: made.get(name, value).reshape(value.shape) for name, value in expected.items()}
