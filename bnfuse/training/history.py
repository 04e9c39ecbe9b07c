"""What a training run has to show: one line an epoch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bnfuse.core.text import Section, join


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What one epoch gave."""

    epoch: int
    loss: float  # mean over the epoch's images
    accuracy: float | None  # on held-out images, by the running statistics; None in an epoch that was not evaluated
    lr: float  # of the epoch's last step
    seconds: float
    images_per_second: float = 0.0  # of training alone
    held_out_loss: float | None = None  # cross-entropy on held-out images, by the running statistics
    top5: float | None = None  # share of held-out images whose label is among the five likeliest; None of few classes
    balanced_accuracy: float | None = None  # mean of the classes' accuracies
    mean_iou: float | None = None  # of maps of classes
    waited: float = 0.0  # share of the time of the epoch's steps in which they waited for images
    ema_accuracy: float | None = None  # on held-out images, by the average of the weights, where there is one
    ema_loss: float | None = None  # cross-entropy on held-out images, by that average

    @property
    def score(self) -> float | None:
        """The accuracy that tells the best epoch: that of the average of the weights, where there is one."""
        return self.accuracy if self.ema_accuracy is None else self.ema_accuracy


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What makes the images of batches."""

    images_per_second: float  # alone, before the first step
    workers: int
    streamed: bool  # from files; else from memory
    processes: bool = False  # the workers; else threads

    def __str__(self) -> str:
        how = "decoded" if self.streamed else "changed"
        kind = "process" if self.processes else "thread"
        workers = f"{self.workers} {kind}{'' if self.workers == 1 else 'es' if self.processes else 's'}"
        return f"images are {how} by {workers}: {self.images_per_second:,.0f} a second, before the first step"


@dataclasses.dataclass(frozen=True)
class History:
    """A run: its epochs, and how many images it had."""

    epochs: tuple[Epoch, ...]
    images: int
    held_out: int
    stopped: str | None = None  # why the run ended before its last epoch
    tested: int = 0  # images that were scored once, at the end, where others chose the best epoch
    test_accuracy: float | None = None  # on these
    test_loss: float | None = None
    test_top5: float | None = None
    pipeline: Pipeline | None = None  # of images that are decoded, or changed as pictures
    ranks: int = 1  # how many processes trained it

    @property
    def accuracy(self) -> float:
        """Of the last evaluation, by the average of the weights where there is one."""
        return next((e.score for e in reversed(self.epochs) if e.score is not None), 0.0)

    @property
    def best(self) -> Epoch | None:
        """The epoch of the best evaluation, the first of them where several are equal."""
        return best_of(self.epochs)

    def to_json(self) -> dict[str, Any]:
        """Give the history as JSON's types; the keys are in docs/cli.md."""
        best = self.best
        return {
            "images": self.images,
            "held_out": self.held_out,
            "accuracy": self.accuracy,
            "best": None if best is None else {"epoch": best.epoch, "accuracy": best.score},
            "test": None
            if self.test_accuracy is None
            else {
                "images": self.tested,
                "accuracy": self.test_accuracy,
                "loss": self.test_loss,
                "top5": self.test_top5,
            },
            "stopped": self.stopped,
            "ranks": self.ranks,
            "pipeline": None if self.pipeline is None else dataclasses.asdict(self.pipeline),
            "epochs": [dataclasses.asdict(epoch) for epoch in self.epochs],
        }

    def sections(self) -> list[Section]:
        """Show a table of the epochs, the score on test images, and why the run ended early."""
        averaged, five, maps = (
            any(getattr(e, name) is not None for e in self.epochs) for name in ("ema_accuracy", "top5", "mean_iou")
        )
        rows = [
            (
                e.epoch,
                f"{e.loss:.4f}",
                percent(e.accuracy),
                *([percent(e.ema_accuracy)] if averaged else []),
                *([percent(e.top5)] if five else []),
                *([percent(e.mean_iou)] if maps else []),
                f"{e.lr:.3g}",
                f"{e.seconds:.1f} s",
            )
            for e in self.epochs
        ]
        more = (("average's", averaged), ("top 5", five), ("mean IoU", maps))
        columns = ("epoch", "loss", "accuracy", *(name for name, shown in more if shown), "lr", "time")
        by = f" by {self.ranks} ranks" if self.ranks > 1 else ""
        title = f"Trained{by} on {self.images:,} images, {self.held_out:,} held out"
        found = [Section.table(title, columns, rows)]
        if self.test_accuracy is not None:
            line = f"{percent(self.test_accuracy)} right on {self.tested:,} images, by the network of the last epoch"
            line += " (the average of its weights)" if averaged else ""
            found.append(Section.lines("Test", [line]))
        return found if self.stopped is None else [*found, Section.lines("Stopped early", [self.stopped])]

    def __str__(self) -> str:
        return join(self.sections())


def best_of(epochs: Sequence[Epoch]) -> Epoch | None:
    """Find the epoch of the best evaluation, the first of them where several are equal; None where none was
    evaluated."""
    evaluated = [epoch for epoch in epochs if epoch.score is not None]
    return max(evaluated, key=lambda epoch: epoch.score or 0.0, default=None)


def without_gain(epochs: Sequence[Epoch], least: float = 0.0) -> int:
    """Tell how many evaluations in a row, up to the last, were not better by more than `least` than the best before
    them."""
    best, count = -math.inf, 0
    for accuracy in (epoch.score for epoch in epochs if epoch.score is not None):
        best, count = (accuracy, 0) if accuracy > best + least else (best, count + 1)
    return count


def percent(accuracy: float | None) -> str:
    """Write an accuracy with two digits; - where there is none."""
    return "-" if accuracy is None else f"{100 * accuracy:.2f} %"


def epoch_from(fields: Mapping[str, Any]) -> Epoch:
    """Read what `dataclasses.asdict` made of an epoch. Raises TypeError or KeyError where it is something else."""

    def some(name: str) -> float | None:
        value = fields.get(name)
        return None if value is None else float(value)

    return Epoch(
        int(fields["epoch"]),
        float(fields["loss"]),
        None if fields["accuracy"] is None else float(fields["accuracy"]),
        float(fields["lr"]),
        float(fields["seconds"]),
        float(fields["images_per_second"]),
        some("held_out_loss"),
        some("top5"),
        some("balanced_accuracy"),
        some("mean_iou"),
        float(fields.get("waited", 0.0)),
        some("ema_accuracy"),
        some("ema_loss"),
    )
