"""Which part of a picture is looked at, and at what size: as torchvision's transforms have it, on Pillow images.

    fitted(picture, (224, 224))         # the whole picture, squashed to a square
    fitted(picture, (224, 224), 0.875)                                   # Resize(256), CenterCrop(224)
    resized(picture, random_box(*picture.size, draw, 0.08), (224, 224))  # RandomResizedCrop(224)

Boxes are left, top, right, bottom; sizes are width, height.
"""

from __future__ import annotations

import math
from typing import Any

from .draws import Draw, log_uniform

Box = tuple[int, int, int, int]
Size = tuple[int, int]
RATIOS = (3 / 4, 4 / 3)  # width to height of a random crop
MIN_SCALE = 0.08  # of the picture's area
TRIES = 10
AREA = 100  # first of the streams: four for each try


def fitted(picture: Any, size: Size, share: float | None = None) -> Any:
    """Bring a picture to a size: all of it, or with `share` the middle of it, a square whose side is that share of the
    shorter side. What has the size already is not touched."""
    from PIL import Image

    if share is None:
        return picture if picture.size == size else picture.resize(size, Image.Resampling.BILINEAR)
    larger = around(picture.width, picture.height, math.floor(size[0] / share))
    whole = picture if picture.size == larger else picture.resize(larger, Image.Resampling.BILINEAR)
    return whole if larger == size else whole.crop(middle(*larger, size[0]))


def around(width: int, height: int, short: int) -> Size:
    """Give the size whose shorter side is `short`, in the proportions of the picture."""
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def middle(width: int, height: int, side: int) -> Box:
    """Give the square in the middle, `side` pixels wide."""
    left, top = round((width - side) / 2), round((height - side) / 2)
    return left, top, left + side, top + side


def resized(picture: Any, box: Box, size: Size) -> Any:
    """Bring a part of a picture to a size. It is cut out first, so that pixels around it do not count."""
    from PIL import Image

    part = picture if box == (0, 0, *picture.size) else picture.crop(box)
    return part if part.size == size else part.resize(size, Image.Resampling.BILINEAR)


def random_box(width: int, height: int, draw: Draw, least: float) -> Box:
    """Draw a part of a picture: from the share `least` of its area to all of it, a little wider or higher than it is;
    the middle of it where ten of them do not fit."""
    for attempt in range(TRIES):
        stream = AREA + 4 * attempt
        area = width * height * draw.real(stream, least, 1.0)
        ratio = log_uniform(draw, stream + 1, *RATIOS)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = draw.whole(stream + 2, height - h + 1), draw.whole(stream + 3, width - w + 1)
            return left, top, left + w, top + h
    return middle_within(width, height)


def middle_within(width: int, height: int) -> Box:
    """Give the largest part around the middle whose proportions are those of a random crop."""
    w, h = width, height
    if width / height < RATIOS[0]:
        h = max(1, round(width / RATIOS[0]))
    elif width / height > RATIOS[1]:
        w = max(1, round(height * RATIOS[1]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
