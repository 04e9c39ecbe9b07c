"""What becomes of integer labels on their way into a step that takes a number for each class.

    recipe = Recipe(smoothing=0.1, weights="balanced", mixing=Mixing(mixup=0.2))
    labelling = recipe.labelling(classes=10, labels=data.train_y)
    batches = labelling.fed(loader.batches(1, 10), seed=0)

Label smoothing, weights of classes, mixup and cutmix are all one matrix of labels [B, classes], and the loss is the
mean of -labels*log p (bnfuse/graph/soft_labels.py). It is torch's cross_entropy with weight= and label_smoothing=: of
classes where nothing is mixed, divided by the sum of the labels' weights; of probabilities where images are.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import check_real
from bnfuse.core.text import spelt
from bnfuse.core.vectors import read_vector
from bnfuse.training.loading import Batch
from bnfuse.training.mixing import Mix, Mixing

BALANCED = "balanced"
Weights = str | os.PathLike[str] | Sequence[float] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is asked for: smoothing of labels, a weight for each class (or "balanced"), mixed images."""

    smoothing: float = 0.0
    weights: Weights | None = None
    mixing: Mixing = dataclasses.field(default_factory=Mixing)

    @property
    def is_plain(self) -> bool:
        """Whether labels are to be classes as they are."""
        return not self.smoothing and self.weights is None and not self.mixing.is_asked

    @property
    def balances(self) -> bool:
        """Whether weights follow from the labels."""
        return isinstance(self.weights, str) and self.weights == BALANCED

    def check(self) -> None:
        """Raise BnfuseError for what is impossible, whatever the data are; reads the file of weights."""
        check_real("label_smoothing", self.smoothing)
        if self.smoothing >= 1:
            raise BnfuseError(f"label_smoothing={self.smoothing} is out of range: it must be below 1")
        self.mixing.check()
        if self.weights is not None and self.weights != BALANCED:
            read_weights(self.weights)

    def labelling(self, classes: int, labels: np.ndarray | None) -> Labelling:
        """Settle it for data with these labels int64 [N], of which "balanced" weights are made; None where they are not
        known before they come."""
        return Labelling(classes, self.smoothing, self._settled(classes, labels), self.mixing)

    def _settled(self, classes: int, labels: np.ndarray | None) -> np.ndarray | None:
        if self.weights is None:
            return None
        if isinstance(self.weights, str) and self.weights == BALANCED:
            if labels is None:
                raise BnfuseError(
                    "--class-weights balanced counts labels, which are not known here: give their weights"
                )
            return balanced_weights(classes, labels)
        found = read_weights(self.weights)
        if found.shape != (classes,):
            raise BnfuseError(f"{place_of(self.weights)}: has {found.size} weights, the network has {classes} classes")
        if labels is not None and not found[labels].any():
            raise BnfuseError(f"{place_of(self.weights)}: gives every class of the training images a weight of 0")
        return found


@dataclasses.dataclass(frozen=True)
class Labelling:
    """The labels of a run, settled: see `Recipe`."""

    classes: int
    smoothing: float = 0.0
    weights: np.ndarray | None = None  # float64 [classes]
    mixing: Mixing = dataclasses.field(default_factory=Mixing)

    def fed(self, batches: Iterable[Batch], seed: int) -> Iterator[Batch]:
        """Mix the images of batches, and give each image's labels as numbers float32 [B, classes]."""
        for batch in batches:
            mix = self.mixing.drawn(batch.x.shape, seed=seed, epoch=batch.epoch, index=batch.index)
            x = np.ascontiguousarray(mix.images(batch.x))
            yield dataclasses.replace(batch, x=x, y=self.rows(batch.y, mix, batch.all_y))

    def rows(self, labels: np.ndarray, mix: Mix | None = None, everyone: np.ndarray | None = None) -> np.ndarray:
        """Give labels int64 [B] as float32 [B, classes]. Where the batch is a part of one, `everyone` has the labels of
        all of it int64 [N]: weighed by their weights, the mean over the parts is that of the whole batch."""
        rows = np.zeros((len(labels), self.classes))
        rows[np.arange(len(labels)), labels] = 1.0
        if self.mixing.is_asked:
            rows = self._smooth((mix or Mix()).labels(rows))
            return (rows if self.weights is None else rows * self.weights).astype(np.float32)
        if self.weights is None:
            return self._smooth(rows).astype(np.float32)
        own = self.weights[labels]
        total = own if everyone is None else self.weights[everyone]
        if not total.sum():  # torch's loss is 0/0 then
            return np.zeros_like(rows, np.float32)
        weighed = (1 - self.smoothing) * own[:, None] * rows + self.smoothing / self.classes * self.weights
        return (weighed * (len(total) / total.sum())).astype(np.float32)

    def __str__(self) -> str:
        """Say all that decides the numbers."""
        # as float32, which is what is fed
        weights = "none" if self.weights is None else ",".join(f"{weight:.9g}" for weight in self.weights)
        return f"{self.classes} classes, smoothing {spelt(self.smoothing)}, weights {weights}, {self.mixing}"

    def _smooth(self, rows: np.ndarray) -> np.ndarray:
        return (1 - self.smoothing) * rows + self.smoothing / self.classes


def balanced_weights(classes: int, labels: np.ndarray) -> np.ndarray:
    """Give each class the weight N/(classes*images of it): scikit-learn's "balanced"."""
    counts = np.bincount(labels, minlength=classes)
    if not counts.all():
        lost = int(np.flatnonzero(counts == 0)[0])
        raise BnfuseError(f"--class-weights balanced: class {lost} has no training image: give a file with the weights")
    return len(labels) / (classes * counts.astype(np.float64))


def read_weights(weights: Weights) -> np.ndarray:
    """Read weights of classes: numbers, an .npy file, or text with a number for each class, between them spaces, commas
    or line ends. Raises BnfuseError where they are none."""
    place = place_of(weights)
    found: Any = read_vector(weights) if isinstance(weights, str | os.PathLike) else weights
    try:
        array = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        raise BnfuseError(f"{place}: must be a number for each class") from None
    if array.ndim != 1 or not array.size or not np.isfinite(array).all() or array.min() < 0 or not array.any():
        raise BnfuseError(f"{place}: must be a number for each class, none negative, not all of them 0")
    return array


def place_of(weights: Weights) -> str:
    """Name where weights are from, for messages."""
    return f"{os.fspath(weights)}" if isinstance(weights, str | os.PathLike) else "class_weights"
