"""One file of an image: its pixels as torchvision's loader gives them, or a line that says why not.

Eight bits a channel stay bytes. More bits (modes I;16 and their like, 16-bit I, F) become float32 from 0 to 1, so that
both mean the same once bytes are divided by 255. Colour is RGB, whatever a file stores; what has no colour is grey. As
in torchvision the first of several frames counts, transparency is dropped, and a rotation in EXIF is not applied; each
of these is remarked on. What has no range that can be told (32-bit integers, floats beyond 0 to 1) is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError

from .dataset import pad

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # by content; JPEG has MPO in it
MAX_PIXELS = 1 << 26  # of one file
GREY = frozenset(("1", "L", "LA", "La"))
ROTATION = "have a rotation in EXIF, which is not applied"
TRANSPARENCY = "are partly transparent, which is ignored: the colours behind it count"
FRAMES = "have several frames, of which the first counts"
EXIF_ORIENTATION, TIFF_BITS, TIFF_PHOTOMETRIC = 0x0112, 258, 262


@dataclasses.dataclass(frozen=True)
class Picture:
    """uint8, or float32 from 0 to 1: [C, H, W], one channel or three. `remarks` are what is ignored of the file."""

    values: np.ndarray
    remarks: tuple[str, ...] = ()


def read_picture(path: Path, image: int | None = None, channels: int | None = None, fit: str = "resize") -> Picture:
    """Give the picture of a file, brought to a square of `image` by `fit`: resize, or pad with zeros. One channel where
    `channels` is 1; where it is None, as many as the file has colours for; three otherwise. Raises BnfuseError with one
    line that names the file."""
    from PIL import Image

    try:
        with quiet(), Image.open(path, formats=FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise BnfuseError(f"{path}: has {opened.width}x{opened.height} pixels, more than {MAX_PIXELS:,}")
            if image is not None and fit == "pad" and max(opened.size) > image:
                raise BnfuseError(f"{path}: is {opened.width}x{opened.height}, which does not fit into {image}x{image}")
            remarks = [FRAMES] if getattr(opened, "is_animated", False) else []
            if opened.format != "TIFF" and "exif" in opened.info:  # the rotation of TIFF files is applied by Pillow
                remarks += [ROTATION] if opened.getexif().get(EXIF_ORIENTATION, 1) not in (0, 1) else []
            values = pixels(opened, image if fit == "resize" else None, channels)
            remarks += [TRANSPARENCY] if is_transparent(opened) else []
    except BnfuseError:
        raise
    except ValueNotKnown as error:
        raise BnfuseError(f"{path}: {error}") from None
    except OSError as error:
        what = error.strerror or " ".join(str(error).split())
        raise BnfuseError(f"{path}: is no image that can be read: {what}") from None
    except Exception as error:  # decoders of damaged files raise nearly anything
        what = " ".join(str(error).split()) or type(error).__name__
        raise BnfuseError(f"{path}: is no image that can be read: {what}") from None
    padded = values if image is None else pad(values[None], image)[0]
    return Picture(padded, tuple(remarks))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Pillow's warnings, about large or odd files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class ValueNotKnown(Exception):
    """Pixels are numbers of which nothing says what is black and what is white."""


def pixels(picture: Any, image: int | None = None, channels: int | None = None) -> np.ndarray:
    """Give the values of a Pillow image of any mode: uint8 or float32 [C, H, W]. Raises ValueNotKnown."""
    from PIL import Image

    if picture.mode[0] in "IF":
        converted = Image.fromarray(deep_values(picture))
    else:
        grey = channels == 1 or (channels is None and picture.mode in GREY)
        source = picture.convert("RGB") if picture.mode == "LAB" else picture
        converted = source.convert("L" if grey else "RGB")
    if image is not None and converted.size != (image, image):
        converted = converted.resize((image, image), Image.Resampling.BILINEAR)
    values = np.asarray(converted)
    if values.ndim == 3:
        return values.transpose(2, 0, 1)
    return np.repeat(values[None], 3, axis=0) if channels not in (None, 1) else values[None]


def deep_values(picture: Any) -> np.ndarray:
    """Give float32 [H, W] from 0 to 1 of a grey image of more than 8 bits."""
    values, tags = np.asarray(picture), getattr(picture, "tag_v2", {})
    if picture.mode == "F":
        low, high = float(values.min()), float(values.max())
        if not (low >= 0 and high <= 1):
            raise ValueNotKnown(
                f"holds floats from {low:.4g} to {high:.4g} (mode F): they must be from 0 to 1; or convert it to 8 or "
                "16 bits"
            )
        scaled = values
    else:
        if picture.mode == "I" and picture.format not in ("PNG", "PPM"):  # theirs have 16 bits
            raise ValueNotKnown(
                "holds 32-bit or signed integers (mode I) of no known range: convert it to 8 or 16 bits"
            )
        bits = tags.get(TIFF_BITS, (16,))[0]
        scaled = values.astype(np.float32) / np.float32((1 << bits) - 1)
    inverted = tags.get(TIFF_PHOTOMETRIC) == 0  # white is zero
    return np.ascontiguousarray(1 - scaled if inverted else scaled, np.float32)


def is_transparent(picture: Any) -> bool:
    """Tell whether an image that has been loaded shows through anywhere."""
    if "transparency" in picture.info:
        return True
    return picture.mode[-1] in "Aa" and picture.getchannel(len(picture.getbands()) - 1).getextrema()[0] < 255
