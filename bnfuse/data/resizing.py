"""Arrays of images, brought to another size or number of channels."""

from __future__ import annotations

import math

import numpy as np

from bnfuse.core.errors import BnfuseError

from .geometry import around, middle


def to_images(
    x: np.ndarray,
    scale: float,
    image: int | None,
    channels: int | None,
    fit: str,
    name: str = "data",
    share: float | None = None,
) -> np.ndarray:
    """Bring images to float32 [N, channels, image, image]; bytes are divided by `scale`. Those that are not square are
    squashed, or with `share` resized to a larger square whose middle they are."""
    x = x.astype(np.float32) / np.float32(scale) if x.dtype == np.uint8 else x.astype(np.float32)
    if channels is not None:
        x = to_channels(x, channels, name)
    if image is not None and share is not None:
        x = cut_out(x, image, share)
    elif image is not None and x.shape[2:] != (image, image):
        x = pad(x, image) if fit == "pad" else resize(x, image)
    return np.ascontiguousarray(x)


def to_channels(x: np.ndarray, channels: int, name: str = "data") -> np.ndarray:
    """Turn grey to colour by repetition, colour to grey by ITU-R BT.601 luminance."""
    have = x.shape[1]
    if have == channels:
        return x
    if have == 1:
        return np.repeat(x, channels, axis=1)
    if have == 3 and channels == 1:
        return np.tensordot(np.array([[0.299, 0.587, 0.114]], np.float32), x, (1, 1)).transpose(1, 0, 2, 3)
    raise BnfuseError(
        f"{name}: images of {have} channels do not become images of {channels}: the network must take {have} (a "
        f"network that comes with bnfuse does when built with --channels {have})"
    )


def pad(x: np.ndarray, size: int) -> np.ndarray:
    """Put zeros around the image; it must not be larger than `size`."""
    height, width = x.shape[2:]
    if max(height, width) > size:
        raise BnfuseError(f"images of {height}x{width} do not fit into {size}x{size}: resize them instead")
    top, left = (size - height) // 2, (size - width) // 2
    return np.pad(x, ((0, 0), (0, 0), (top, size - height - top), (left, size - width - left)))


def resize(x: np.ndarray, height: int, width: int | None = None) -> np.ndarray:
    """Interpolate linearly with pixel centres at halves, averaging over the source pixels where it shrinks."""
    rows, columns = interpolation(x.shape[2], height), interpolation(x.shape[3], width or height)
    return np.matmul(rows, np.matmul(x, columns.T))


def cut_out(x: np.ndarray, size: int, share: float) -> np.ndarray:
    """Cut out the middle, a square whose side is a share of the shorter side, and bring it to size x size."""
    width, height = around(x.shape[3], x.shape[2], math.floor(size / share))
    left, top, right, bottom = middle(width, height, size)
    return resize(x, height, width)[:, :, top:bottom, left:right]


def interpolation(old: int, new: int) -> np.ndarray:
    """Give weights float32 [new, old] of a triangle around each new pixel's centre; every row sums to 1."""
    reach = max(1.0, old / new)
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    distance = np.abs(np.arange(old)[None, :] - np.clip(centres, 0, old - 1)[:, None])
    weights = np.maximum(0.0, 1.0 - distance / reach)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)
