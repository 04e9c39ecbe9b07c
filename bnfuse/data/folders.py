"""Folders of images: which are the parts, which the classes, which files are images, and what is left out of them.

    folder/CLASS/picture.png                          a share of the images is held out
    folder/train/CLASS/..., val/CLASS/..., test/CLASS/...    each part by its name

Classes are the folders of `train`, in the order of their names; the images of a class are those in its folder and in
all folders below it, as torchvision's ImageFolder has it. Nothing is left out without a count.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import readable

from .dataset import Part, Raw, check_memory
from .items import Files
from .pictures import Picture, read_picture
from .reading import Reading, looked_at
from .tally import UNREADABLE, Tally

IMAGE_SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
PART_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
SYSTEM = frozenset(("__macosx", "@eadir", "lost+found", "thumbs.db", "desktop.ini"))  # and all that begins with a dot
HIDDEN, STRAY, LOOP, SPECIAL = "hidden or system", "outside the class folders", "linked in a circle", "no ordinary file"
BESIDE = "beside the parts"
MAX_IMAGES = 1 << 25


@dataclasses.dataclass(frozen=True)
class Listing:
    """The images of a folder by their parts, before any is opened."""

    folder: Path
    places: dict[str, Path]
    classes: tuple[str, ...]
    paths: dict[str, list[Path]]
    labels: dict[str, np.ndarray]
    left_out: Tally

    @property
    def count(self) -> int:
        """How many images there are."""
        return sum(map(len, self.paths.values()))

    def raw(self, images: Mapping[str, Any], kept: Mapping[str, np.ndarray], remarks: Tally) -> Raw:
        """Give what a source gives: `images` of each part are those that a mask has `kept`. Raises BnfuseError where a
        class has none to train on."""
        parts = {
            part: Part(x, self.labels[part][kept[part]], f"{self.places[part].name}/") for part, x in images.items()
        }
        empty = [
            f"{self.places[part]}: holds no images of class '{name}'"
            for part in parts
            for index, name in enumerate(self.classes)
            if not (parts[part].y == index).any()
        ]
        if empty and empty[0].startswith(f"{self.places['train']}:"):
            kinds = ", ".join(self.left_out.parts())
            why = f" (left out: {kinds})" if kinds else ""
            raise BnfuseError(
                f"{empty[0]}{why}: add some or take its folder away. Images are {', '.join(sorted(IMAGE_SUFFIXES))}"
            )
        return Raw(
            parts, class_names=tuple(map(readable, self.classes)), notes=(*empty, *self._notes(remarks)), fitted=True
        )

    def _notes(self, remarks: Tally) -> Iterator[str]:
        if self.left_out.counts:
            yield f"{self.folder}: left out: {', '.join(self.left_out.parts())}"
        yield from remarks.lines()
        alike = folders_alike(self.places["train"], self.classes)
        if alike:
            yield (
                f"{self.folder}: its classes {', '.join(self.classes[:3])} hold folders of the same names ({alike}): "
                "if they are parts, call them train/, val/ and test/"
            )
        if len(self.classes) == 1:
            yield (
                f"{self.folder}: all images are of one class, '{self.classes[0]}': give the folder that holds class "
                "folders"
            )


def listing_of(folder: Path) -> Listing:
    """List all images of a folder. Raises BnfuseError where its parts or classes are not what they should be."""
    left_out = Tally(folder)
    try:
        places = parts_of(folder, left_out)
        classes = class_folders(places["train"], left_out)
        listed = {part: listed_part(part, place, classes, left_out) for part, place in places.items()}
    except OSError as error:
        raise BnfuseError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from None
    paths = {part: found for part, (found, _) in listed.items()}
    labels = {part: np.array(found, np.int64) for part, (_, found) in listed.items()}
    return Listing(folder, places, classes, paths, labels, left_out)


def image_folder(
    listing: Listing,
    image: int | None,
    channels: int | None,
    fit: str = "resize",
    share: float | None = None,
    *,
    skip_unreadable: bool = False,
) -> Raw:
    """Read all images of a folder. Raises BnfuseError where files are not what they should be."""
    folder, remarks = listing.folder, Tally(listing.folder)
    read = functools.partial(read_picture, image=image, channels=channels, fit=fit, share=share)
    if image is not None:
        check_memory(listing.count, channels or 1, image, image, str(folder))
    files = [path for paths in listing.paths.values() for path in paths]
    x, kept = read_all(folder, files, read, remarks, listing.left_out if skip_unreadable else None)
    images, masks, start, first = {}, {}, 0, 0
    for part, paths in listing.paths.items():
        masks[part] = kept[start : start + len(paths)]
        count = int(masks[part].sum())
        images[part] = x[first : first + count]
        start, first = start + len(paths), first + count
    return listing.raw(images, masks, remarks)


def streamed_folder(listing: Listing, reading: Reading) -> Raw:
    """Give the images of a folder, decoded when they are asked for. All are opened once, as far as their headers go;
    where those that cannot be read are to be skipped, all of them are decoded once."""
    remarks = Tally(listing.folder)
    found, masks = {}, {}
    for part, paths in listing.paths.items():
        items = Files(listing.folder, tuple(str(path.relative_to(listing.folder)) for path in paths))
        masks[part] = looked_at(items, reading, remarks, listing.left_out)
        found[part] = reading.images(items if masks[part].all() else items.take(np.flatnonzero(masks[part])))
        if not len(found[part]):
            raise BnfuseError(f"{listing.folder}: none of its {len(paths)} images can be read (first: {paths[0]})")
    return listing.raw(found, masks, remarks)


def parts_of(folder: Path, left_out: Tally) -> dict[str, Path]:
    """Give the folders of the parts that there are, train first; that is `folder` itself where it has no parts."""
    names = [name for name, is_folder in entries(folder) if is_folder and not is_hidden(name)]
    found: dict[str, Path] = {}
    for part, spellings in PART_NAMES.items():
        ours = [name for name in names if name.lower() in spellings]
        if len(ours) > 1:
            raise BnfuseError(f"{folder}: has both {ours[0]}/ and {ours[1]}/: keep one of them")
        if ours:
            found[part] = folder / ours[0]
    others = [name for name in names if folder / name not in found.values()]
    if "train" not in found:
        if found and not others:
            raise BnfuseError(f"{folder}: has {', '.join(f'{p.name}/' for p in found.values())} but no train/")
        return {"train": folder}
    nested = any(is_folder and not is_hidden(name) for name, is_folder in entries(found["train"]))
    if len(found) == 1 and not nested:
        return {"train": folder}  # a class of that name
    if len(found) == 1 and others:
        raise BnfuseError(
            f"{folder}: {found['train'].name}/ holds folders, and {others[0]}/ lies beside it: call the folder of "
            f"images that are held out val/ or test/, or pass {found['train']} to hold out a share of its own"
        )
    for name, _ in entries(folder):
        if folder / name not in found.values():
            left_out.add(HIDDEN if is_hidden(name) else BESIDE, folder / name)
    return found


def class_folders(folder: Path, left_out: Tally) -> tuple[str, ...]:
    """List the names of the classes, in order."""
    found = []
    for name, is_folder in entries(folder):
        if is_hidden(name):
            left_out.add(HIDDEN, folder / name)
        elif is_folder:
            found.append(name)
        else:
            left_out.add(STRAY, folder / name)
    if not found:
        what = "holds images but no folders" if any(is_image(name) for name, _ in entries(folder)) else "has no folders"
        raise BnfuseError(f"{folder}: {what}: put the images of each class into a folder of its own")
    return tuple(found)


def folders_alike(folder: Path, classes: Sequence[str]) -> str:
    """List the names of folders that all classes have, where none has an image beside them: parts of unknown names look
    so."""
    found: set[str] | None = None
    for name in classes:
        inside = [(name, is_folder) for name, is_folder in entries(folder / name) if not is_hidden(name)]
        below = {name for name, is_folder in inside if is_folder}
        found = below if found is None else found & below
        if not found or any(is_image(name) for name, is_folder in inside if not is_folder):
            return ""
    return ", ".join(sorted(found or ())[:3]) if len(classes) > 1 else ""


def listed_part(part: str, folder: Path, classes: Sequence[str], left_out: Tally) -> tuple[list[Path], list[int]]:
    """Give the image files of a part, class by class, and their labels."""
    if part != "train":
        own = class_folders(folder, left_out)
        for name in own:
            if name not in classes:
                raise BnfuseError(f"{folder}: has a class '{name}' that the training part has not")
        for name in classes:
            if name not in own:
                raise BnfuseError(f"{folder}: has no folder for the class '{name}' of the training part")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        for path in image_files(folder / name, left_out):
            paths.append(path)
            labels.append(label)
            if len(paths) > MAX_IMAGES:
                raise BnfuseError(f"{folder}: holds more than {MAX_IMAGES:,} images, the most that are read")
    if not paths:
        kinds = ", ".join(left_out.parts())
        why = f" (left out: {kinds})" if kinds else ""
        raise BnfuseError(f"{folder}: its folders hold no images{why}: they end in {', '.join(sorted(IMAGE_SUFFIXES))}")
    return paths, labels


def image_files(folder: Path, left_out: Tally) -> Iterator[Path]:
    """List the image files in a folder and in all below it; links are followed, but for those that lead back to where
    they lie."""
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while waiting:
        place, above = waiting.pop()
        found = place.stat()
        here = (found.st_dev, found.st_ino)
        if here in above:
            left_out.add(LOOP, place)
            continue
        below = []
        for name, is_folder in entries(place):
            path = place / name
            if is_hidden(name):
                left_out.add(HIDDEN, path)
            elif is_folder:
                below.append((path, above | {here}))
            elif not is_image(name):
                left_out.add(f"of {path.suffix.lower()}" if path.suffix else "without an ending", path)
            elif path.is_file() or not path.exists():  # a link to nothing is an image that is lost
                yield path
            else:
                left_out.add(SPECIAL, path)
        waiting += reversed(below)


def entries(folder: Path) -> list[tuple[str, bool]]:
    """Tell what lies in a folder, by name, and whether it is a folder or leads to one."""
    with os.scandir(folder) as found:
        return sorted((entry.name, is_folder(entry)) for entry in found)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a folder or leads to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def is_image(name: str) -> bool:
    """Tell whether a file of this name is read as an image."""
    return Path(name).suffix.lower() in IMAGE_SUFFIXES and not is_hidden(name)


def is_hidden(name: str) -> bool:
    """Tell whether a file or folder of this name is left out: hidden, or of the system."""
    return name.startswith(".") or name.lower() in SYSTEM


def read_all(
    folder: Path, files: Sequence[Path], read: Callable[[Path], Picture], remarks: Tally, skipped: Tally | None
) -> tuple[np.ndarray, np.ndarray]:
    """Read uint8 or float32 [N, C, H, W], and which files are in it, as a mask: all, or with `skipped` those that can
    be read. They must be of one size as `read` gives them."""
    kept = np.ones(len(files), bool)
    x: np.ndarray | None = None
    count = 0
    for index, path in enumerate(files):
        try:
            picture = read(path)
        except BnfuseError as error:
            if skipped is None:
                raise BnfuseError(f"{error}. Mend or remove it, or pass --skip-unreadable.") from None
            skipped.add(UNREADABLE, path)
            kept[index] = False
            continue
        for remark in picture.remarks:
            remarks.add(remark, path)
        if x is None:
            check_memory(len(files), *picture.values.shape, str(folder))  # type: ignore[call-arg]
            x = np.empty((len(files), *picture.values.shape), picture.values.dtype)
        elif picture.values.shape[1:] != x.shape[2:]:
            size, others = (f"{width}x{height}" for height, width in (picture.values.shape[1:], x.shape[2:]))
            raise BnfuseError(f"{path}: is {size}, others are {others}: pass --image")
        x = grown(x, picture)
        x[count] = picture.values / np.float32(255) if x.dtype != picture.values.dtype else picture.values
        count += 1
    if x is None:
        raise BnfuseError(f"{folder}: none of its {len(files)} images can be read (first: {files[0]})")
    return x[:count], kept


def grown(x: np.ndarray, picture: Picture) -> np.ndarray:
    """Make the array of all images, as float32 from the first picture that is no bytes on, in colour from the first one
    that has any."""
    if x.dtype == np.uint8 and picture.values.dtype != np.uint8:
        x = x / np.float32(255)
    return np.repeat(x, 3, axis=1) if len(picture.values) == 3 and x.shape[1] == 1 else x
