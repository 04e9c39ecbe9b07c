"""One file of an image: its pixels as torchvision's loader gives them, or a line that says why not.

Eight bits a channel stay bytes. More bits (modes I;16 and their like, 16-bit I, F) become float32 from 0 to 1, so that
both mean the same once bytes are divided by 255. Colour is RGB, whatever a file stores; what has no colour is grey. As
in torchvision the first of several frames counts, transparency is dropped, and a rotation in EXIF is not applied; each
of these is remarked on. What has no range that can be told (32-bit integers, floats beyond 0 to 1) is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from bnfuse.core.errors import BnfuseError

from .geometry import fitted
from .resizing import pad

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


def read_picture(
    path: Path, image: int | None = None, channels: int | None = None, fit: str = "resize", share: float | None = None
) -> Picture:
    """Give the picture of a file, brought to a square of `image` by `fit`: resize (with `share` the middle of it alone,
    as geometry.py has it), or pad with zeros. One channel where `channels` is 1; where it is None, as many as the file
    has colours for; three otherwise. Raises BnfuseError with one line that names the file."""
    with opened(path, str(path)) as picture:
        if image is not None and fit == "pad" and max(picture.size) > image:
            raise BnfuseError(f"{path}: is {picture.width}x{picture.height}, which does not fit into {image}x{image}")
        remarks = remarks_of(picture)
        made = converted(picture, channels)
        if image is not None and fit != "pad":
            made = fitted(made, (image, image), share)
        values = values_of(made, channels)
        remarks += [TRANSPARENCY] if is_transparent(picture) else []
    padded = values if image is None else pad(values[None], image)[0]
    return Picture(padded, tuple(remarks))


@contextlib.contextmanager
def opened(source: Path | str | IO[bytes], name: str) -> Iterator[Any]:
    """Open an image with Pillow, which decodes it when its pixels are asked for. Whatever goes wrong with it within
    the `with` block becomes a BnfuseError with one line that begins with its name."""
    from PIL import Image

    try:
        with quiet(), Image.open(source, formats=FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise BnfuseError(f"{name}: has {picture.width}x{picture.height} pixels, more than {MAX_PIXELS:,}")
            yield picture
    except BnfuseError:
        raise
    except ValueNotKnown as error:
        raise BnfuseError(f"{name}: {error}") from None
    except OSError as error:
        what = error.strerror or " ".join(str(error).split())
        raise BnfuseError(f"{name}: is no image that can be read: {what}") from None
    except Exception as error:  # decoders of damaged files raise nearly anything
        what = " ".join(str(error).split()) or type(error).__name__
        raise BnfuseError(f"{name}: is no image that can be read: {what}") from None


def remarks_of(picture: Any) -> list[str]:
    """Tell what is ignored of an image that is open, as far as its header says."""
    found = [FRAMES] if getattr(picture, "is_animated", False) else []
    if picture.format != "TIFF" and "exif" in picture.info:  # the rotation of TIFF files is applied by Pillow
        found += [ROTATION] if picture.getexif().get(EXIF_ORIENTATION, 1) not in (0, 1) else []
    return found


class Quiet:
    """Silence Pillow's warnings, about large or odd files. Threads may be in it at once: the filters of warnings are
    the process's, so the first one in sets them and the last one out sets them back."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._held: warnings.catch_warnings[Any] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._held = warnings.catch_warnings()
                self._held.__enter__()
                warnings.simplefilter("ignore")

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._held is not None:
                self._held.__exit__(None, None, None)


QUIET = Quiet()


def quiet() -> Quiet:
    """Give what silences Pillow's warnings in a `with` block."""
    return QUIET


class ValueNotKnown(Exception):
    """Pixels are numbers of which nothing says what is black and what is white."""


def pixels(picture: Any, image: int | None = None, channels: int | None = None) -> np.ndarray:
    """Give the values of a Pillow image of any mode: uint8 or float32 [C, H, W]. Raises ValueNotKnown."""
    made = converted(picture, channels)
    return values_of(made if image is None else fitted(made, (image, image)), channels)


def converted(picture: Any, channels: int | None = None) -> Any:
    """Give a Pillow image of mode L, RGB, or F from 0 to 1 where it has more than 8 bits. Raises ValueNotKnown."""
    from PIL import Image

    if picture.mode[0] in "IF":
        return Image.fromarray(deep_values(picture))
    grey = channels == 1 or (channels is None and picture.mode in GREY)
    source = picture.convert("RGB") if picture.mode == "LAB" else picture
    return source.convert("L" if grey else "RGB")


def values_of(made: Any, channels: int | None = None) -> np.ndarray:
    """Give the values of an image of mode L, RGB or F: uint8 or float32 [C, H, W], grey as often as is asked."""
    values = np.asarray(made)
    if values.ndim == 3:
        return values.transpose(2, 0, 1)
    return np.repeat(values[None], 3, axis=0) if channels not in (None, 1) else values[None]


def eight_bits(made: Any) -> Any:
    """Give an image of 8 bits a channel: what has more of them is rounded."""
    from PIL import Image

    if made.mode != "F":
        return made
    return Image.fromarray(np.rint(np.asarray(made) * np.float32(255)).astype(np.uint8))


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
