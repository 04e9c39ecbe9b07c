"""Folders of images with masks: the class of each pixel, for a network that gives one for each.

    folder/images/street/7.jpg      folder/masks/street/7.png          a share of the images is held out
    folder/train/images/..., train/masks/..., val/images/..., test/... each part by its name

A mask has the number of each pixel's class, as grey or by a palette (which is not looked at). Image and mask have one
size, and are brought to the graph's alike: images by interpolation, of a mask the nearest pixel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bnfuse.core.errors import BnfuseError

from .dataset import Part, Raw, check_memory
from .folders import HIDDEN, entries, image_files, is_hidden, parts_of, read_all
from .pictures import opened, read_picture
from .reading import Reading
from .tally import Tally
from .targets import Target, checked

IMAGES, MASKS = ("images", "imgs", "image"), ("masks", "mask", "labels")  # what their folders are called
MASK_SUFFIXES = (".png", ".bmp", ".gif", ".tif", ".tiff")  # of files that keep numbers as they are
MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")  # Pillow's, of one number a pixel
BESIDE = "beside images and masks"


def mask_folder(folder: Path, reading: Reading, target: Target) -> Raw:
    """Read all images and masks of a folder. Raises BnfuseError with one line that names the file."""
    for asked, option in ((reading.stream, "--stream"), (reading.share is not None, "--crop-share")):
        if asked:
            raise BnfuseError(f"{folder}: images with masks are read as a whole: leave {option} out")
    left_out, remarks = Tally(folder), Tally(folder)
    try:
        places = parts_of(folder, left_out)
        pairs = {part: listed(place, left_out) for part, place in places.items()}
    except OSError as error:
        raise BnfuseError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from None
    side, channels = reading.image, reading.channels
    count = sum(map(len, pairs.values()))
    if side is not None:
        check_memory(count, channels or 1, side, side, str(folder))
    read = functools.partial(read_picture, image=side, channels=channels)
    files = [image for found in pairs.values() for image, _ in found]
    x, kept = read_all(folder, files, read, remarks, left_out if reading.skip_unreadable else None)
    parts, start, first = {}, 0, 0
    for part, found in pairs.items():
        chosen = [pair for pair, is_kept in zip(found, kept[start : start + len(found)], strict=True) if is_kept]
        images = x[first : first + len(chosen)]
        masks = np.stack([read_mask(image, mask, images.shape[2:]) for image, mask in chosen])
        place = f"{places[part]}: a mask"
        parts[part] = Part(images, checked(masks, target, len(chosen), place), f"{places[part].name}/")
        start, first = start + len(found), first + len(chosen)
    notes = [f"{folder}: left out: {', '.join(left_out.parts())}"] if left_out.counts else []
    return Raw(parts, notes=(*notes, *remarks.lines()), fitted=True)


def listed(folder: Path, left_out: Tally) -> list[tuple[Path, Path]]:
    """List the images of a part with their masks. Raises BnfuseError where an image has none."""
    images, masks = child(folder, IMAGES), child(folder, MASKS)
    for name, _ in entries(folder):
        if folder / name not in (images, masks):
            left_out.add(HIDDEN if is_hidden(name) else BESIDE, folder / name)
    by_stem = {path.relative_to(masks).with_suffix(""): path for path in image_files(masks, left_out)}
    found = []
    for image in image_files(images, left_out):
        mask = by_stem.pop(image.relative_to(images).with_suffix(""), None)
        if mask is None:
            wanted = masks / image.relative_to(images).with_suffix(".png")
            raise BnfuseError(f"{image}: has no mask: it would be {wanted}")
        if mask.suffix.lower() not in MASK_SUFFIXES:
            raise BnfuseError(f"{mask}: a mask is one of {', '.join(MASK_SUFFIXES)}: others change its numbers")
        found.append((image, mask))
    for mask in by_stem.values():
        left_out.add("masks without an image", mask)
    if not found:
        raise BnfuseError(f"{images}: holds no images")
    return found


def child(folder: Path, names: Sequence[str]) -> Path:
    """Find the folder in `folder` that is called by one of these names, in capitals or not."""
    for name, is_folder in entries(folder):
        if is_folder and name.lower() in names:
            return folder / name
    raise BnfuseError(f"{folder}: has no folder {names[0]}/: labels of pixels are images/NAME and masks/NAME.png")


def read_mask(image: Path, mask: Path, size: tuple[int, ...]) -> np.ndarray:
    """Give the class of each pixel, int64 of this height and width. Raises BnfuseError where the file has none."""
    from PIL import Image

    with opened(image, str(image)) as picture:
        sides = picture.size
    with opened(mask, str(mask)) as picture:
        if picture.mode not in MODES:
            raise BnfuseError(
                f"{mask}: is of colours (mode {picture.mode}): a mask has the number of each pixel's class"
            )
        if picture.size != sides:
            raise BnfuseError(
                f"{mask}: is {picture.width}x{picture.height}, its image {sides[0]}x{sides[1]}: make them one size"
            )
        numbers = np.asarray(picture).astype(np.int32)
    if numbers.shape != size:
        numbers = np.asarray(Image.fromarray(numbers).resize((size[1], size[0]), Image.Resampling.NEAREST))
    return numbers.astype(np.int64)
