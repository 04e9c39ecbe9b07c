"""Images and labels, and what is done to all of them alike: splitting, resizing, channels, batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.memory import free_memory

from .reading import Reading, Statistics, given_statistics, sampled
from .resizing import to_images
from .streamed import StreamedImages, taken
from .targets import scored

MAX_BYTES = 1 << 33  # of all images as float32
FREE_SHARE = 0.6  # of the memory that is free, for images


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images float32 [N, C, H, W] (0 to 1 where they came as bytes), labels int64 [N] from 0 to classes - 1. Images
    are arrays, or StreamedImages (streamed.py), which are decoded when they are asked for.

    Of a graph with several inputs for labels they are a structured array, a field for each input, of which the first
    is scored (targets.py).

    `test_x` is held out. It is scored after each epoch and chooses the best one, unless there is `val_x`: then that
    does so, and `test_x` is scored once, at the end.

    `mean` and `std` are those of the training images, one value per channel; nothing is normalised yet. `scale` is what
    the numbers of the source were divided by: 255 where they were bytes.
    """

    train_x: Any  # np.ndarray or StreamedImages, as are the other images
    train_y: np.ndarray
    test_x: Any
    test_y: np.ndarray
    classes: int
    name: str = "data"
    class_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    val_x: Any = None
    val_y: np.ndarray | None = None
    scale: float | None = None
    crop_share: float | None = None  # what images are the middle of, where they are not all of it
    about: tuple[str, ...] = ()  # lines for people: what was read, and what was not

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of an image."""
        c, h, w = self.train_x.shape[1:]
        return c, h, w

    @property
    def held_out(self) -> tuple[Any, np.ndarray]:
        """What is scored after each epoch."""
        return (self.test_x, self.test_y) if self.val_x is None or self.val_y is None else (self.val_x, self.val_y)

    @property
    def final(self) -> tuple[Any, np.ndarray] | None:
        """What is scored once, at the end, if there is such a part."""
        return None if self.val_x is None else (self.test_x, self.test_y)

    @property
    def parts(self) -> dict[str, tuple[Any, np.ndarray]]:
        """Images and labels by the name of their part."""
        found = {"train": (self.train_x, self.train_y), "test": (self.test_x, self.test_y)}
        return found if self.val_x is None or self.val_y is None else {**found, "val": (self.val_x, self.val_y)}

    def normalised(self) -> Dataset:
        """Give the same images with mean 0 and standard deviation 1 in each channel of the training part."""
        mean, std = (np.array(v, np.float32).reshape(1, -1, 1, 1) for v in (self.mean, self.std))
        images: dict[str, Any] = {
            f"{part}_x": x.normalised(self.mean, self.std) if isinstance(x, StreamedImages) else (x - mean) / std
            for part, (x, _) in self.parts.items()
        }
        ones = tuple(1.0 for _ in self.std)
        return dataclasses.replace(self, **images, mean=tuple(0.0 for _ in ones), std=ones, scale=None)


def batches(
    x: np.ndarray, y: np.ndarray, batch: int, *, seed: int, epoch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Make whole batches in an order that (seed, epoch) decides; what is left over waits for the next epoch's order."""
    if not 1 <= batch <= len(x):
        raise BnfuseError(f"{len(x)} images do not fill a batch of {batch}: use a smaller --batch")
    order = np.random.default_rng([seed, epoch]).permutation(len(x))
    for start in range(0, len(x) - batch + 1, batch):
        chosen = order[start : start + batch]
        yield x[chosen], y[chosen]


@dataclasses.dataclass(frozen=True)
class Part:
    """Images of one size as uint8 or float [N, C, H, W], or StreamedImages, and labels [N]. `name` is the source's for
    it."""

    x: Any
    y: np.ndarray
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Raw:
    """What a source gives: the part train, and val and test where it tells them apart itself."""

    parts: Mapping[str, Part]
    class_names: tuple[str, ...] = ()
    scale: float = 255.0  # what the source's numbers are divided by: bytes; 1 where they are none
    notes: tuple[str, ...] = ()
    fitted: bool = False  # whether images have the size that is asked for, cut out as is asked for


