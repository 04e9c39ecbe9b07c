"""Batches, made by a thread while the step computes: shuffle, gather, normalise, augment.

    loader = Loader(data, batch=64, seed=0, augment=parse_augment("flip"), normalise=True)
    with prefetched(loader.batches(first=1, last=10)) as batches:
        for batch in batches: ...                            # batch.x, batch.y, batch.epoch, batch.index

What a batch holds depends on (seed, epoch) and its place in the epoch alone. The queue is bounded, the thread ends
with the `with` block whatever ends that, and an error in the thread is raised where the batch would have come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.data import Dataset
from bnfuse.data.targets import scored
from bnfuse.training.augment import Augment

T = TypeVar("T")
DEPTH = 3  # batches that wait
PATIENCE = 0.1  # seconds after which a thread that waits looks whether it is still wanted


@dataclasses.dataclass(frozen=True)
class Batch:
    """Images float32 [B, C, H, W] and labels int64 [B], and where in the run they stand."""

    epoch: int  # from 1
    index: int  # in the epoch, from 0
    x: np.ndarray
    y: np.ndarray


@dataclasses.dataclass(frozen=True)
class Loader:
    """Batches of the training part. Images that fill no batch are a smaller one at the end of the epoch where `partial`
    says so, else they wait for the next epoch's order."""

    data: Dataset
    batch: int
    seed: int = 0
    augment: Augment = dataclasses.field(default_factory=Augment)
    normalise: bool = False  # by the data's mean and std, in front of the augmentation: its padding is the mean
    partial: bool = False

    def __post_init__(self) -> None:
        if not self.partial and not 1 <= self.batch <= len(self.data.train_y):
            count = len(self.data.train_y)
            raise BnfuseError(
                f"{self.data.name}: {count} images do not fill a batch of {self.batch}, and the graph's batch is fixed"
                f": build it with --batch {count} or less"
            )

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return len(self.data.train_y) // self.batch + (self.rest > 0)

    @property
    def rest(self) -> int:
        """Size of the smaller batch at the end of an epoch; 0 where there is none."""
        return len(self.data.train_y) % self.batch if self.partial else 0

    def images(self, steps: int) -> int:
        """How many images the first `steps` steps of an epoch have."""
        return min(steps * self.batch, len(self.data.train_y))

    @property
    def about(self) -> str:
        """What an epoch is, in a line."""
        rest, full = len(self.data.train_y) % self.batch, len(self.data.train_y) // self.batch
        if self.rest:
            return f"{full} batch{'' if full == 1 else 'es'} of {self.batch} and one of {self.rest} an epoch"
        whole = f"{self.steps} batch{'' if self.steps == 1 else 'es'} of {self.batch} an epoch"
        waiting = "1 image waits" if rest == 1 else f"{rest} images wait"
        return f"{whole}; {waiting} for the next epoch's order" if rest else whole

    def order(self, epoch: int) -> np.ndarray:
        """Shuffle the images of an epoch: the order of `bnfuse.data.batches`."""
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.data.train_y))

    def batches(self, first: int, last: int, skip: int = 0) -> Iterator[Batch]:
        """Make all batches from epoch `first`, without its first `skip`, to epoch `last`."""
        for epoch in range(first, last + 1):
            order = self.order(epoch)
            for index in range(skip if epoch == first else 0, self.steps):
                chosen = order[index * self.batch : (index + 1) * self.batch]
                x = fed(self.data, self.data.train_x[chosen], self.normalise)
                x = self.augment(x, chosen, seed=self.seed, epoch=epoch)
                yield Batch(epoch, index, np.ascontiguousarray(x), self.labels(chosen, epoch))

    def labels(self, chosen: np.ndarray, epoch: int) -> np.ndarray:
        """Give the labels of images; those of pixels are mirrored where the images are."""
        y = self.data.train_y[chosen]
        if scored(y).ndim < 3 or not self.augment.flip:
            return y
        mirrored = Augment(flip=True)
        if y.dtype.names is None:
            return np.ascontiguousarray(mirrored(y[:, None], chosen, seed=self.seed, epoch=epoch)[:, 0])
        for name in y.dtype.names:
            if y[name].ndim > 2:
                y[name] = mirrored(y[name][:, None], chosen, seed=self.seed, epoch=epoch)[:, 0]
        return y


def fed(data: Dataset, images: np.ndarray, normalise: bool) -> np.ndarray:
    """Give images as the step takes them: float32, by the data's mean and std where `normalise` says so."""
    if not normalise:
        return images
    mean, std = (np.array(v, np.float32).reshape(1, -1, 1, 1) for v in (data.mean, data.std))
    return (images - mean) / std


@contextlib.contextmanager
def prefetched(source: Iterable[T], depth: int = DEPTH) -> Iterator[Iterator[T]]:
    """Make the items of `source`, in order, up to `depth` of them ahead by a thread."""
    ready: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(depth)
    unwanted = threading.Event()

    def offer(kind: str, item: T | BaseException | None) -> bool:
        while not unwanted.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((kind, item), timeout=PATIENCE)
                return True
        return False

    def work() -> None:
        try:
            for item in source:
                if not offer("item", item):
                    return
            offer("end", None)
        except BaseException as error:
            offer("error", error)

    def items() -> Iterator[T]:
        while True:
            kind, item = ready.get()
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(item, BaseException)
                raise item
            yield item  # type: ignore[misc]

    thread = threading.Thread(target=work, name="bnfuse-loader", daemon=True)
    thread.start()
    try:
        yield items()
    finally:
        unwanted.set()
        with contextlib.suppress(queue.Empty):
            while True:
                ready.get_nowait()
        thread.join(timeout=10)
