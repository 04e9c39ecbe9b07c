"""Labels of several inputs: one array for each input of the graph, side by side in one structured array.

    y = joined({"labels_main": int64 [N], "labels_aux": int64 [N], "mask": float32 [N, H, W]})
    scored(y)                     # the first: what the network's answers are held against
    fed_labels(y[chosen], names)  # an array for each input

So labels of any kind are shuffled, split and cut to batches like those of one input, which stay a plain array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError


@dataclasses.dataclass(frozen=True)
class Target:
    """Labels that a graph takes at one input: of what shape for an image, of which type, of how many classes."""

    name: str
    shape: tuple[int, ...]  # without the batch
    dtype: np.dtype[Any]
    classes: int | None = None  # of integers; None where the graph does not say
    ignored: int | None = None  # a class that counts for nothing

    @property
    def is_class(self) -> bool:
        """Tell whether it is one class for each image."""
        return self.dtype.kind in "iu" and not self.shape

    @property
    def is_map(self) -> bool:
        """Tell whether it is a class for each pixel."""
        return self.dtype.kind in "iu" and len(self.shape) > 1

    def __str__(self) -> str:
        return f"'{self.name}' ({self.dtype} {list(self.shape)} for each image)"


def joined(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Put arrays of one length side by side, the one to be scored first."""
    count = len(next(iter(arrays.values())))
    y = np.empty(count, [(name, array.dtype, array.shape[1:]) for name, array in arrays.items()])
    for name, array in arrays.items():
        y[name] = array
    return y


def scored(y: np.ndarray) -> np.ndarray:
    """Give the labels that answers are held against: of several inputs those of the first."""
    return y if y.dtype.names is None else y[y.dtype.names[0]]


def fed_labels(y: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, ...]:
    """Give what each of these inputs is fed with. Plain labels are those of all of them."""
    if y.dtype.names is None:
        return (y,) * len(names)
    return tuple(np.ascontiguousarray(y[name]) for name in names)


def are_alike(targets: Sequence[Target]) -> bool:
    """Tell whether one label for each image, or one map of them, can be that of all inputs: as of heads that learn the
    same."""
    first = targets[0]
    return (first.is_class or first.is_map) and all(
        target.dtype.kind in "iu" and (target.shape, target.classes) == (first.shape, first.classes)
        for target in targets
    )


def checked(array: np.ndarray, target: Target, count: int, place: str) -> np.ndarray:
    """Check the labels of one input, `count` of them. Gives them as the graph takes them; `place` begins messages."""
    if array.shape == (count, 1) and not target.shape:
        array = array[:, 0]
    if array.shape != (count, *target.shape):
        wanted = [count, *target.shape]
        raise BnfuseError(f"{place} has the shape {list(array.shape)}: the graph takes {wanted}, one for each image")
    if target.dtype.kind == "f":
        if array.dtype.kind not in "fiub":
            raise BnfuseError(f"{place} is {array.dtype}: the graph takes {target.dtype}")
        if not np.isfinite(array).all():
            raise BnfuseError(f"{place} holds values that are not finite")
        return array.astype(target.dtype)
    if array.dtype.kind not in "iub":
        raise BnfuseError(f"{place} is {array.dtype}: the graph takes integers ({target.dtype})")
    known = array if target.ignored is None else array[array != target.ignored]
    low, high = (int(known.min()), int(known.max())) if known.size else (0, 0)
    most = (target.classes or (1 << 20) + 1) - 1
    if low < 0 or high > most:
        left_out = "" if target.ignored is None else f" (or {target.ignored}, which counts for nothing)"
        raise BnfuseError(f"{place} has labels from {low} to {high}: they must be from 0 to {most}{left_out}")
    return array.astype(target.dtype)


def chosen_first(targets: Sequence[Target], logits: str | None, classes: int | None) -> tuple[Target, ...]:
    """Put first the labels that the logits are scored by: those of their loss, or else classes as many as they have.

    Raises BnfuseError where none are one class for each image, nor for each pixel.
    """
    found = [target for target in targets if target.is_class] or [target for target in targets if target.is_map]
    if not found:
        each = ", ".join(map(str, targets))
        raise BnfuseError(
            f"the graph takes the labels {each}: of data sets one must be an integer for each image or pixel, by which "
            "answers are scored. Compile it and call the step."
        )

    def rank(target: Target) -> tuple[bool, bool]:
        return target.name != f"labels_{logits}", classes is None or target.classes != classes

    first = min(found, key=rank)
    return (first, *(target for target in targets if target is not first))
