"""What is drawn for an image: a hash of (seed, epoch, stream, its index in the data set).

So it is the same whatever batch the image is in, whoever loads it, and wherever a run goes on. A stream is one thing
that is drawn, as whether the image is mirrored.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

WORD = (1 << 64) - 1
STEPS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64


def drawn(seed: int, epoch: int, indices: np.ndarray, stream: int) -> np.ndarray:
    """Draw uint64 for every index: SplitMix64's finaliser over the four numbers, one after the other."""
    with np.errstate(over="ignore"):
        state = np.zeros(len(indices), np.uint64)
        for part in (seed, epoch, stream):
            state = mixed(state + np.uint64(part & WORD))
        return mixed(state + indices.astype(np.uint64))


def mixed(z: np.ndarray) -> np.ndarray:
    """Mix the bits of each uint64: SplitMix64's finaliser."""
    z = z + np.uint64(STEPS[0])
    z = (z ^ (z >> np.uint64(30))) * np.uint64(STEPS[1])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(STEPS[2])
    return z ^ (z >> np.uint64(31))


@dataclasses.dataclass(frozen=True)
class Draw:
    """What is drawn for one image in one epoch: the numbers of `drawn`, one at a time."""

    seed: int
    epoch: int
    index: int

    def word(self, stream: int) -> int:
        """Draw a whole number below 2**64."""
        return mixed_one(prefix(self.seed, self.epoch, stream) + self.index)

    def whole(self, stream: int, count: int) -> int:
        """Draw a whole number from 0 to count - 1."""
        return self.word(stream) % count

    def real(self, stream: int, low: float = 0.0, high: float = 1.0) -> float:
        """Draw a number from `low` on, below `high`, with 53 bits."""
        return low + (high - low) * (self.word(stream) >> 11) / (1 << 53)

    def order(self, stream: int, count: int) -> list[int]:
        """Draw an order of 0 to count - 1, by streams from `stream` on."""
        found = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.whole(stream + last, last + 1)
            found[last], found[other] = found[other], found[last]
        return found


@functools.lru_cache(maxsize=4096)
def prefix(seed: int, epoch: int, stream: int) -> int:
    """Mix what is the same for all images."""
    state = 0
    for part in (seed, epoch, stream):
        state = mixed_one(state + part)
    return state


def mixed_one(z: int) -> int:
    """Mix the bits of one number as `mixed` does."""
    z = (z + STEPS[0]) & WORD
    z = ((z ^ (z >> 30)) * STEPS[1]) & WORD
    z = ((z ^ (z >> 27)) * STEPS[2]) & WORD
    return z ^ (z >> 31)


def log_uniform(draw: Draw, stream: int, low: float, high: float) -> float:
    """Draw a ratio whose logarithm is uniform."""
    return math.exp(draw.real(stream, math.log(low), math.log(high)))
