"""Random changes of training images: `flip`, `pad-crop[:4]`, both as `flip,pad-crop`, or `none`.

    augment = parse_augment("flip,pad-crop:4")
    augment(images, indices, seed=0, epoch=3)                # images float32 [B, C, H, W], indices int64 [B]

What happens to an image is a hash of (seed, epoch, its index in the data set), so it is the same whatever batch the
image is in, and whoever loads it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from bnfuse.core.errors import BnfuseError

HELP = "none, flip, pad-crop[:pixels], or several with commas between them"
FLIP, ROW, COLUMN = 1, 2, 3  # streams of the hash


@dataclasses.dataclass(frozen=True)
class Augment:
    """Which changes are made, and how large."""

    flip: bool = False  # mirror left and right, with probability a half
    crop: int = 0  # pad by so many zeros on each side, then cut out a window of the old size anywhere

    def __call__(self, images: np.ndarray, indices: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """Change images float32 [B, C, H, W], whose places in the data set are `indices` int64 [B]."""
        if self.crop:
            span = np.uint64(2 * self.crop + 1)
            down, right = (drawn(seed, epoch, indices, stream) % span for stream in (ROW, COLUMN))
            images = cropped(images, self.crop, down.astype(np.int64), right.astype(np.int64))
        if self.flip:
            chosen = (drawn(seed, epoch, indices, FLIP) & np.uint64(1)).astype(bool)
            images = np.where(chosen[:, None, None, None], images[..., ::-1], images)
        return images

    def __str__(self) -> str:
        parts = [*(["flip"] if self.flip else []), *([f"pad-crop:{self.crop}"] if self.crop else [])]
        return ",".join(parts) or "none"


def parse_augment(text: str | Augment | None) -> Augment:
    """Read the changes as people write them. Raises BnfuseError where one is unknown."""
    if isinstance(text, Augment):
        return text
    flip, crop = False, 0
    for part in (text or "none").split(","):
        kind, colon, rest = part.strip().partition(":")
        if kind == "pad-crop" and (not colon or (rest.isascii() and rest.isdigit() and 0 < int(rest) <= 256)):
            crop = int(rest) if colon else 4
        elif kind == "flip" and not colon:
            flip = True
        elif kind != "none" or colon:
            raise BnfuseError(f"augmentation '{part.strip()}' is unknown: write {HELP}")
    return Augment(flip, crop)


def cropped(images: np.ndarray, pad: int, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Cut of each padded image [C, H + 2*pad, W + 2*pad] the window of H x W that begins at (down, right)."""
    _, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    return windows[np.arange(len(images)), :, down, right]


def drawn(seed: int, epoch: int, indices: np.ndarray, stream: int) -> np.ndarray:
    """Draw uint64 for every index: SplitMix64's finaliser over the four numbers, one after the other."""
    with np.errstate(over="ignore"):
        state = np.zeros(len(indices), np.uint64)
        for part in (seed, epoch, stream):
            state = mixed(state + np.uint64(part & 0xFFFFFFFFFFFFFFFF))
        return mixed(state + indices.astype(np.uint64))


def mixed(z: np.ndarray) -> np.ndarray:
    """Mix the bits of each uint64: SplitMix64's finaliser."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
