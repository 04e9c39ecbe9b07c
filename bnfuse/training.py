"""The training loop: shuffle, step, and after each epoch the accuracy on images held out.

    history = train_step(step, data, epochs=10, lr=0.1)

`step` is compiled; `data` has images [N, C, H, W] float32 and labels [N], for training and held out. The batch is the
graph's; images that do not fill the last batch of an epoch wait for the next shuffle. Evaluation counts every held-out
image once: its last batch is filled up, and what filled it is not counted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnfuse.errors import BnfuseError
from bnfuse.text import Section, join

if TYPE_CHECKING:
    from bnfuse.data import Data
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
    data: Data,
    *,
    epochs: int,
    lr: float | None = None,
    cosine: bool = True,
    seed: int = 0,
    save_to: Path | None = None,
    progress: Progress = lambda _: None,
) -> History:
    """Trains in place. The learning rate falls from `lr` (the optimiser's) to 0 along a cosine, or stays."""
    inputs = step.program.inputs
    batch = check_data(step, data)
    if len(data.train_labels) < batch:
        raise BnfuseError(
            f"{len(data.train_labels)} training images do not fill one batch of {batch}. Build it with a smaller --batch."
        )
    rng = np.random.default_rng(seed)
    first = step.lr if lr is None else lr
    steps = len(data.train_labels) // batch
    done = []
    for epoch in range(1, epochs + 1):
        start, losses = time.perf_counter(), []
        for index, chosen in enumerate(batches(len(data.train_labels), batch, rng)):
            if cosine:
                step.lr = first * 0.5 * (1 + np.cos(np.pi * ((epoch - 1) * steps + index) / (epochs * steps)))
            losses.append(
                step(data.train_images[chosen], data.train_labels[chosen].astype(inputs[step.inputs[1]].dtype))
            )
        if not np.isfinite(losses[-1]):
            raise BnfuseError(
                f"the loss is {losses[-1]} in epoch {epoch}: the learning rate {first:g} is too high. Pass a smaller --lr."
            )
        accuracy = evaluate_step(step, data.test_images, data.test_labels)
        done.append(Epoch(epoch, float(np.mean(losses)), accuracy, step.lr, time.perf_counter() - start))
        progress(
            f"epoch {epoch} of {epochs}: loss {done[-1].loss:.4f}, {100 * accuracy:.2f} % of {len(data.test_labels)} held-out images right"
        )
        if save_to is not None:
            step.save(save_to)
    return History(tuple(done), len(data.train_labels), len(data.test_labels))


def run_steps(step: Step, data: Any, *, steps: int, seed: int = 0) -> list[float]:
    """The losses of `steps` steps, on shuffled batches of the data or on one random batch."""
    rng = np.random.default_rng(seed)
    if data is None:
        feeds = random_feeds(step, rng)
        return [step(*(feeds[name] for name in step.inputs)) for _ in range(steps)]
    data = data_for(step, data)
    losses: list[float] = []
    while len(losses) < steps:
        for chosen in batches(len(data.train_labels), check_data(step, data), rng):
            losses.append(step(data.train_images[chosen], data.train_labels[chosen]))
            if len(losses) == steps:
                break
    return losses


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


def batches(count: int, batch: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Indices of whole batches, in a random order."""
    order = rng.permutation(count)
    for start in range(0, count - batch + 1, batch):
        yield order[start : start + batch]


def evaluate_step(step: Step, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images whose largest logit is their label's."""
    batch = step.program.inputs[step.inputs[0]].shape[0]
    right = 0
    for start in range(0, len(labels), batch):
        part = images[start : start + batch]
        filled = np.concatenate([part, np.zeros((batch - len(part), *part.shape[1:]), part.dtype)])
        logits = step.evaluate(filled)[: len(part)]
        right += int((logits.argmax(1) == labels[start : start + batch]).sum())
    return right / max(len(labels), 1)


def check_data(step: Step, data: Data) -> int:
    """That the images fit the graph's input and the labels its classes; the batch."""
    shape = step.program.inputs[step.inputs[0]].shape
    found = data.train_images.shape[1:]
    if tuple(found) != tuple(shape[1:]):
        raise BnfuseError(
            f"{data.name}: its images are {list(found)}, the graph takes {list(shape[1:])} (channels, height, width)"
        )
    return shape[0]
