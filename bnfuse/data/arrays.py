"""Images in an .npz, or in .npy files of a folder: `x` and `y`, with `x_val`, `y_val` and `x_test`, `y_test` where they
are there. Of a graph with several inputs for labels there is an array for each, by its name, instead of `y`.

Bytes are divided by 255, all other numbers are taken as they are, so the parts must be alike: all bytes or none, and
not one from 0 to 1 with another from 0 to 255. Nothing is unpickled, and sizes are asked before anything is read.
Arrays of other names are left out, and named.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError

from .array_folders import ArrayFolder
from .dataset import MAX_BYTES, Part, Raw, check_labels, check_memory
from .targets import Target, are_alike, checked, joined

SUFFIXES = {"train": "", "val": "_val", "test": "_test"}
FAR = 16  # times as large, the largest as well as the mean: numbers of another unit
SOME = 1024  # images whose mean is taken

LARGEST_ELEMENT = 1024  # bytes: what is larger is no number, and not to be read


def array_file(
    path: Path, image: int | None = None, channels: int | None = None, targets: Sequence[Target] = ()
) -> Raw:
    """Read `x` [N, H, W], [N, C, H, W] or [N, H, W, C] and `y` [N], and as much for the other parts.

    `targets` are the labels that the graph takes; one array for each is read by its name where the file has them.
    """
    try:
        if path.is_dir():
            found, others = parts_of(ArrayFolder(path), path, image, channels, targets)
        else:
            if not zipfile.is_zipfile(path):  # raises where there is no such file
                path.open("rb").close()
                raise ValueError("it is no .npz, or is cut short: numpy.savez writes one")
            with np.load(path, allow_pickle=False) as arrays:
                found, others = parts_of(arrays, path, image, channels, targets)
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        MemoryError,
        NotImplementedError,
        RuntimeError,
        tokenize.TokenError,  # numpy, of a header that is cut short
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        what = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise BnfuseError(f"{path}: cannot be read: {what}") from None
    for part in (part for name, part in found.items() if name != "train"):
        check_alike(found["train"], part, path)
    notes = []
    if others:
        left, known = ", ".join(map(repr, others)), ", ".join(names_of(found["train"].y.dtype.names or ("y",)))
        notes.append(f"{path}: left out: {left}: it may have {known}")
    return Raw(found, scale=255.0 if found["train"].x.dtype == np.uint8 else 1.0, notes=tuple(notes))


def parts_of(
    arrays: Any, path: Path, image: int | None, channels: int | None, targets: Sequence[Target]
) -> tuple[dict[str, Part], list[str]]:
    """Read the parts, and list the arrays that are of none."""
    labels = chosen_labels(arrays, path, targets)
    parts = parts_in(arrays, path, labels)
    check_sizes(arrays, path, parts, labels, image, channels)
    found = {}
    for part in parts:
        end = SUFFIXES[part]
        x = map_of(array_in(arrays, f"x{end}"), f"x{end}", path)
        found[part] = Part(x, labels_in(arrays, path, labels, targets, end, len(x)), f"x{end}")
    return found, [name for name in arrays.files if name not in names_of(labels)]


def names_of(labels: Sequence[str]) -> list[str]:
    """List the names that arrays may have, where these are those of labels."""
    return [f"{name}{end}" for end in SUFFIXES.values() for name in ("x", *labels)]


def chosen_labels(arrays: Any, path: Path, targets: Sequence[Target]) -> tuple[str, ...]:
    """Choose the names of the arrays with labels: those of the graph's inputs where any is there, or `y` alone."""
    own = tuple(target.name for target in targets)
    if any(name in arrays for name in own) and not (len(own) == 1 and "y" in arrays):
        return own
    if len(own) > 1 and not ("y" in arrays and are_alike(targets)):
        each = ", ".join(map(str, targets))
        raise BnfuseError(f"{path}: has no arrays with the labels that the graph takes: {each}")
    return ("y",)


def labels_in(
    arrays: Any, path: Path, labels: Sequence[str], targets: Sequence[Target], end: str, count: int
) -> np.ndarray:
    """Read the labels of a part: one array, or those of several inputs side by side."""
    if len(labels) == 1:
        array, target = array_in(arrays, f"{labels[0]}{end}"), targets[0] if targets else None
        if target is not None and target.is_map:
            return checked(array, target, count, f"{path}: {labels[0]}{end}")
        return array if array.ndim < 3 else check_labels(array, count, str(path), f"x{end}")
    return joined(
        {
            target.name: checked(array_in(arrays, f"{target.name}{end}"), target, count, f"{path}: {target.name}{end}")
            for target in targets
        }
    )


def array_in(arrays: Any, name: str) -> np.ndarray:
    """Read one of the arrays; numpy gives the bytes of a member that is none."""
    found = arrays[name]
    if not isinstance(found, np.ndarray):
        raise ValueError(f"'{name}' is no array")
    return found


