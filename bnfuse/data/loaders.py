"""DataLoaders of torch as data: what they give is fed as it is, in their order, epoch by epoch.

    data = dataset_of((train_loader, val_loader), taken.shape, taken.targets)

What a DataLoader draws (its order, its transforms, the seeds of its workers) is drawn from (seed, epoch), unless it has
a generator of its own. It is read by one thread ahead of the step; who decodes and in how many processes is its own
affair.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.fromtorch.seeding import seeded
from bnfuse.fromtorch.tensors import as_array

from .dataset import Dataset
from .targets import Target, are_alike, checked

PARTS = ("train", "val", "test")


def is_loader(data: Any) -> bool:
    """Tell whether something is a DataLoader, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.utils.data.DataLoader)


def loaders_in(data: Any) -> dict[str, Any] | None:
    """Give DataLoaders by the part that they are: of one, of a sequence in the order train, val, test, or of a mapping.
    None where `data` is something else. Raises BnfuseError for parts that are none."""
    if is_loader(data):
        return {"train": data}
    if isinstance(data, Mapping) and data and all(map(is_loader, data.values())):
        found = dict(data)
    elif isinstance(data, tuple | list) and data and all(map(is_loader, data)):
        if len(data) > len(PARTS):
            raise BnfuseError(f"{len(data)} DataLoaders are given: they are those of {', '.join(PARTS)}")
        found = dict(zip(PARTS, data, strict=False))
    else:
        return None
    if "train" not in found or set(found) - set(PARTS):
        raise BnfuseError(f"DataLoaders are given as {', '.join(map(str, found))}: they are train, and val and test")
    return found


@dataclasses.dataclass(frozen=True)
class LoadedImages:
    """Images float32 [N, C, H, W] that a DataLoader gives with their labels: none of them can be asked for alone."""

    loader: Any
    image: tuple[int, ...]  # C, H, W
    target: Target
    name: str

    def __len__(self) -> int:
        return samples_of(self.loader, self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Give N, C, H, W."""
        return len(self), *self.image

    @property
    def dtype(self) -> np.dtype[Any]:
        """Give the type of what is fed."""
        return np.dtype(np.float32)

    @property
    def batch(self) -> int | None:
        """How many images the DataLoader gives at once, where it says so."""
        return getattr(self.loader, "batch_size", None)

    @property
    def identity(self) -> str:
        """Tell which data these are, as far as a DataLoader tells."""
        kind = type(self.loader.dataset)
        return f"{kind.__module__}.{kind.__qualname__} {len(self.loader.dataset)} {self.batch} {self.shape}"

    @property
    def repeats(self) -> bool:
        """Whether an epoch can be drawn a second time: nothing that it draws by has a memory of its own."""
        loader = self.loader
        own = loader.generator is not None or getattr(loader.sampler, "generator", None) is not None
        return not own and not loader.persistent_workers

    def epoch(self, seed: int, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Give the batches of one epoch, drawn from (seed, epoch)."""
        with seeded(seed, epoch):
            yield from self.all()

    def all(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Give images and labels, batch by batch. Raises BnfuseError where they are none that the graph takes."""
        for batch in self.loader:
            yield self._taken(batch)

    def look(self) -> None:
        """Make the first image and look at it, before any work: raises BnfuseError where it does not fit. A DataLoader
        that collates in ways of its own is looked at when its batches come."""
        if self.batch is not None and len(self):
            with seeded(0):
                self._taken(self.loader.collate_fn([self.loader.dataset[0]]))

    def _taken(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            what = f"{len(batch)} things" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
            raise BnfuseError(f"{self.name}: gives {what} at a time: it must give (images, labels)")
        x, y = (as_array(part, f"{self.name}: what it gives") for part in batch)
        if x.dtype.kind != "f" or x.shape[1:] != self.image:
            raise BnfuseError(
                f"{self.name}: gives images {x.dtype} {list(x.shape)}, the graph takes float32 [N, "
                f"{', '.join(map(str, self.image))}]: its transforms decide that"
            )
        labels = checked(y, self.target, len(x), f"{self.name}: its labels")
        return np.ascontiguousarray(x, np.float32), labels


def samples_of(loader: Any, name: str) -> int:
    """Tell how many images an epoch of a DataLoader has. Raises BnfuseError where nothing says so."""
    torch = sys.modules["torch"]
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise BnfuseError(
            f"{name}: is of an IterableDataset, whose length nothing says: compile the graph and call the step, "
            "loss = step(images, labels)"
        )
    if loader.batch_size is None or loader.drop_last:
        return len(loader) * (loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0) or 0)
    return len(loader.sampler)


def dataset_of(
    loaders: Mapping[str, Any], shape: Sequence[Any], targets: Sequence[Target], *, held_out: bool = False
) -> Dataset:
    """Make a Dataset of DataLoaders by their parts, for a graph that takes images of `shape` [N, C, H, W].

    With `held_out` a single DataLoader is what is scored; else it is what is trained on, and nothing is held out.
    """
    if len(targets) > 1 and not are_alike(targets):
        each = ", ".join(map(str, targets))
        raise BnfuseError(f"a DataLoader gives one label for each image, the graph takes {each}: call the step")
    image = tuple(shape[1:])
    given = {"test": loaders["train"]} if held_out and len(loaders) == 1 else dict(loaders)
    if "val" in given and "test" not in given:
        given["test"] = given.pop("val")
    names = {part: f"the DataLoader of {part}" if len(loaders) > 1 else "the DataLoader" for part in given}
    found = {part: LoadedImages(loader, image, targets[0], names[part]) for part, loader in given.items()}
    for images in found.values():
        images.look()
    nothing = np.zeros((0, *image), np.float32), np.zeros(0, np.int64)
    train, test = (
        (found[part], unknown_labels(found[part])) if part in found else nothing for part in ("train", "test")
    )
    return Dataset(
        train_x=train[0],
        train_y=train[1],
        test_x=test[0],
        test_y=test[1],
        classes=targets[0].classes or 0,
        name="the DataLoaders" if len(loaders) > 1 else "the DataLoader",
        val_x=found.get("val"),
        val_y=unknown_labels(found["val"]) if "val" in found else None,
        about=tuple(f"{names[part]}: {len(images):,} images, as it gives them" for part, images in found.items()),
    )


def unknown_labels(images: LoadedImages) -> np.ndarray:
    """Stand in for labels that are known when they come: as many, of their shape and type, all 0."""
    zero = np.zeros((), images.target.dtype)
    return np.broadcast_to(zero, (len(images), *images.target.shape))
