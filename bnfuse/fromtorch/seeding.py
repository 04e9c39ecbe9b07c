"""Random numbers of other people's code, drawn by torch, Python and numpy: from a seed of ours, or refused."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np

from bnfuse.core.errors import BnfuseError


@contextlib.contextmanager
def undrawn(name: str = "") -> Iterator[None]:
    """Keep the states of Python's and numpy's generators, and raise BnfuseError, which begins with `name`, where a
    forward that is captured in this context drew by them: what it drew would be a constant."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - what modules draw by
    try:
        yield
        drew = random.getstate() != python or not all(map(np.array_equal, np.random.get_state(), arrays))  # noqa: NPY002
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
    if drew:
        raise BnfuseError(
            f"{name}{': ' * bool(name)}its forward draws by Python's or numpy's random, and would always draw the "
            "same: draw by torch (torch.rand, torch.bernoulli), which is drawn anew in each step"
        )


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