def parts_in(arrays: Any, path: Path, labels: Sequence[str] = ("y",)) -> list[str]:
    """Find which parts are there, each with images and labels."""
    missing = [key for key in ("x", *labels) if key not in arrays]
    if missing:
        found = ", ".join(arrays.files[:6]) or "nothing"
        needed = " and ".join(("x", *labels)) if len(labels) == 1 else ", ".join(("x", *labels))
        raise BnfuseError(f"{path}: has no array '{missing[0]}' (it has {found}): it needs {needed}")
    parts = []
    for part, end in SUFFIXES.items():
        needed_here = [f"{name}{end}" for name in ("x", *labels)]
        there = [key for key in needed_here if key in arrays]
        if there and len(there) < len(needed_here):
            lost = next(key for key in needed_here if key not in there)
            whole = "both" if len(needed_here) == 2 else f"all of {', '.join(needed_here)}"
            raise BnfuseError(f"{path}: has '{there[0]}' but no '{lost}': it needs {whole} or none")
        if there:
            parts.append(part)
    return parts


def check_sizes(
    arrays: Any, path: Path, parts: Sequence[str], labels: Sequence[str], image: int | None, channels: int | None
) -> None:
    """Check by the headers alone that all images fit into memory as float32, and that nothing else is large."""
    count, largest = 0, (0, 0, 0)
    for part in parts:
        shape = shape_in(arrays, f"x{SUFFIXES[part]}")
        if len(shape) in (3, 4):
            count += shape[0]
            c, h, w = layout(shape)
            largest = max(largest, (c, h, w), key=lambda dims: dims[0] * dims[1] * dims[2])
    check_memory(count, *largest, str(path))
    check_memory(count, channels or largest[0], image or largest[1], image or largest[2], str(path))
    for array, end in ((array, SUFFIXES[part]) for part in parts for array in ("x", *labels)):
        name = f"{array}{end}"
        shape = shape_in(arrays, name)
        if dtype_in(arrays, name).itemsize > LARGEST_ELEMENT:
            raise BnfuseError(f"{path}: {name} has elements of {dtype_in(arrays, name).itemsize} bytes: give numbers")
        if not (array == "x" and len(shape) in (3, 4)) and 8 * math.prod(shape) > MAX_BYTES:
            raise BnfuseError(f"{path}: {name} claims the shape {list(shape)}: it is too large")


def shape_in(arrays: Any, name: str) -> tuple[int, ...]:
    """Give the shape that the header of an array says."""
    return header_of(arrays, name)[0]


def dtype_in(arrays: Any, name: str) -> np.dtype[Any]:
    """Give the type that the header of an array says."""
    return header_of(arrays, name)[1]


def header_of(arrays: Any, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the header of an array, and nothing else."""
    member = arrays.member(name) if isinstance(arrays, ArrayFolder) else arrays.zip.open(f"{name}.npy")
    with member as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
        return shape, dtype


def layout(shape: Sequence[int]) -> tuple[int, int, int]:
    """Give channels, height, width of images [N, H, W], [N, C, H, W] or [N, H, W, C]."""
    if len(shape) == 3:
        return 1, shape[1], shape[2]
    _, a, b, c = shape
    return (c, a, b) if is_channels_last(shape) else (a, b, c)


def is_channels_last(shape: Sequence[int]) -> bool:
    """Tell whether images [N, ., ., .] have their channels at the end, as far as sizes tell it."""
    return (shape[1] not in (1, 3) and shape[3] in (1, 3)) or (shape[1] > 4 and shape[3] in (2, 4))


def map_of(x: np.ndarray, name: str, path: Path) -> np.ndarray:
    """Bring images to [N, C, H, W], of finite numbers that float32 holds."""
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim != 4 or x.dtype.kind not in "fiu" or 0 in x.shape:
        shape = list(x.shape)
        raise BnfuseError(f"{path}: {name} is {x.dtype} {shape}: it must hold images [N, C, H, W] or [N, H, W]")
    if is_channels_last(x.shape):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype.kind == "f":
        low, high = float(x.min()), float(x.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise BnfuseError(f"{path}: {name} holds values that are not finite")
        if max(-low, high) > float(np.finfo(np.float32).max):
            raise BnfuseError(f"{path}: {name} holds values up to {max(-low, high):.3g}, beyond float32: scale them")
        if 0 < max(-low, high) < float(np.finfo(np.float32).tiny):
            raise BnfuseError(f"{path}: {name} holds values up to {max(-low, high):.3g}, 0 in float32: scale them")
    return x


def check_alike(train: Part, other: Part, path: Path) -> None:
    """Raise where one part means its numbers otherwise than the other."""
    if other.x.shape[1:] != train.x.shape[1:]:
        one, two = ("x".join(map(str, part.x.shape[1:])) for part in (train, other))
        raise BnfuseError(f"{path}: x and {other.name} hold images of different shapes, {one} and {two}")
    if (train.x.dtype == np.uint8) != (other.x.dtype == np.uint8):
        raise BnfuseError(
            f"{path}: x is {train.x.dtype} and {other.name} {other.x.dtype}: bytes are divided by 255, other numbers "
            "are not, so store both as one type"
        )
    small, large = sorted((sizes_of(part.x), part.name) for part in (train, other))
    if small[0][0] > 0 and all(there >= FAR * here for there, here in zip(large[0], small[0], strict=True)):
        raise BnfuseError(
            f"{path}: {small[1]} has values up to {small[0][0]:.4g} and {large[1]} up to {large[0][0]:.4g}: bring both "
            "to one scale"
        )


def sizes_of(x: np.ndarray) -> tuple[float, float]:
    """Measure some images: the largest value, whatever its sign, and the mean; a few values far off are no other
    unit."""
    some = np.abs(x[:: len(x) // SOME + 1].astype(np.float64))
    return max(-float(x.min()), float(x.max())), float(some.mean())
