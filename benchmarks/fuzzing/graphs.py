"""Mutations of ONNX models: all that nodes.py, tensors.py and wholes.py have."""

from __future__ import annotations

import random

import onnx

from . import nodes, tensors, wholes  # noqa: F401 (they fill the list)
from .mutators import MUTATORS


def mutate(model: onnx.ModelProto, rng: random.Random) -> tuple[str, ...]:
    """One to three changes, and their names."""
    chosen = [rng.choice(MUTATORS) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    for change in chosen:
        change(model, rng)
    return tuple(change.__name__ for change in chosen)
