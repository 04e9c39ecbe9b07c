"""Images and labels in memory, and what is done to all of them alike: splitting, resizing, channels, batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from bnfuse.errors import BnfuseError

MAX_BYTES = 1 << 33  # of all images as float32


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images float32 [N, C, H, W] (0 to 1 where they came as bytes), labels int64 [N] from 0 to classes - 1.

    `mean` and `std` are those of the training images, one value per channel; nothing is normalised yet.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int
    name: str = "data"
    class_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of an image."""
        c, h, w = self.train_x.shape[1:]
        return c, h, w

    def normalised(self) -> Dataset:
        """The same images with mean 0 and standard deviation 1 in each channel of the training part."""
        mean, std = (np.array(v, np.float32).reshape(1, -1, 1, 1) for v in (self.mean, self.std))
        train_x, test_x = ((x - mean) / std for x in (self.train_x, self.test_x))
        ones = tuple(1.0 for _ in self.std)
        return dataclasses.replace(self, train_x=train_x, test_x=test_x, mean=tuple(0.0 for _ in ones), std=ones)


def batches(
    x: np.ndarray, y: np.ndarray, batch: int, *, seed: int, epoch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Whole batches in an order that (seed, epoch) decides; what is left over waits for the next epoch's order."""
    if not 1 <= batch <= len(x):
        raise BnfuseError(f"{len(x)} images do not fill a batch of {batch}: use a smaller --batch")
    order = np.random.default_rng([seed, epoch]).permutation(len(x))
    for start in range(0, len(x) - batch + 1, batch):
        chosen = order[start : start + batch]
        yield x[chosen], y[chosen]


@dataclasses.dataclass(frozen=True)
class Raw:
    """What a source gives: images of any size as uint8 or float [N, C, H, W], with its own test part or none."""

    x: np.ndarray
    y: np.ndarray
    test: tuple[np.ndarray, np.ndarray] | None = None
    class_names: tuple[str, ...] = ()
    scale: float = 255.0  # what a byte is divided by


def finish(
    raw: Raw,
    name: str,
    *,
    image: int | None,
    channels: int | None,
    classes: int | None,
    fit: str,
    seed: int,
    held_out: float,
) -> Dataset:
    """Checks, splits, converts."""
    x, y = raw.x, check_labels(raw.y, len(raw.x), name)
    test_x, test_y = (raw.test[0], check_labels(raw.test[1], len(raw.test[0]), name)) if raw.test else (None, None)
    if test_x is None or test_y is None:
        (x, y), (test_x, test_y) = split(x, y, seed, held_out, name)
    check_memory(len(x) + len(test_x), channels or x.shape[1], image or x.shape[2], image or x.shape[3], name)
    found = int(max(y.max(), test_y.max())) + 1
    if classes is not None and found > classes:
        raise BnfuseError(f"{name}: has {found} classes, the network {classes}: build it with --classes {found}")
    x, test_x = (to_images(part, raw.scale, image, channels, fit) for part in (x, test_x))
    mean, std = x.mean((0, 2, 3), dtype=np.float64), x.std((0, 2, 3), dtype=np.float64)
    return Dataset(
        train_x=x,
        train_y=y,
        test_x=test_x,
        test_y=test_y,
        classes=classes or max(found, len(raw.class_names)),
        name=name,
        class_names=raw.class_names,
        mean=tuple(map(float, mean)),
        std=tuple(float(s) if s > 0 else 1.0 for s in std),
    )


def check_labels(y: np.ndarray, count: int, name: str) -> np.ndarray:
    """int64 [count], none negative."""
    if y.shape != (count,):
        raise BnfuseError(f"{name}: has {count} images but labels of shape {list(y.shape)}: it needs one for each")
    if y.dtype.kind not in "iu":
        raise BnfuseError(f"{name}: its labels are {y.dtype}: they must be integers")
    if count == 0:
        raise BnfuseError(f"{name}: has no images")
    if int(y.min()) < 0 or int(y.max()) > 1 << 20:
        raise BnfuseError(f"{name}: has labels from {y.min()} to {y.max()}: they must count classes from 0")
    return y.astype(np.int64)


def check_memory(count: int, channels: int, height: int, width: int, name: str) -> None:
    size = 4 * count * channels * height * width
    if size > MAX_BYTES:
        raise BnfuseError(
            f"{name}: {count} images of {channels}x{height}x{width} take {size / 2**30:.0f} GiB: use a smaller --image"
        )


def split(
    x: np.ndarray, y: np.ndarray, seed: int, held_out: float, name: str
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """A share of `held_out` images, chosen by the seed alone, is for testing."""
    if len(x) < 2 or not 0 < held_out < 1:
        raise BnfuseError(f"{name}: {len(x)} images cannot be split: it takes two, and a share between 0 and 1")
    order = np.random.default_rng(seed).permutation(len(x))
    test = min(max(1, round(len(x) * held_out)), len(x) - 1)
    train = order[test:]
    return (x[train], y[train]), (x[order[:test]], y[order[:test]])


def to_images(x: np.ndarray, scale: float, image: int | None, channels: int | None, fit: str) -> np.ndarray:
    """float32 [N, channels, image, image]; bytes are divided by `scale`."""
    x = x.astype(np.float32) / np.float32(scale) if x.dtype == np.uint8 else x.astype(np.float32)
    if channels is not None:
        x = to_channels(x, channels)
    if image is not None and x.shape[2:] != (image, image):
        x = pad(x, image) if fit == "pad" else resize(x, image)
    return np.ascontiguousarray(x)


def to_channels(x: np.ndarray, channels: int) -> np.ndarray:
    """Grey to colour by repetition, colour to grey by ITU-R BT.601 luminance."""
    have = x.shape[1]
    if have == channels:
        return x
    if have == 1:
        return np.repeat(x, channels, axis=1)
    if have == 3 and channels == 1:
        return np.tensordot(np.array([[0.299, 0.587, 0.114]], np.float32), x, (1, 1)).transpose(1, 0, 2, 3)
    raise BnfuseError(f"images of {have} channels do not become images of {channels}: build with --channels {have}")


def pad(x: np.ndarray, size: int) -> np.ndarray:
    """Zeros around the image; it must not be larger than `size`."""
    height, width = x.shape[2:]
    if max(height, width) > size:
        raise BnfuseError(f"images of {height}x{width} do not fit into {size}x{size}: resize them instead")
    top, left = (size - height) // 2, (size - width) // 2
    return np.pad(x, ((0, 0), (0, 0), (top, size - height - top), (left, size - width - left)))


def resize(x: np.ndarray, size: int) -> np.ndarray:
    """Linear interpolation with pixel centres at halves, averaging over the source pixels where it shrinks."""
    rows, columns = (interpolation(old, size) for old in x.shape[2:])
    return np.matmul(rows, np.matmul(x, columns.T))


def interpolation(old: int, new: int) -> np.ndarray:
    """Weights float32 [new, old] of a triangle around each new pixel's centre; every row sums to 1."""
    reach = max(1.0, old / new)
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    distance = np.abs(np.arange(old)[None, :] - np.clip(centres, 0, old - 1)[:, None])
    weights = np.maximum(0.0, 1.0 - distance / reach)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)
