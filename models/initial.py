"""Initial values of parameters, each drawn from its own stream (seed, name).

The value of a parameter depends on the seed, its name and its shape, not on what else the network has: a network
with one layer more keeps the values of all others.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np


def kaiming(name: str, shape: Sequence[int], seed: int | None, *, gain: float = math.sqrt(2.0)) -> np.ndarray:
    """Draw normal float32 values of deviation gain/sqrt(fan in), as He et al. 2015 (eq. 10) for a ReLU network.

    `shape` is (out, in/group, kh, kw) of a convolution or (out, in) of a linear layer; fan in is all but the first.
    Without a seed: zeros that take no memory, for those who only want to look at shapes.
    """
    if seed is None:
        return np.broadcast_to(np.float32(0), tuple(shape))
    fan_in = math.prod(shape[1:])
    stream = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = stream.standard_normal(tuple(shape), dtype=np.float32)
    values *= np.float32(gain / math.sqrt(fan_in))
    return values
