"""Where images come from: the embedded digits, Debian's Fashion-MNIST, .npz files (arrays.py), folders (folders.py),
tars (tars.py), tables (hugging_face.py).

A file is input from outside: nothing is unpickled, sizes are checked before memory is set aside, and what is wrong is
said in one line.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.progress import Progress, bar_of, quiet

from .array_folders import is_array_folder
from .arrays import array_file
from .dataset import MAX_BYTES, Dataset, Part, Raw, finish, fits_memory
from .folders import image_folder, listing_of, streamed_folder
from .hugging_face import PREFIX as HUGGING_FACE
from .hugging_face import hub_table, is_table, saved_table
from .masks import mask_folder
from .reading import SIZES, Reading
from .targets import Target, are_alike
from .tars import holds_tars, is_tars, tar_shards

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def load_data(
    spec: str | os.PathLike[str],
    *,
    image: int | None = None,
    channels: int | None = None,
    classes: int | None = None,
    fit: str = "resize",
    seed: int = 0,
    held_out: float = 0.2,
    skip_unreadable: bool = False,
    targets: Sequence[Target] = (),
    stream: bool = False,
    workers: int | None = None,
    crop_share: float | None = None,
    mean: Any = None,
    std: Any = None,
    random_crops: bool = False,
    shared: bool = False,
    progress: Progress = quiet,
) -> Dataset:
    """Read images by name (`digits`, `fashion-mnist`), of an .npz file, of a folder with a folder for each class, of
    one with `x.npy` and `y.npy`, of WebDataset's tars (`train-{000..009}.tar`), or of Hugging Face's `datasets`
    (`hf:name[:config]`, or a folder that `save_to_disk` wrote).

    image            side that the images are brought to, by `fit`: resize, or pad with zeros
    channels         1 or 3: grey is repeated, colour is averaged by luminance
    classes          what the network has; fails where the data has more
    held_out         share of the images for testing, chosen by `seed`, where the source has no such part of its own
    skip_unreadable  files that cannot be read are left out and counted; by default the first one raises
    targets          the labels that the graph takes, the ones to be scored first: of several the .npz has an array each
    stream           decode images when they are asked for; what does not fit into memory is streamed in any case, and
                     so are tars and tables. `workers` threads decode: by default as many as there are processors
    crop_share       take the middle of each image, a square whose side is this share of its shorter side
    mean, std        what images are normalised by: "imagenet", a number, or one for each channel; by default those of
                     the training images, of streamed ones of some of them
    random_crops     training draws a part of each image: folders are streamed then, so that it is one of the whole
                     image, and the crop share is 0.875 where none is given
    shared           each of several ranks takes a part of the images: folders are streamed then
    progress         hears by its bar how many images have been looked at, where they are streamed

    Raises BnfuseError with one line that names the file. docs/training.md
    """
    reading = Reading(
        image, channels, fit, crop_share, skip_unreadable, stream, workers, seed, random_crops, shared, bar_of(progress)
    )
    reading.check()
    if classes is not None and not 1 <= classes <= SIZES:
        raise BnfuseError(f"classes={classes} is out of range: it must be from 1 to {SIZES}")
    name = os.fspath(spec)
    raw = _source(name, reading, targets)
    if targets and targets[0].is_map:
        classes, first = classes or targets[0].classes, raw.parts["train"].y
        if first.dtype.names is None and first.ndim < 3:
            raise BnfuseError(
                f"{name}: has one label for each image, the graph takes {targets[0]}: give an .npz with masks, or a "
                "folder of images/ and masks/"
            )
    if len(targets) > 1 and raw.parts["train"].y.dtype.names is None:
        if not are_alike(targets):
            each = ", ".join(map(str, targets))
            raise BnfuseError(f"{name}: has one label for each image, the graph takes {each}: give an .npz of arrays")
        note = f"{name}: its labels are those of {' and '.join(target.name for target in targets)} alike"
        raw = dataclasses.replace(raw, notes=(*raw.notes, note))
    return finish(raw, name, reading, classes=classes, held_out=held_out, mean=mean, std=std)


def _source(name: str, reading: Reading, targets: Sequence[Target]) -> Raw:
    if name.startswith(HUGGING_FACE):
        return hub_table(name, reading)
    if is_tars(name):
        return tar_shards(name, reading)
    path = Path(name)
    is_there = os.path.isdir(path)  # noqa: PTH112 (of a name that is too long, or a place that may not be looked at)
    if is_there and name not in ("digits", "fashion-mnist") and not is_array_folder(path):
        maps = len(targets) == 1 and targets[0].is_map
        return mask_folder(path, reading, targets[0]) if maps else _folder(path, reading)
    if reading.stream:
        raise BnfuseError(f"{name}: holds arrays, which are read as a whole: leave --stream out")
    if name == "digits":
        return digits()
    if name == "fashion-mnist":
        return fashion_mnist()
    if is_there or path.suffix == ".npz":
        return array_file(path, reading.image, reading.channels, targets)
    raise BnfuseError(
        f"{name}: is no data: give digits, fashion-mnist, an .npz with x and y, a folder with a folder per class, "
        "tars as train-{000..009}.tar, or hf:NAME"
    )


def _folder(path: Path, reading: Reading) -> Raw:
    """Read a folder of images, tars or a table: into memory where that holds it."""
    if is_table(path):
        return saved_table(path, reading)
    if holds_tars(path):
        return tar_shards(str(path), reading)
    listing = listing_of(path)
    image, channels = reading.image, reading.channels
    can = image is not None and channels in (1, 3) and reading.fit != "pad"
    of_parts = reading.random_crops or reading.shared  # of images, or of the folder
    if reading.stream or (can and (of_parts or not fits_memory(listing.count, channels or 1, image or 1, image or 1))):
        return streamed_folder(listing, reading)
    return image_folder(listing, image, channels, reading.fit, reading.share, skip_unreadable=reading.skip_unreadable)


def digits() -> Raw:
    """Read the embedded digits: 8 x 8 pixels, ten classes."""
    with resources.files(__package__).joinpath("digits.npz").open("rb") as stream, np.load(stream) as arrays:
        part = Part(arrays["images"][:, None], arrays["labels"])
        return Raw({"train": part}, class_names=tuple("0123456789"), scale=16.0)


def fashion_mnist(folder: Path | None = None) -> Raw:
    """Read Fashion-MNIST from its folder. Raises BnfuseError where it is not there."""
    folder = folder or FASHION_FOLDER
    if not folder.is_dir():
        raise BnfuseError(f"{folder}: is not there: install Debian's package (apt install dataset-fashion-mnist)")
    parts = {}
    for key, part in (("train", "train"), ("test", "t10k")):
        x = read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3)
        parts[key] = Part(x[:, None], read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 1), f"its {part} part")
    return Raw(parts, class_names=FASHION_CLASSES)


def read_idx(path: Path, rank: int) -> np.ndarray:
    """Read the uint8 values of a gzipped IDX file: magic 0, 0, 8, rank; big-endian sizes; the values."""
    try:
        with gzip.open(path) as stream:
            head = stream.read(4 + 4 * rank)
            shape = tuple(int(size) for size in np.frombuffer(head[4:], ">u4"))
            if head[:4] != bytes((0, 0, 8, rank)) or len(shape) != rank:
                raise BnfuseError(f"{path}: is no IDX file of {rank} dimensions")
            size = int(np.prod(shape, dtype=np.float64))
            if size > MAX_BYTES:
                raise BnfuseError(f"{path}: claims {size} bytes of images")
            data = stream.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise BnfuseError(f"{path}: cannot be read: {error}") from None
    if len(data) != size:
        raise BnfuseError(f"{path}: is cut short: {len(data)} of {size} bytes")
    return np.frombuffer(data, np.uint8).reshape(shape)