def finish(
    raw: Raw, name: str, reading: Reading, *, classes: int | None, held_out: float, mean: Any = None, std: Any = None
) -> Dataset:
    """Check the labels, hold images out where the source has not, and bring all to what a Dataset is."""
    parts = {
        key: dataclasses.replace(part, y=check_all_labels(part.y, len(part.x), name, part.name))
        for key, part in raw.parts.items()
    }
    if len(parts) == 1:
        share = f"{held_out:.0%} of the images, drawn by the seed"
        parts["train"], parts["test"] = split(parts["train"], reading.seed, held_out, name, share)
    elif "test" not in parts:
        parts["test"] = parts.pop("val")
    found = max(int(scored(part.y).max()) for part in parts.values()) + 1
    if scored(parts["train"].y).ndim > 2:  # of which some may be ignored
        found = classes or found
        check_sides(parts["train"].x.shape[2:], reading, name)
    if classes is not None and found > classes:
        raise BnfuseError(
            f"{name}: has {found} classes, the network {classes}: its last layer must give {found} numbers "
            f"(a network that comes with bnfuse does when built with --classes {found})"
        )
    images = in_memory(parts, raw.scale, name, reading, raw.fitted)
    x = images["train"]
    statistics = given_statistics(mean, std, x.shape[1], name) or statistics_of(x, reading.seed)
    data = Dataset(
        train_x=x,
        train_y=parts["train"].y,
        test_x=images["test"],
        test_y=parts["test"].y,
        classes=classes or max(found, len(raw.class_names)),
        name=name,
        class_names=raw.class_names,
        mean=statistics[0],
        std=statistics[1],
        val_x=images.get("val"),
        val_y=parts["val"].y if "val" in parts else None,
        scale=raw.scale,
        crop_share=images["test"].share if isinstance(images["test"], StreamedImages) else reading.share,
    )
    notes = list(raw.notes)
    if "test" in raw.parts and "val" not in raw.parts:
        by = parts["test"].name
        notes.insert(0, f"{name}: {by} chooses the best epoch, for there is no val: its accuracy flatters")
    return dataclasses.replace(data, about=described(data, parts, found, notes))


def in_memory(
    parts: Mapping[str, Part], scale: float, name: str, reading: Reading, fitted: bool = False
) -> dict[str, Any]:
    """Bring the images of all parts to float32 of the size that is asked for; streamed ones are brought to it later.
    `fitted`: the source has done with their size."""
    if any(isinstance(part.x, StreamedImages) for part in parts.values()):
        return {key: part.x for key, part in parts.items()}
    x, image, channels = parts["train"].x, reading.image, reading.channels
    total = sum(len(part.x) for part in parts.values())
    check_memory(total, channels or x.shape[1], image or x.shape[2], image or x.shape[3], name)
    share = None if fitted else reading.share
    return {key: to_images(part.x, scale, image, channels, reading.fit, name, share) for key, part in parts.items()}


def statistics_of(x: Any, seed: int) -> Statistics:
    """Measure mean and standard deviation of each channel; of streamed images by some of them."""
    if isinstance(x, StreamedImages):
        return sampled(x, seed)
    mean, std = x.mean((0, 2, 3), dtype=np.float64), x.std((0, 2, 3), dtype=np.float64)
    return tuple(map(float, mean)), tuple(float(s) if s > 0 else 1.0 for s in std)


def described(data: Dataset, parts: Mapping[str, Part], found: int, notes: Sequence[str]) -> tuple[str, ...]:
    """Tell what was read, in a line, and what is to be noted of it."""
    classes = max(found, len(data.class_names))
    train, held_out = len(data.train_y), len(data.held_out[1])
    by = parts["test" if data.val_y is None else "val"].name
    streamed = "streamed, " if isinstance(data.train_x, StreamedImages) else ""
    line = f"{data.name}: {streamed}{train:,} to train on, {held_out:,} held out ({by}) to choose the best epoch by"
    if data.val_y is not None:
        line += f", {len(data.test_y):,} ({parts['test'].name}) to be scored at the end"
    line += f"; {classes} class{'es' if classes > 1 else ''}"
    if data.classes > classes:
        notes = [*notes, f"{data.name}: has {classes} classes, the network tells {data.classes} apart"]
    lost = np.setdiff1d(np.arange(found), scored(data.train_y))
    if len(lost):
        names = [repr(data.class_names[index]) if data.class_names else str(index) for index in lost[:6]]
        more = f" and {len(lost) - 6} more" if len(lost) > 6 else ""
        notes = [*notes, f"{data.name}: the training part has no image of class {', '.join(names)}{more}"]
    return tuple(" ".join(text.split()) for text in (line, *(f"note: {note}" for note in notes)))


