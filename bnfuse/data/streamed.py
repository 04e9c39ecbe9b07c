"""Images that are decoded when they are asked for: an array [N, C, H, W] of which the places of files are held alone.

    images = StreamedImages(items, image=224, channels=3)
    images[64:128]; images[np.array([3, 1])]     # float32, from 0 to 1
    images.row(3, change)                        # changed, by a function of a Pillow image, in place of fitted

What numpy's arrays have of shape, length and indexing it has too, which is all that a Dataset asks of its images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from bnfuse.core.errors import BnfuseError

from .geometry import Size, fitted
from .items import Items
from .pictures import converted, opened, values_of
from .workers import each

Change = Callable[[Any], Any]  # of a Pillow image of mode L, RGB or F, to one of the size that is fed


class Images(Protocol):
    """Images float32 [N, C, H, W], in memory or not."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Give N, C, H, W."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Give the type of what indexing gives."""

    def __len__(self) -> int:
        """Give N."""

    def __getitem__(self, chosen: Any, /) -> Any:
        """Give some of them."""


@dataclasses.dataclass(frozen=True)
class StreamedImages:
    """Images of encoded ones. `share`: the middle of each, as geometry.py has it, in place of all of it."""

    items: Items
    image: int
    channels: int  # 1 or 3
    share: float | None = None
    workers: int = 1  # threads that decode what is asked for at once
    mean: tuple[float, ...] | None = None  # by which, and by `std`, they are normalised; else they are from 0 to 1
    std: tuple[float, ...] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Give N, C, H, W."""
        return len(self.items), self.channels, self.image, self.image

    @property
    def size(self) -> Size:
        """Give width and height."""
        return self.image, self.image

    @property
    def dtype(self) -> np.dtype[Any]:
        """Give the type of what indexing gives."""
        return np.dtype(np.float32)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, chosen: Any) -> np.ndarray:
        indices = np.arange(len(self))[chosen]  # slices, numbers, masks: whatever numpy takes for one axis
        if indices.ndim == 0:
            return self.row(int(indices))
        found = np.empty((len(indices), *self.shape[1:]), np.float32)
        for place, row in enumerate(each(self.row, indices.tolist(), self.workers)):
            found[place] = row
        return found

    def row(self, index: int, change: Change | None = None) -> np.ndarray:
        """Decode one image, float32 [C, H, W]. Raises BnfuseError with one line that names the file."""
        name = self.items.name(index)
        try:
            stream = self.items.open(index)
        except OSError as error:
            raise BnfuseError(f"{name}: is no image that can be read: {error.strerror or error}. {MEND}") from None
        try:
            with stream, opened(stream, name) as picture:
                whole = converted(picture, self.channels)
                made = fitted(whole, self.size, self.share) if change is None else change(whole)
                values = values_of(made, self.channels)
        except BnfuseError as error:
            raise BnfuseError(f"{error}. {MEND}") from None
        found = np.empty(values.shape, np.float32)
        np.divide(values, np.float32(255 if values.dtype == np.uint8 else 1), out=found, dtype=np.float32)
        if self.mean is not None and self.std is not None:
            mean, std = (np.array(value, np.float32).reshape(-1, 1, 1) for value in (self.mean, self.std))
            np.divide(np.subtract(found, mean, out=found), std, out=found)
        return found

    def normalised(self, mean: tuple[float, ...], std: tuple[float, ...]) -> StreamedImages:
        """Give the same images with mean 0 and standard deviation 1, where these are their own."""
        return dataclasses.replace(self, mean=mean, std=std)

    def take(self, indices: np.ndarray) -> StreamedImages:
        """Give some of them, which are decoded later."""
        return dataclasses.replace(self, items=self.items.take(indices))


MEND = "Mend or remove it, or pass --skip-unreadable, which reads all of them once before the run"


def taken(images: Any, indices: np.ndarray) -> Any:
    """Give some of the images, decoded later where they are streamed."""
    return images.take(indices) if isinstance(images, StreamedImages) else images[indices]
