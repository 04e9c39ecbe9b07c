"""The training loop: shuffle, step, and after each epoch the accuracy on images held out.

    history = train_step(step, data_for(step, "digits"), epochs=10)

The batch is the graph's; images that do not fill the last batch of an epoch wait for the next shuffle. Evaluation
counts every held-out image once: its last batch is filled up, and what filled it is not counted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnfuse.data import Dataset, batches, load_data
from bnfuse.errors import BnfuseError
from bnfuse.text import Section, join

if TYPE_CHECKING:
    from bnfuse.runtime import Step

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Epoch:
    epoch: int
    loss: float  # mean over the epoch's steps
    accuracy: float  # on held-out images, by the running statistics
    lr: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class History:
    epochs: tuple[Epoch, ...]
    images: int
    held_out: int

    @property
    def accuracy(self) -> float:
        """After the last epoch."""
        return self.epochs[-1].accuracy

    def to_json(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "held_out": self.held_out,
            "accuracy": self.accuracy,
            "epochs": [dataclasses.asdict(epoch) for epoch in self.epochs],
        }

    def sections(self) -> list[Section]:
        rows = [
            (e.epoch, f"{e.loss:.4f}", f"{100 * e.accuracy:.2f} %", f"{e.lr:.3g}", f"{e.seconds:.1f} s")
            for e in self.epochs
        ]
        title = f"Trained on {self.images:,} images, {self.held_out:,} held out"
        return [Section.table(title, ("epoch", "loss", "accuracy", "lr", "time"), rows)]

    def __str__(self) -> str:
        return join(self.sections())


def train_step(
    step: Step,
    data: Dataset,
    *,
    epochs: int,
    seed: int = 0,
    save_to: str | Path | None = None,
    progress: Progress = lambda _: None,
) -> History:
    """Trains in place. The learning rate falls from the step's own to 0 along half a cosine."""
    batch = batch_of(step)
    steps = len(data.train_y) // batch
    if not steps:
        count = len(data.train_y)
        raise BnfuseError(f"{data.name}: {count} images do not fill a batch of {batch}: build with a smaller --batch")
    first, done = step.lr, []
    for epoch in range(1, epochs + 1):
        start, losses = time.perf_counter(), []
        for index, (x, y) in enumerate(batches(data.train_x, data.train_y, batch, seed=seed, epoch=epoch)):
            step.lr = cosine(first, (epoch - 1) * steps + index, epochs * steps)
            losses.append(step(x, y))
        if not np.isfinite(losses[-1]):
            raise BnfuseError(f"the loss is {losses[-1]} in epoch {epoch}: a learning rate of {first:g} is too high")
        accuracy = evaluate_step(step, data.test_x, data.test_y)
        done.append(Epoch(epoch, float(np.mean(losses)), accuracy, step.lr, time.perf_counter() - start))
        progress(
            f"epoch {epoch} of {epochs}: loss {done[-1].loss:.4f}, {100 * accuracy:.2f} % right on held-out images"
        )
        if save_to is not None:
            step.save(save_to)
    return History(tuple(done), len(data.train_y), len(data.test_y))


def cosine(first: float, index: int, total: int) -> float:
    """The learning rate of step `index` of `total`."""
    return first * 0.5 * (1 + math.cos(math.pi * index / total))


def run_steps(step: Step, data: Any, *, steps: int, seed: int = 0) -> list[float]:
    """The losses of `steps` steps, on shuffled batches of the data or on one random batch."""
    if data is None:
        feeds = random_feeds(step, np.random.default_rng(seed))
        return [step(*(feeds[name] for name in step.inputs)) for _ in range(steps)]
    found = data_for(step, data)
    epochs = (batches(found.train_x, found.train_y, batch_of(step), seed=seed, epoch=e) for e in itertools.count(1))
    return [step(x, y) for x, y in itertools.islice(itertools.chain.from_iterable(epochs), steps)]


def random_feeds(step: Step, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Standard normal images, labels over all classes, zeros for sampling offsets."""
    tensors, roles = step.program.inputs, step.program.roles
    logits = step.program.outputs.get(roles["logits"] or "")
    feeds: dict[str, np.ndarray] = {}
    for name in step.inputs:
        dims, dtype = tensors[name].shape, np.dtype(tensors[name].dtype)
        if name in roles["offsets"]:
            feeds[name] = np.zeros(dims, dtype)
        elif dtype.kind == "f":
            feeds[name] = rng.standard_normal(dims).astype(dtype)
        else:
            feeds[name] = rng.integers(0, logits.shape[1] if logits is not None else 2, dims).astype(dtype)
    return feeds


def evaluate_step(step: Step, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images whose largest logit is their label's."""
    batch = batch_of(step)
    right = 0
    for start in range(0, len(labels), batch):
        part = images[start : start + batch]
        filled = np.concatenate([part, np.zeros((batch - len(part), *part.shape[1:]), part.dtype)])
        logits = step.evaluate(filled)[: len(part)]
        right += int((logits.argmax(1) == labels[start : start + batch]).sum())
    return right / max(len(labels), 1)


def data_for(step: Step, data: Any) -> Dataset:
    """A data set by name, folder or file, brought to the size of the graph's input and normalised."""
    if isinstance(data, Dataset):
        return data
    _, channels, height, width = image_shape(step)
    if height != width:
        raise BnfuseError(f"the graph takes images of {height}x{width}: give it a Dataset of that size in Python")
    logits = step.program.outputs.get(step.program.roles["logits"] or "")
    classes = logits.shape[1] if logits is not None else None
    return load_data(data, image=height, channels=channels, classes=classes).normalised()


def image_shape(step: Step) -> tuple[int, ...]:
    """The shape of the images that the graph takes: N, C, H, W."""
    shape = step.program.inputs[step.inputs[0]].shape
    if len(shape) != 4:
        raise BnfuseError(f"the graph's input '{step.inputs[0]}' is {list(shape)}: images need N, C, H, W")
    return shape


def batch_of(step: Step) -> int:
    return image_shape(step)[0]
