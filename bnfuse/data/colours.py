"""Changes of a picture's colours, and RandAugment with its affine ones: torchvision's formulas, on Pillow images of 8
bits.

    jittered(picture, Jitter(0.4, 0.4, 0.4, 0.1), draw)
    rand_augmented(picture, ops=2, magnitude=9, draw=draw)

Grey pictures stay grey: their saturation and hue are what they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .draws import Draw

ORDER, FACTOR, OPERATION = 200, 210, 300  # first of their streams
BINS = 31  # magnitudes of RandAugment, from 0
SHEAR, TURN, SHIFT, STRENGTH = 0.3, 30.0, 150.0 / 331.0, 0.9  # at the largest magnitude


@dataclasses.dataclass(frozen=True)
class Jitter:
    """How far brightness, contrast and saturation go from 1, and the hue from 0 (of a whole turn)."""

    brightness: float
    contrast: float
    saturation: float
    hue: float = 0.0


def jittered(picture: Any, jitter: Jitter, draw: Draw) -> Any:
    """Change the four in a random order, each by a factor of its own."""
    for which in draw.order(ORDER, 4):
        if which == 3:
            if jitter.hue:
                picture = turned_hue(picture, draw.real(FACTOR + 3, -jitter.hue, jitter.hue))
            continue
        reach = (jitter.brightness, jitter.contrast, jitter.saturation)[which]
        if reach:
            factor = draw.real(FACTOR + which, max(0.0, 1 - reach), 1 + reach)
            picture = (brightened, contrasted, saturated)[which](picture, factor)
    return picture


def brightened(picture: Any, factor: float) -> Any:
    """Blend with black: 0 is black, 1 the picture."""
    from PIL import ImageEnhance

    return ImageEnhance.Brightness(picture).enhance(factor)


def contrasted(picture: Any, factor: float) -> Any:
    """Blend with the mean of its grey."""
    from PIL import ImageEnhance

    return ImageEnhance.Contrast(picture).enhance(factor)


def saturated(picture: Any, factor: float) -> Any:
    """Blend with its grey."""
    from PIL import ImageEnhance

    return ImageEnhance.Color(picture).enhance(factor)


def sharpened(picture: Any, factor: float) -> Any:
    """Blend with a smoothed one."""
    from PIL import ImageEnhance

    return ImageEnhance.Sharpness(picture).enhance(factor)


def turned_hue(picture: Any, turn: float) -> Any:
    """Turn the hue by a share of the circle, from -0.5 to 0.5."""
    from PIL import Image

    if picture.mode == "L":
        return picture
    hue, *others = picture.convert("HSV").split()
    moved = np.array(hue) + np.array(int(turn * 255)).astype(np.uint8)  # 256 is 0 again
    return Image.merge("HSV", (Image.fromarray(moved), *others)).convert("RGB")


def moved(picture: Any, matrix: tuple[float, ...]) -> Any:
    """Take each pixel (x, y) from (a x + b y + c, d x + e y + f), black where that lies outside."""
    from PIL import Image

    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def sheared_x(picture: Any, by: float) -> Any:
    """Shear along x, about the upper left corner."""
    return moved(picture, (1, by, 0, 0, 1, 0))


def sheared_y(picture: Any, by: float) -> Any:
    """Shear along y, about the upper left corner."""
    return moved(picture, (1, 0, 0, by, 1, 0))


def shifted_x(picture: Any, by: float) -> Any:
    """Shift to the right by a share of the width, in whole pixels."""
    return moved(picture, (1, 0, -int(by * picture.width), 0, 1, 0))


def shifted_y(picture: Any, by: float) -> Any:
    """Shift down by a share of the height, in whole pixels."""
    return moved(picture, (1, 0, 0, 0, 1, -int(by * picture.height)))


def turned(picture: Any, degrees: float) -> Any:
    """Turn about the middle, against the clock."""
    return picture.rotate(degrees)


def posterized(picture: Any, bits: float) -> Any:
    """Keep so many of the upper bits."""
    from PIL import ImageOps

    return ImageOps.posterize(picture, int(bits))


def solarized(picture: Any, threshold: float) -> Any:
    """Invert what is not darker than the threshold."""
    from PIL import ImageOps

    return ImageOps.solarize(picture, math.ceil(threshold))


def auto_contrasted(picture: Any, _: float) -> Any:
    """Stretch each channel from 0 to 255."""
    from PIL import ImageOps

    return ImageOps.autocontrast(picture)


def equalized(picture: Any, _: float) -> Any:
    """Make the histogram of each channel flat."""
    from PIL import ImageOps

    return ImageOps.equalize(picture)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One of what RandAugment draws from: what it does, and how much at a share of the largest magnitude."""

    apply: Callable[[Any, float], Any]
    amount: Callable[[float], float]
    signed: bool = True  # to either side


def one_more(change: Callable[[Any, float], Any]) -> Callable[[Any, float], Any]:
    """Take a strength from 0 for the factor that is 1 where nothing changes."""
    return lambda picture, strength: change(picture, 1 + strength)


OPERATIONS = (
    Operation(lambda picture, _: picture, lambda share: 0.0, signed=False),
    Operation(sheared_x, lambda share: SHEAR * share),
    Operation(sheared_y, lambda share: SHEAR * share),
    Operation(shifted_x, lambda share: SHIFT * share),
    Operation(shifted_y, lambda share: SHIFT * share),
    Operation(turned, lambda share: TURN * share),
    Operation(one_more(brightened), lambda share: STRENGTH * share),
    Operation(one_more(saturated), lambda share: STRENGTH * share),
    Operation(one_more(contrasted), lambda share: STRENGTH * share),
    Operation(one_more(sharpened), lambda share: STRENGTH * share),
    Operation(posterized, lambda share: 8 - round(share * 4), signed=False),
    Operation(solarized, lambda share: 255 * (1 - share), signed=False),
    Operation(auto_contrasted, lambda share: 0.0, signed=False),
    Operation(equalized, lambda share: 0.0, signed=False),
)


def rand_augmented(picture: Any, ops: int, magnitude: int, draw: Draw) -> Any:
    """Apply `ops` operations that are drawn, one after the other, each at the magnitude, of 0 to 30."""
    for number in range(ops):
        stream = OPERATION + 2 * number
        operation = OPERATIONS[draw.whole(stream, len(OPERATIONS))]
        amount = operation.amount(magnitude / (BINS - 1))
        opposite = operation.signed and draw.whole(stream + 1, 2)
        picture = operation.apply(picture, -amount if opposite else amount)
    return picture