def check_all_labels(y: np.ndarray, count: int, name: str, part: str = "") -> np.ndarray:
    """Check labels. Gives them as int64 [count], none negative. Those of several inputs stay as they are, and what is
    scored is checked. Maps of labels were checked against what the graph takes (targets.py)."""
    if scored(y).ndim > 2:
        return y
    if y.dtype.names is None:
        return check_labels(y, count, name, part)
    check_labels(scored(y), count, name, part)
    return y


def check_labels(y: np.ndarray, count: int, name: str, part: str = "") -> np.ndarray:
    """Check labels. Gives them as int64 [count], none negative."""
    whose = f" of {part}" if part not in ("", "x") else ""
    if y.ndim == 2 and y.shape == (count, 1):
        y = y[:, 0]
    if y.shape != (count,):
        hint = ": take its argmax where it has a column for each class" if y.ndim == 2 else ""
        shape = list(y.shape)
        raise BnfuseError(f"{name}: has {count} images{whose} but labels of shape {shape}: it needs one for each{hint}")
    if y.dtype.kind not in "iub":
        raise BnfuseError(f"{name}: its labels{whose} are {y.dtype}: they must be integers")
    if count == 0:
        raise BnfuseError(f"{name}: has no images{whose}")
    if int(y.min()) < 0 or int(y.max()) > 1 << 20:
        raise BnfuseError(f"{name}: has labels{whose} from {y.min()} to {y.max()}: they must count classes from 0")
    return y.astype(np.int64)


def fits_memory(count: int, channels: int, height: int, width: int) -> bool:
    """Tell whether all images fit into memory as float32: into what is held at the most, and into what is free now."""
    size, free = 4 * count * channels * height * width, free_memory()
    return size <= MAX_BYTES and (free is None or size <= FREE_SHARE * free)


def check_memory(count: int, channels: int, height: int, width: int, name: str) -> None:
    """Check that all images fit into memory as float32."""
    size = 4 * count * channels * height * width
    if size > MAX_BYTES:
        raise BnfuseError(
            f"{name}: {count} images of {channels}x{height}x{width} take {size / 2**30:.3g} GiB as float32, more than "
            f"the {MAX_BYTES >> 30} GiB that are held: use fewer images, or smaller ones (--image)"
        )


def check_sides(sides: tuple[int, ...], reading: Reading, name: str) -> None:
    """Check that images with maps of labels need no resizing and are not cut out: the maps would have to follow."""
    image = reading.image
    if reading.share is not None:
        raise BnfuseError(f"{name}: has labels of pixels, which a crop share would have to cut out too: leave it out")
    if image is not None and sides != (image, image):
        raise BnfuseError(
            f"{name}: has images of {sides[0]}x{sides[1]} with labels of pixels, the graph takes {image}x{image}: "
            "bring both to that size"
        )


def split(part: Part, seed: int, held_out: float, name: str, test_name: str) -> tuple[Part, Part]:
    """Split off a share of `held_out` images, chosen by the seed alone, for testing."""
    count = len(part.x)
    if count < 2 or not 0 < held_out < 1:
        raise BnfuseError(f"{name}: {count} images cannot be split: it takes two, and a share between 0 and 1")
    order = np.random.default_rng(seed).permutation(count)
    test = min(max(1, round(count * held_out)), count - 1)
    first, second = order[test:], order[:test]
    return Part(taken(part.x, first), part.y[first], part.name), Part(taken(part.x, second), part.y[second], test_name)
