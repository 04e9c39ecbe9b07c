"""How well logits do against labels: of images, or of the pixels of maps.

found = evaluate_batches(step.evaluate, slices(images, labels, 64), names=("cat", "dog"))
found.accuracy, found.top5, found.balanced_accuracy, found.mean_iou, found.confusion
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import Section, join
from bnfuse.data.targets import scored
from bnfuse.training.ahead import prefetched
from bnfuse.training.history import percent
from bnfuse.training.nonfinite import error_of_evaluation

FIVE = 5
CONFUSED = 2048  # classes up to which all pairs are counted: 32 MiB
SHOWN = 12  # classes that a table has in full


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How well a network does on images: each of them counted once, by the running statistics.

    Of maps of classes `right` counts pixels, of `pixels` whose label is not ignored.
    """

    images: int
    right: int  # whose largest logit is their label's
    loss: float  # mean cross-entropy of the logits, in float64, whatever the loss of the training is
    five: int | None = None  # whose label's logit is among the five largest; None of five classes and fewer
    pixels: int | None = None
    confusion: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    # int64 [classes, classes]: how many of a class (row) were taken for another (column); None of thousands of classes
    names: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def counted(self) -> int:
        """How many labels there were."""
        return self.images if self.pixels is None else self.pixels

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.right / max(self.counted, 1)

    @property
    def top5(self) -> float | None:
        """Share of those whose label is among the five likeliest; None of five classes and fewer."""
        return None if self.five is None else self.five / max(self.counted, 1)

    @property
    def class_accuracies(self) -> np.ndarray | None:
        """Share of right answers of each class, float64 [classes]: nan where there is no image of it."""
        if self.confusion is None:
            return None
        with np.errstate(invalid="ignore"):
            found: np.ndarray = np.diagonal(self.confusion) / self.confusion.sum(1)
        return found

    @property
    def balanced_accuracy(self) -> float | None:
        """Mean over the classes, of those with images, of the share of right answers: what scikit-learn calls so."""
        found = self.class_accuracies
        return None if found is None or np.isnan(found).all() else float(np.nanmean(found))

    @property
    def mean_iou(self) -> float | None:
        """Mean over the classes of intersection over union, of those that are there or were found; None of images."""
        if self.pixels is None or self.confusion is None:
            return None
        hits = np.diagonal(self.confusion)
        union = self.confusion.sum(0) + self.confusion.sum(1) - hits
        return float((hits[union > 0] / union[union > 0]).mean()) if union.any() else None

    def name_of(self, index: int) -> str:
        """Give the name of a class, or its number."""
        return self.names[index] if index < len(self.names) else str(index)

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "images": self.images,
            "right": self.right,
            "accuracy": self.accuracy,
            "top5": self.top5,
            "balanced_accuracy": self.balanced_accuracy,
            "loss": self.loss,
            "pixels": self.pixels,
            "mean_iou": self.mean_iou,
            "classes": self._classes(),
        }

    def _classes(self) -> list[dict[str, Any]] | None:
        accuracies = self.class_accuracies
        if accuracies is None or self.confusion is None:
            return None
        counts = self.confusion.sum(1)
        return [
            {"name": self.name_of(i), "count": int(counts[i]), "accuracy": float(accuracies[i]) if counts[i] else None}
            for i in range(len(counts))
        ]

    def sections(self) -> list[Section]:
        """Show it in a line, and of few classes one for each."""
        what = "images" if self.pixels is None else "pixels"
        parts = [f"{percent(self.accuracy)} right of {self.counted:,} {what}"]
        if self.top5 is not None:
            parts.append(f"{percent(self.top5)} among the first five")
        if self.balanced_accuracy is not None:
            parts.append(f"{percent(self.balanced_accuracy)} by class")
        if self.mean_iou is not None:
            parts.append(f"mean IoU {percent(self.mean_iou)}")
        found = [Section.lines("Evaluation", [", ".join([*parts, f"cross-entropy {self.loss:.4f}"])])]
        classes = self._classes()
        if not classes:
            return found
        title = "By class"
        if len(classes) > SHOWN:
            classes = sorted((c for c in classes if c["count"]), key=lambda c: c["accuracy"])[:SHOWN]
            title = f"By class: the {len(classes)} of the fewest right answers"
        rows = [(c["name"], f"{c['count']:,}", percent(c["accuracy"])) for c in classes]
        return [*found, Section.table(title, ("class", what, "right"), rows)]

    def __str__(self) -> str:
        return join(self.sections())


