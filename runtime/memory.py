"""The memory of a step: one aligned block a region, and views into it for numpy and for kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm

from bnfuse.runtime.program import ALIGNMENT, Program, Tensor


class Memory:
    """Regions of a program. Those in `shared` belong to another memory, and are taken where they are large enough."""

    def __init__(self, program: Program, shared: Mapping[str, np.ndarray] | None = None) -> None:
        self.program = program
        self.regions: dict[str, np.ndarray] = {}
        for name, size in program.regions.items():
            other = (shared or {}).get(name)
            self.regions[name] = other if other is not None and other.nbytes >= size else aligned(size)
        self._tensors: dict[int, Any] = {}
        for storage, value in program.initial.items():
            self.flat(storage)[:] = value

    def flat(self, storage: int) -> np.ndarray:
        """The elements of a storage."""
        s = self.program.storages[storage]
        return self.regions[s.region][s.offset : s.offset + s.bytes].view(s.dtype)

    def array(self, tensor: Tensor) -> np.ndarray:
        """A tensor of the file, as a view."""
        return self.flat(tensor.storage).reshape(tensor.shape)

    def tensor(self, storage: int) -> Any:
        """A storage as kernels take it; no copy."""
        if storage not in self._tensors:
            self._tensors[storage] = tvm.runtime.from_dlpack(self.flat(storage))
        return self._tensors[storage]

    @property
    def bytes(self) -> int:
        return sum(block.nbytes for block in self.regions.values())


def aligned(size: int) -> np.ndarray:
    """Zeroed bytes that start at a multiple of `ALIGNMENT`. Pages that nobody touches cost nothing."""
    block = np.zeros(size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size]
