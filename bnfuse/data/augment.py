"""Random changes of training images, as people write them, with commas between them:

    none   flip   pad-crop[:4]   random-resized-crop[:0.08]   jitter:0.4[,0.4,0.4,0.1]   rand-augment[:2,9]
    random-erasing[:0.5]

    augment = parse_augment("random-resized-crop,flip")
    picture = augment.on_picture(picture, (224, 224), draw)  # a Pillow image, to that size
    augment(images, indices, seed=0, epoch=3)                # images float32 [B, C, H, W], indices int64 [B]

In whatever order they are written, a picture is cut out and resized first, then its colours change, and of the
normalised images a window is cut out, which is mirrored, and of which a part is erased. What happens to an image is a
hash of (seed, epoch, its index in the data set): the same whatever batch the image is in, and whoever loads it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import spelt

from .colours import BINS, Jitter, jittered, rand_augmented
from .draws import Draw, drawn, log_uniform
from .geometry import MIN_SCALE, TRIES, Size, fitted, random_box, resized
from .pictures import eight_bits

HELP = (
    "none, flip, pad-crop[:pixels], random-resized-crop[:min-scale], jitter:0.4[,0.4,0.4,0.1], "
    "rand-augment[:ops,magnitude], random-erasing[:probability], or several with commas between them"
)
FLIP, ROW, COLUMN, ERASE = 1, 2, 3, 400  # streams of the hash; of ERASE one, and four for each try from the next on
ERASED, ERASED_RATIOS = (0.02, 0.33), (0.3, 3.3)  # share of the area; height to width
NUMBER = re.compile(r"[0-9]*\.?[0-9]+|[0-9]+\.")


@dataclasses.dataclass(frozen=True)
class Augment:
    """Which changes are made, and how large."""

    flip: bool = False  # mirror left and right, with probability a half
    crop: int = 0  # pad by so many zeros on each side, then cut out a window of the old size anywhere
    scale: float | None = None  # cut out a part of this share of the picture's area or more, and resize it
    jitter: Jitter | None = None  # brightness, contrast, saturation, hue
    rand: tuple[int, int] | None = None  # RandAugment's number of operations, and their magnitude
    erasing: float = 0.0  # the probability that a rectangle becomes zeros, which are the mean of what is normalised

    @property
    def changes_pictures(self) -> bool:
        """Whether anything is done to pictures, before they are images of the step's size."""
        return self.scale is not None or self.changes_colours

    @property
    def changes_colours(self) -> bool:
        """Whether anything is done that takes pixels for colours, from black to white."""
        return self.jitter is not None or self.rand is not None

    def on_picture(self, picture: Any, size: Size, draw: Draw, share: float | None = None) -> Any:
        """Change a Pillow image (mode L, RGB or F) and bring it to a size; where no part is drawn, as `fitted` does."""
        if self.scale is None:
            made = fitted(picture, size, share)
        else:
            made = resized(picture, random_box(picture.width, picture.height, draw, self.scale), size)
        if self.changes_colours:
            made = eight_bits(made)
        if self.rand is not None:
            made = rand_augmented(made, *self.rand, draw)
        return made if self.jitter is None else jittered(made, self.jitter, draw)

    def __call__(self, images: np.ndarray, indices: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """Change images float32 [B, C, H, W], whose places in the data set are `indices` int64 [B]."""
        if self.crop:
            span = np.uint64(2 * self.crop + 1)
            down, right = (drawn(seed, epoch, indices, stream) % span for stream in (ROW, COLUMN))
            images = cropped(images, self.crop, down.astype(np.int64), right.astype(np.int64))
        if self.flip:
            chosen = (drawn(seed, epoch, indices, FLIP) & np.uint64(1)).astype(bool)
            images = mirrored(images, chosen)
        if self.erasing:
            images = erased(images, self.erasing, [Draw(seed, epoch, int(index)) for index in indices])
        return images

    def __str__(self) -> str:
        return ",".join(self._spelt()) or "none"

    def _spelt(self) -> Iterator[str]:
        if self.scale is not None:
            yield f"random-resized-crop:{spelt(self.scale)}"
        if self.flip:
            yield "flip"
        if self.crop:
            yield f"pad-crop:{self.crop}"
        if self.rand is not None:
            yield f"rand-augment:{self.rand[0]},{self.rand[1]}"
        if self.jitter is not None:
            yield "jitter:" + ",".join(map(spelt, dataclasses.astuple(self.jitter)))
        if self.erasing:
            yield f"random-erasing:{spelt(self.erasing)}"


def parse_augment(text: str | Augment | None) -> Augment:
    """Read the changes as people write them. Raises BnfuseError where one is unknown, or is there twice."""
    if isinstance(text, Augment):
        return text
    if text is not None and not isinstance(text, str):
        raise BnfuseError(f"augment is a {type(text).__name__}: write it as text, {HELP}")
    found: dict[str, Any] = {}
    for part, values in parts_of(text or "none"):
        kind, colon, _ = part.partition(":")
        given = None if kind == "none" and not colon else setting(kind, bool(colon), values)
        if given is None and (kind != "none" or colon):
            raise BnfuseError(f"augmentation '{part}' is unknown: write {HELP}")
        if given is not None and given[0] in found:
            raise BnfuseError(f"augmentation '{kind}' is there twice: write {HELP}")
        found.update([given] if given is not None else [])
    return Augment(**found)


def parts_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Divide by commas; a number belongs to what is before it: `jitter:0.4,0.2,flip` is a jitter and a flip."""
    gathered: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if gathered and ":" in gathered[0] and NUMBER.fullmatch(piece):
            gathered.append(piece)
            continue
        if gathered:
            yield whole(gathered)
        gathered = [piece]
    yield whole(gathered)


def whole(pieces: Sequence[str]) -> tuple[str, list[str]]:
    """Give what was written, and the numbers in it."""
    return ",".join(pieces), [pieces[0].partition(":")[2], *pieces[1:]]


def setting(kind: str, has_values: bool, values: Sequence[str]) -> tuple[str, Any] | None:
    """Read one change: the field of Augment that it sets, and to what. None where it is none."""
    if kind == "flip":
        return None if has_values else ("flip", True)
    numbers = [float(value) for value in values if NUMBER.fullmatch(value)] if has_values else []
    wholes = [int(value) for value in values if value.isascii() and value.isdigit()] if has_values else []
    if has_values and len(numbers) != len(values):
        return None
    if kind == "pad-crop" and (not has_values or (len(wholes) == len(values) == 1 and 0 < wholes[0] <= 256)):
        return "crop", wholes[0] if has_values else 4
    if kind == "random-resized-crop" and (not has_values or (len(numbers) == 1 and 0 < numbers[0] <= 1)):
        return "scale", numbers[0] if has_values else MIN_SCALE
    if kind == "random-erasing" and (not has_values or (len(numbers) == 1 and 0 < numbers[0] <= 1)):
        return "erasing", numbers[0] if has_values else 0.5
    if kind == "rand-augment" and (not has_values or (len(wholes) == len(values) == 2)):
        ops, magnitude = wholes if has_values else (2, 9)
        return ("rand", (ops, magnitude)) if 1 <= ops <= 16 and magnitude < BINS else None
    if kind == "jitter" and len(numbers) in (1, 3, 4):
        given = numbers * 3 if len(numbers) == 1 else numbers
        jitter = Jitter(*given)
        fits = max(given[:3]) <= 16 and jitter.hue <= 0.5 and any(given)
        return ("jitter", jitter) if fits else None
    return None


def mirrored(images: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Mirror those of the images [B, C, H, W] that a mask has chosen."""
    found = np.empty(images.shape, images.dtype)
    for place, turned in enumerate(chosen.tolist()):
        found[place] = images[place, :, :, ::-1] if turned else images[place]
    return found


def cropped(images: np.ndarray, pad: int, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Cut of each padded image [C, H + 2*pad, W + 2*pad] the window of H x W that begins at (down, right)."""
    _, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    return windows[np.arange(len(images)), :, down, right]


def erased(images: np.ndarray, probability: float, draws: Sequence[Draw]) -> np.ndarray:
    """Make a rectangle of some images zeros."""
    found = images.copy()
    for image, draw in zip(found, draws, strict=True):
        if draw.real(ERASE) < probability:
            _, height, width = image.shape
            top, left, bottom, right = rectangle(height, width, draw)
            image[:, top:bottom, left:right] = 0
    return found


def rectangle(height: int, width: int, draw: Draw) -> tuple[int, int, int, int]:
    """Draw a rectangle as torchvision's RandomErasing does, an empty one where ten did not fit: its top, left, bottom
    and right."""
    for attempt in range(TRIES):
        stream = ERASE + 1 + 4 * attempt
        area, ratio = height * width * draw.real(stream, *ERASED), log_uniform(draw, stream + 1, *ERASED_RATIOS)
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if h < height and w < width:
            top, left = draw.whole(stream + 2, height - h + 1), draw.whole(stream + 3, width - w + 1)
            return top, left, top + h, left + w
    return 0, 0, 0, 0
