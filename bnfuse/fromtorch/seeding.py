"""Random numbers of other people's code, drawn by torch, Python and numpy, that follow from a seed of ours."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def seeded(*parts: int) -> Iterator[None]:
    """Let the generators of torch's host, of Python and of numpy begin at these numbers, and be afterwards what they
    were. Processes that torch starts (workers of a DataLoader) take their seeds from there."""
    import torch

    seed = int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - what datasets draw by
    try:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
        torch.set_rng_state(kept[2])