def evaluate_batches(
    logits_of: Callable[[np.ndarray], np.ndarray],
    parts: Iterator[tuple[np.ndarray, np.ndarray]],
    *,
    names: tuple[str, ...] = (),
    ignored: int | None = None,
) -> Evaluation:
    """Evaluate what gives logits [N, classes] of images with labels [N], or [N, classes, H, W] with labels [N, H, W].

    The label `ignored` counts for nothing. Raises DivergedError where a logit is not finite.
    """
    images, loss, counts, maps = 0, 0.0, Counts(), False
    with prefetched(parts) as ready:
        for x, y in ready:
            logits, labels = logits_of(x), scored(y)
            if logits.ndim != labels.ndim + 1 or logits.shape[:1] + logits.shape[2:] != labels.shape:
                what = "logits are [N, classes]" if labels.ndim == 1 else f"labels are {list(labels.shape)}"
                raise BnfuseError(f"the network gives {list(logits.shape)} for {len(y)} images: {what}")
            if not np.isfinite(logits).all():
                raise error_of_evaluation(x)
            images, maps = images + len(y), labels.ndim > 1
            rows, own = np.moveaxis(logits, 1, -1).reshape(-1, logits.shape[1]), labels.reshape(-1)
            if ignored is not None:
                rows, own = rows[own != ignored], own[own != ignored]
            loss += float(cross_entropies(rows, own).sum())
            counts.add(rows, own)
    five = counts.five if counts.classes > FIVE and not maps else None
    pixels = counts.all if maps else None
    return Evaluation(images, counts.right, loss / max(counts.all, 1), five, pixels, counts.confusion, names)


def merged(parts: Sequence[Evaluation]) -> Evaluation:
    """Put evaluations of parts of the images together, as if all had been evaluated at once."""
    some = [part for part in parts if part.images]
    if len(some) < 2:
        return some[0] if some else parts[0]
    counted = sum(part.counted for part in some)
    loss = sum(part.loss * part.counted for part in some) / max(counted, 1)
    five, pixels = (
        None if any(getattr(part, name) is None for part in some) else sum(getattr(part, name) for part in some)
        for name in ("five", "pixels")
    )
    pairs = [part.confusion for part in some if part.confusion is not None]
    confusion = sum(pairs[1:], pairs[0]) if pairs else None
    images, right = (sum(getattr(part, name) for part in some) for name in ("images", "right"))
    return Evaluation(images, right, loss, five, pixels, confusion, some[0].names)


class Counts:
    """Answers counted batch by batch."""

    def __init__(self) -> None:
        self.all = self.right = self.five = self.classes = 0
        self.confusion: np.ndarray | None = None

    def add(self, logits: np.ndarray, labels: np.ndarray) -> None:
        """Count logits [N, classes] against labels [N]. Of equal logits the first is the largest."""
        classes = self.classes = logits.shape[1]
        answers = logits.argmax(1)
        self.all += len(labels)
        self.right += int((answers == labels).sum())
        if classes > FIVE:
            own = logits[np.arange(len(labels)), labels][:, None]
            before = np.arange(classes) < labels[:, None]
            self.five += int((((logits > own) | ((logits == own) & before)).sum(1) < FIVE).sum())
        if classes <= CONFUSED:
            pairs = np.bincount(labels * classes + answers, minlength=classes * classes).reshape(classes, classes)
            self.confusion = pairs if self.confusion is None else self.confusion + pairs


def cross_entropies(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Compute -log p of each label [N] from logits [N, classes], in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    found: np.ndarray = np.log(np.exp(wide).sum(1)) - wide[np.arange(len(labels)), labels]
    return found
