"""Images in an .npz: `x` and `y`, with `x_val`, `y_val` and `x_test`, `y_test` where they are there.

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

from .dataset import MAX_BYTES, Part, Raw, check_memory

SUFFIXES = {"train": "", "val": "_val", "test": "_test"}
NAMES = tuple(f"{name}{end}" for end in SUFFIXES.values() for name in "xy")
FAR = 16  # times as large, the largest as well as the mean: numbers of another unit
SOME = 1024  # images whose mean is taken


def npz_file(path: Path, image: int | None = None, channels: int | None = None) -> Raw:
    """Read `x` [N, H, W], [N, C, H, W] or [N, H, W, C] and `y` [N], and as much for the other parts."""
    try:
        if not zipfile.is_zipfile(path):  # raises where there is no such file
            path.open("rb").close()
            raise ValueError("it is no .npz, or is cut short: numpy.savez writes one")
        with np.load(path, allow_pickle=False) as arrays:
            parts = parts_in(arrays, path)
            others = [name for name in arrays.files if name not in NAMES]
            check_sizes(arrays, path, parts, image, channels)
            found = {
                part: Part(map_of(array_in(arrays, f"x{end}"), f"x{end}", path), array_in(arrays, f"y{end}"), f"x{end}")
                for part, end in SUFFIXES.items()
                if part in parts
            }
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
    notes = [f"{path}: left out: {', '.join(map(repr, others))}: it may have {', '.join(NAMES)}"] if others else []
    return Raw(found, scale=255.0 if found["train"].x.dtype == np.uint8 else 1.0, notes=tuple(notes))


def array_in(arrays: Any, name: str) -> np.ndarray:
    """Read one of the arrays; numpy gives the bytes of a member that is none."""
    found = arrays[name]
    if not isinstance(found, np.ndarray):
        raise ValueError(f"'{name}' is no array")
    return found


def parts_in(arrays: Any, path: Path) -> list[str]:
    """Find which parts are there, each with images and labels."""
    missing = [key for key in ("x", "y") if key not in arrays]
    if missing:
        found = ", ".join(arrays.files[:6]) or "nothing"
        raise BnfuseError(f"{path}: has no array '{missing[0]}' (it has {found}): it needs x and y")
    parts = []
    for part, end in SUFFIXES.items():
        pair = [f"{name}{end}" for name in "xy"]
        there = [key for key in pair if key in arrays]
        if len(there) == 1:
            lost = next(key for key in pair if key not in there)
            raise BnfuseError(f"{path}: has '{there[0]}' but no '{lost}': it needs both or none")
        if there:
            parts.append(part)
    return parts


def check_sizes(arrays: Any, path: Path, parts: Sequence[str], image: int | None, channels: int | None) -> None:
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
    for name in (f"{letter}{SUFFIXES[part]}" for part in parts for letter in "xy"):
        shape = shape_in(arrays, name)
        if not (name[0] == "x" and len(shape) in (3, 4)) and 8 * math.prod(shape) > MAX_BYTES:
            raise BnfuseError(f"{path}: {name} claims the shape {list(shape)}: it is too large")


def shape_in(arrays: Any, name: str) -> tuple[int, ...]:
    """Tell what the header of an array says."""
    with arrays.zip.open(f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape: tuple[int, ...] = read(stream)[0]
        return shape


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
