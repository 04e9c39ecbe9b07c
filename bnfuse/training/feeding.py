"""What a step is fed with: data of its size, random batches, and how well it does on images held out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from bnfuse.data import Dataset, batches, load_data
from bnfuse.errors import BnfuseError
from bnfuse.training.loading import fed, prefetched

if TYPE_CHECKING:
    from bnfuse.runtime import Step


def run_steps(step: Step, data: Any, *, steps: int, seed: int = 0) -> list[float]:
    """The losses of `steps` steps, on shuffled batches of the data or on one random batch."""
    if data is None:
        feeds = random_feeds(step, np.random.default_rng(seed))
        return [step(*(feeds[name] for name in step.inputs)) for _ in range(steps)]
    found = data_for(step, data)
    epochs = (batches(found.train_x, found.train_y, batch_of(step), seed=seed, epoch=e) for e in itertools.count(1))
    return [step(x, y) for x, y in itertools.islice(itertools.chain.from_iterable(epochs), steps)]


def random_feeds(step: Step, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Standard normal images, labels over all classes."""
    tensors = step.program.inputs
    logits = step.program.outputs.get(step.program.roles["logits"] or "")
    feeds: dict[str, np.ndarray] = {}
    for name in step.inputs:
        dims, dtype = tensors[name].shape, np.dtype(tensors[name].dtype)
        if dtype.kind == "f":
            feeds[name] = rng.standard_normal(dims).astype(dtype)
        else:
            feeds[name] = rng.integers(0, logits.shape[1] if logits is not None else 2, dims).astype(dtype)
    return feeds


def evaluate_step(step: Step, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images whose largest logit is their label's. Every image counts once: the last batch is filled up,
    and what filled it is not counted."""
    return evaluate_batches(step, filled_batches(images, labels, batch_of(step)), len(labels))


def evaluate_data(step: Step, data: Dataset, *, normalise: bool = False) -> float:
    """The same on the held-out part, normalised by the way."""
    parts = filled_batches(data.test_x, data.test_y, batch_of(step))
    made = ((fed(data, x, normalise), y) for x, y in parts)
    return evaluate_batches(step, made, len(data.test_y))


def evaluate_batches(step: Step, parts: Iterator[tuple[np.ndarray, np.ndarray]], count: int) -> float:
    right = 0
    with prefetched(parts) as ready:
        for x, y in ready:
            logits = step.evaluate(x)[: len(y)]
            right += int((logits.argmax(1) == y).sum())
    return right / max(count, 1)


def filled_batches(images: np.ndarray, labels: np.ndarray, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """In order; the images of the last batch are filled up with zeros, its labels are not."""
    for start in range(0, len(labels), batch):
        part = images[start : start + batch]
        missing = batch - len(part)
        if missing:
            part = np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)])
        yield part, labels[start : start + batch]


def data_for(step: Step, data: Any) -> Dataset:
    """A data set by name, folder or file, brought to the size of the graph's input and normalised."""
    return data if isinstance(data, Dataset) else raw_data_for(step, data).normalised()


def raw_data_for(step: Step, data: Any) -> Dataset:
    """The same, not normalised yet."""
    _, channels, height, width = image_shape(step)
    if height != width:
        raise BnfuseError(f"the graph takes images of {height}x{width}: give it a Dataset of that size in Python")
    logits = step.program.outputs.get(step.program.roles["logits"] or "")
    classes = logits.shape[1] if logits is not None else None
    return load_data(data, image=height, channels=channels, classes=classes)


def fed_statistics(data: Dataset, normalise: bool = False) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation, channel by channel, of the training images as they are fed: mu_D and sigma_D of
    virtual samples (papers/001, section 4.2)."""
    count = data.train_x.shape[0] * data.train_x.shape[2] * data.train_x.shape[3]
    parts = [data.train_x[start : start + 4096] for start in range(0, len(data.train_x), 4096)]
    mean = sum(fed(data, part, normalise).sum((0, 2, 3), dtype=np.float64) for part in parts) / count
    if not np.isfinite(mean).all():
        raise BnfuseError(f"{data.name}: holds images that are not finite: virtual samples cannot be drawn like them")
    wide = np.reshape(mean, (1, -1, 1, 1))
    squares = (np.square(fed(data, part, normalise) - wide).sum((0, 2, 3)) for part in parts)
    std = np.sqrt(sum(squares) / count)
    return tuple(map(float, np.ravel(mean))), tuple(map(float, np.ravel(std)))


def image_shape(step: Step) -> tuple[int, ...]:
    """The shape of the images that the graph takes: N, C, H, W."""
    shape = step.program.inputs[step.inputs[0]].shape
    if len(shape) != 4:
        raise BnfuseError(f"the graph's input '{step.inputs[0]}' is {list(shape)}: images need N, C, H, W")
    return shape


def batch_of(step: Step) -> int:
    return image_shape(step)[0]
