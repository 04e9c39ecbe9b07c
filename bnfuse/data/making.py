"""Images as they are fed: gathered or decoded, changed, normalised.

    maker = Maker(data.train_x, parse_augment("flip"), seed=0, statistics=(data.mean, data.std))
    maker.made(np.array([3, 1]), epoch=2)            # float32 [2, C, H, W]

What is made of an image depends on the seed, the epoch and its place in the data set alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .augment import Augment
from .draws import Draw
from .pictures import values_of
from .reading import Statistics
from .streamed import Change, StreamedImages


@dataclasses.dataclass(frozen=True)
class Maker:
    """Images of the training part, in memory or streamed, and what is done to them."""

    images: np.ndarray | StreamedImages
    augment: Augment
    seed: int
    statistics: Statistics | None = None  # mean and deviation that they are normalised by, in front of padding

    @property
    def one_by_one(self) -> bool:
        """Whether each image takes a while: it is decoded, or changed as a picture."""
        return isinstance(self.images, StreamedImages) or self.augment.changes_pictures

    def made(self, chosen: np.ndarray, epoch: int) -> np.ndarray:
        """Make the images of these places in the data set, float32 [n, C, H, W], as they are fed in an epoch."""
        if self.one_by_one:
            found = np.empty((len(chosen), *self.images.shape[1:]), np.float32)
            for place, index in enumerate(chosen.tolist()):
                found[place] = self._one(index, epoch)
        else:
            assert isinstance(self.images, np.ndarray)
            found = self.images[chosen]
        if self.statistics is not None:
            mean, std = (np.array(value, np.float32).reshape(-1, 1, 1) for value in self.statistics)
            for image in found:  # one by one: it stays in the cache
                np.subtract(image, mean, out=image)
                np.divide(image, std, out=image)
        return np.ascontiguousarray(self.augment(found, chosen, seed=self.seed, epoch=epoch))

    def _one(self, index: int, epoch: int) -> np.ndarray:
        """Decode one image or change it as a picture, float32 [C, H, W]."""
        draw, images = Draw(self.seed, epoch, index), self.images
        if isinstance(images, StreamedImages):
            if not self.augment.changes_pictures:
                return images.row(index)
            return images.row(index, lambda picture: self.augment.on_picture(picture, images.size, draw, images.share))
        values, (height, width) = images[index], images.shape[2:]
        change: Change = lambda picture: self.augment.on_picture(picture, (width, height), draw)  # noqa: E731
        return changed(values, change) if self.augment.changes_colours else each_channel(values, change)


def changed(values: np.ndarray, change: Change) -> np.ndarray:
    """Change an image float32 [C, H, W] from 0 to 1, of one channel or three, as a picture of 8 bits."""
    from PIL import Image

    levels = np.rint(np.clip(values, 0, 1) * np.float32(255)).astype(np.uint8)
    picture = Image.fromarray(levels[0] if len(levels) == 1 else np.ascontiguousarray(levels.transpose(1, 2, 0)))
    return values_of(change(picture), len(values)) / np.float32(255)


def each_channel(values: np.ndarray, change: Change) -> np.ndarray:
    """Change an image float32 [C, H, W] of any numbers, channel by channel: for what moves pixels alone."""
    from PIL import Image

    return np.stack([np.asarray(change(Image.fromarray(channel))) for channel in values])
