"""How images are read: their size, which part of each, from where, and what they are normalised by."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.progress import Bar
from bnfuse.core.ranges import check_whole, is_number

from .items import Items
from .pictures import TRANSPARENCY, converted, is_transparent, opened, remarks_of
from .streamed import MEND, StreamedImages
from .tally import UNREADABLE, Tally
from .workers import MOST, default_workers, each

SIZES = 1 << 14  # the largest of a size
SAMPLE = 2048  # images whose mean and deviation are taken of streamed ones
HEADERS = 1 << 16  # images whose headers are read; of more, so many
EVERY = 512  # images after which a bar is drawn
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CROP_SHARE = 0.875  # of images that are scored, where those to train on are parts that are drawn
MAY_BE_TRANSPARENT = "may be partly transparent, which is ignored: the colours behind it count"

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is asked of the images of a source; `load_data` says what each means."""

    image: int | None = None
    channels: int | None = None
    fit: str = "resize"
    share: float | None = None
    skip_unreadable: bool = False
    stream: bool = False
    workers: int | None = None
    seed: int = 0
    random_crops: bool = False
    shared: bool = False
    bar: Bar | None = None

    def check(self) -> None:
        """Raise BnfuseError for the first that cannot be."""
        for what, value in (("image", self.image), ("channels", self.channels)):
            if value is not None and not 1 <= value <= SIZES:
                raise BnfuseError(f"{what}={value} is out of range: it must be from 1 to {SIZES}")
        if self.fit not in ("resize", "pad"):
            raise BnfuseError(f"fit={self.fit} is unknown: it is resize or pad")
        if self.share is not None:
            if not is_number(self.share) or not 0.1 <= self.share <= 1:
                raise BnfuseError(f"a crop share of {self.share} is none: give a number from 0.1 to 1, as 0.875")
            if self.fit == "pad" or self.image is None:
                raise BnfuseError("a crop share is of images that are resized: give image=, and no fit=pad")
        if self.workers is not None:
            check_whole("workers", self.workers, 1)
            if self.workers > MOST:
                raise BnfuseError(f"{self.workers} workers wait for each other: {MOST} at the most")
        if self.stream:
            self.require_streaming()

    def require_streaming(self, why: str = "stream=True") -> None:
        """Raise where images cannot be decoded when they are asked for."""
        if self.fit == "pad":
            raise BnfuseError(f"{why}: images that are streamed are resized, not padded: leave out fit=pad")
        if self.image is None or self.channels not in (1, 3):
            raise BnfuseError(f"{why}: give the size of the images that are streamed, image=, and channels=1 or 3")

    @property
    def streamed_share(self) -> float | None:
        """Which part of a streamed image is taken where no part is drawn."""
        return CROP_SHARE if self.share is None and self.random_crops else self.share

    @property
    def threads(self) -> int:
        """How many threads decode."""
        return self.workers or default_workers()

    def images(self, items: Items) -> StreamedImages:
        """Make images of encoded ones."""
        assert self.image is not None and self.channels is not None
        return StreamedImages(items, self.image, self.channels, self.streamed_share, self.threads)


def looked_at(items: Items, reading: Reading, remarks: Tally, left_out: Tally) -> np.ndarray:
    """Look at encoded images, before anything else is done with them. Gives a mask of those that can be read; raises
    BnfuseError for the first that cannot.

    Where unreadable ones are skipped, all are decoded, and those are counted. Else headers alone are read, of very many
    images those of some, drawn by the seed; `remarks` are of these then.
    """
    count = len(items)
    some = reading.skip_unreadable or count <= HEADERS
    chosen = (
        range(count) if some else np.sort(np.random.default_rng(reading.seed).choice(count, HEADERS, False)).tolist()
    )
    kept = np.ones(count, bool)
    for done, (index, (error, found)) in enumerate(
        zip(chosen, each(functools.partial(look, items, reading), chosen, reading.threads), strict=True), 1
    ):
        if error is not None:
            if not reading.skip_unreadable:
                raise BnfuseError(f"{error}. {MEND}.")
            left_out.add(UNREADABLE, items.name(index))
            kept[index] = False
        for remark in found:
            remarks.add(remark, items.name(index))
        if reading.bar is not None and (done % EVERY == 0 or done == len(chosen) > EVERY):
            reading.bar(done, len(chosen), "images looked at")
    return kept


def look(items: Items, reading: Reading, index: int) -> tuple[BnfuseError | None, list[str]]:
    """Look at one image. Gives why it cannot be read, if so, and what is ignored of it."""
    try:
        with items.open(index) as stream, opened(stream, items.name(index)) as picture:
            found = remarks_of(picture)
            if reading.skip_unreadable:
                converted(picture, reading.channels)
                found += [TRANSPARENCY] if is_transparent(picture) else []
            elif picture.mode[-1] in "Aa" or "transparency" in picture.info:
                found.append(MAY_BE_TRANSPARENT)
        return None, found
    except OSError as error:
        return BnfuseError(f"{items.name(index)}: is no image that can be read: {error.strerror or error}"), []
    except BnfuseError as error:
        return error, []


def sampled(images: StreamedImages, seed: int) -> Statistics:
    """Measure mean and standard deviation, channel by channel, of some of the images, drawn by the seed."""
    count = min(SAMPLE, len(images))
    chosen = np.sort(np.random.default_rng(seed).choice(len(images), count, replace=False))
    total, squares, pixels = np.zeros(images.channels), np.zeros(images.channels), 0
    for row in each(images.row, chosen.tolist(), images.workers):
        wide = row.reshape(len(row), -1).astype(np.float64)
        total += wide.sum(1)
        squares += np.square(wide).sum(1)
        pixels += wide.shape[1]
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - np.square(mean), 0))
    return tuple(map(float, mean)), tuple(float(s) if s > 0 else 1.0 for s in std)


def given_statistics(mean: Any, std: Any, channels: int, name: str) -> Statistics | None:
    """Read the mean and the deviation that people give: `imagenet`, a number for all channels, or one for each, of
    images from 0 to 1. None where they give none."""
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise BnfuseError(f"{name}: give --mean and --std, or neither of them")
    values = tuple(
        numbers_of(given, what, channels, IMAGENET[place])
        for place, (given, what) in enumerate(((mean, "--mean"), (std, "--std")))
    )
    if not all(value > 0 for value in values[1]):
        raise BnfuseError(f"--std {std}: must be numbers above 0")
    return values[0], values[1]


def numbers_of(given: Any, what: str, channels: int, imagenet: Sequence[float]) -> tuple[float, ...]:
    """Read numbers, one for each channel."""
    if isinstance(given, str) and given == "imagenet":
        parts: Sequence[Any] = imagenet
    elif isinstance(given, str):
        parts = given.split(",")
    else:
        parts = [given] if is_number(given) else list(given)
    try:
        found = tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise BnfuseError(f"{what} {given}: is imagenet, a number, or one for each channel with commas between them")
    if len(found) not in (1, channels):
        raise BnfuseError(f"{what} {given}: has {len(found)} numbers, images have {channels} channels")
    return found * channels if len(found) == 1 else found
