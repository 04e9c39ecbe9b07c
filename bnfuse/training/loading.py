"""Batches of the training part: shuffle, gather or decode, augment, normalise.

    loader = Loader(data, batch=64, seed=0, augment=parse_augment("flip"), normalise=True)
    with prefetched(loader.batches(first=1, last=10)) as batches:
        for batch in batches: ...                            # batch.x, batch.y, batch.epoch, batch.index

What a batch holds depends on (seed, epoch) and its place in the epoch alone. Images that are decoded, or changed as
pictures, are made by several workers, a few of them each; of what lies in memory one thread makes whole batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.data import Dataset
from bnfuse.data.augment import Augment
from bnfuse.data.loaders import LoadedImages
from bnfuse.data.making import Maker
from bnfuse.data.pieces import batches_made
from bnfuse.data.streamed import StreamedImages
from bnfuse.data.targets import scored


@dataclasses.dataclass(frozen=True)
class Batch:
    """Images float32 [B, C, H, W] and labels int64 [B], and where in the run they stand."""

    epoch: int  # from 1
    index: int  # in the epoch, from 0
    x: np.ndarray
    y: np.ndarray
    all_y: np.ndarray | None = None  # of several ranks: the labels of the batch that theirs make up, in its order


@dataclasses.dataclass(frozen=True)
class Loader:
    """Batches of the training part. Images that fill no batch are a smaller one at the end of the epoch where `partial`
    says so, else they wait for the next epoch's order. What changes whole batches, as mixing images does, goes around
    `batches`, by the epoch and the index of each.

    Of `size` ranks each makes its part of every batch: in their order the parts are the batch of `size` times `batch`
    images that one process would make."""

    data: Dataset
    batch: int
    seed: int = 0
    augment: Augment = dataclasses.field(default_factory=Augment)
    normalise: bool = False  # by the data's mean and std, in front of the augmentation: its padding is the mean
    partial: bool = False
    workers: int = 1
    rank: int = 0
    size: int = 1  # how many ranks there are

    def __post_init__(self) -> None:
        count = len(self.data.train_y)
        if not self.partial and not 1 <= self.whole <= count:
            what = f"{self.whole} ({self.size} ranks of {self.batch})" if self.size > 1 else f"{self.batch}"
            most = f"{count // self.size} or less" if self.size <= count else "1, for fewer ranks"
            raise BnfuseError(
                f"{self.data.name}: {count} images do not fill a batch of {what}, and the graph's batch is fixed"
                f": build it with --batch {most}"
            )
        if self.partial and count % self.whole % self.size:
            raise BnfuseError(
                f"{self.data.name}: the last {count % self.whole} images of an epoch cannot be dealt to {self.size} "
                "ranks alike: leave them out with --last-batch drop, or take another number of ranks"
            )
        require_colours(self.data, self.augment)
        self._check_loaded()

    @property
    def whole(self) -> int:
        """How many images the parts of all ranks have together."""
        return self.batch * self.size

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return len(self.data.train_y) // self.whole + (self.rest > 0)

    @property
    def rest(self) -> int:
        """Size of the smaller batch at the end of an epoch, of this rank's part of it; 0 where there is none."""
        return len(self.data.train_y) % self.whole // self.size if self.partial else 0

    def images(self, steps: int) -> int:
        """How many images the first `steps` steps of an epoch have, of all ranks."""
        return min(steps * self.whole, len(self.data.train_y))

    @property
    def about(self) -> str:
        """What an epoch is, in a line."""
        rest, full = len(self.data.train_y) % self.whole, len(self.data.train_y) // self.whole
        of = f"{self.whole} ({self.size} ranks of {self.batch})" if self.size > 1 else f"{self.batch}"
        if self.rest:
            return f"{full} batch{'' if full == 1 else 'es'} of {of} and one of {self.rest * self.size} an epoch"
        whole = f"{self.steps} batch{'' if self.steps == 1 else 'es'} of {of} an epoch"
        waiting = "1 image waits" if rest == 1 else f"{rest} images wait"
        return f"{whole}; {waiting} for the next epoch's order" if rest else whole

    @property
    def maker(self) -> Maker:
        """What makes the images."""
        statistics = (self.data.mean, self.data.std) if self.normalise else None
        return Maker(self.data.train_x, self.augment, self.seed, statistics)

    @property
    def by_workers(self) -> bool:
        """Whether several make the images of a batch: those that are decoded, or changed as pictures."""
        return self.maker.one_by_one

    def order(self, epoch: int) -> np.ndarray:
        """Shuffle the images of an epoch: the order of `bnfuse.data.batches`."""
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.data.train_y))

    def batches(self, first: int, last: int, skip: int = 0) -> Iterator[Batch]:
        """Make all batches from epoch `first`, without its first `skip`, to epoch `last`."""
        if isinstance(self.data.train_x, LoadedImages):
            return self._loaded(self.data.train_x, first, last, skip)
        return self._by_workers(first, last, skip) if self.by_workers else self._in_memory(first, last, skip)

    def _check_loaded(self) -> None:
        """Raise where a DataLoader of torch does not fit: its batches are its own, and so is what is done to images."""
        x = self.data.train_x
        if not isinstance(x, LoadedImages):
            return
        if self.size > 1:
            raise BnfuseError(
                f"{x.name}: does not tell which images are in a batch, so {self.size} ranks cannot share it: give the "
                "images as a folder, a file or arrays"
            )
        if x.batch not in (None, self.batch):
            raise BnfuseError(
                f"{x.name}: gives batches of {x.batch}, the graph takes {self.batch}: give it batch_size={self.batch}"
            )
        if self.augment != Augment():
            raise BnfuseError(f"{x.name}: its own transforms change images: leave --augment {self.augment} out")

    def _loaded(self, images: LoadedImages, first: int, last: int, skip: int) -> Iterator[Batch]:
        """Take batches as a DataLoader gives them; its last one, where it is smaller and `partial` does not say so, is
        left out."""
        for epoch in range(first, last + 1):
            count = 0
            for index, (x, y) in enumerate(images.epoch(self.seed, epoch)):
                if index >= self.steps:
                    break
                wanted = self.rest if self.rest and index == self.steps - 1 else self.batch
                if len(x) != wanted:
                    raise BnfuseError(f"{images.name}: gives {len(x)} images where a batch has {wanted}")
                count += 1
                if epoch > first or index >= skip:
                    yield Batch(epoch, index, x, y)
            if count < self.steps:
                raise BnfuseError(
                    f"{images.name}: gave {count} batches in epoch {epoch}, and {self.steps} are expected"
                )

    def places(self, first: int, last: int, skip: int = 0) -> Iterator[tuple[int, int, np.ndarray]]:
        """List epoch, index and the images of each batch, those of all ranks."""
        for epoch in range(first, last + 1):
            order = self.order(epoch)
            for index in range(skip if epoch == first else 0, self.steps):
                yield epoch, index, order[index * self.whole : (index + 1) * self.whole]

    def part(self, chosen: np.ndarray) -> np.ndarray:
        """Give this rank's part of the places of a batch."""
        count = len(chosen) // self.size
        return chosen[self.rank * count : (self.rank + 1) * count]

    def _made(self, epoch: int, index: int, chosen: np.ndarray, x: np.ndarray) -> Batch:
        """Put the images of this rank's part and its labels together."""
        everyone = self.data.train_y[chosen] if self.size > 1 and scored(self.data.train_y[:1]).ndim == 1 else None
        return Batch(epoch, index, x, self.labels(self.part(chosen), epoch), everyone)

    def _in_memory(self, first: int, last: int, skip: int) -> Iterator[Batch]:
        for epoch, index, chosen in self.places(first, last, skip):
            yield self._made(epoch, index, chosen, self.maker.made(self.part(chosen), epoch))

    def _by_workers(self, first: int, last: int, skip: int) -> Iterator[Batch]:
        places = self.places(first, last, skip)
        wanted = (((epoch, index, chosen), self.part(chosen), epoch) for epoch, index, chosen in places)
        for (epoch, index, chosen), _, x in batches_made(self.maker, self.workers, self.batch, wanted):
            yield self._made(epoch, index, chosen, x)

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


def require_colours(data: Dataset, augment: Augment) -> None:
    """Raise where a change takes numbers for colours that nobody says are any."""
    if not augment.changes_colours or isinstance(data.train_x, StreamedImages):
        return
    if data.scale in (None, 1.0) or data.train_x.shape[1] not in (1, 3):
        raise BnfuseError(
            f"{data.name}: 'jitter' and 'rand-augment' change colours, and nothing says that its numbers go from black "
            "to white: give images as bytes, of one channel or three, or a folder of them"
        )


def fed(data: Dataset, images: np.ndarray, normalise: bool) -> np.ndarray:
    """Give images as the step takes them: float32, by the data's mean and std where `normalise` says so."""
    if not normalise:
        return images
    mean, std = (np.array(v, np.float32).reshape(1, -1, 1, 1) for v in (data.mean, data.std))
    return (images - mean) / std
