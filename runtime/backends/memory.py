"""The memory of a step: a block a region, and tensors of the file read from them and written to them.

`Store` is what the memories of all targets have in common; `Memory` is that of the CPU, whose tensors are also views.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping

import ml_dtypes
import numpy as np

from bnfuse.runtime.program.program import ALIGNMENT, Program, Storage, Tensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Store(abc.ABC):
    """The regions of a program, wherever they are."""

    program: Program

    @abc.abstractmethod
    def load(self, storage: Storage) -> np.ndarray:
        """Copy the elements of a storage, flat."""

    @abc.abstractmethod
    def store(self, storage: Storage, values: np.ndarray) -> None:
        """Replace the elements of a storage; the values are cast to its type, in the order of C."""

    def read(self, tensor: Tensor) -> np.ndarray:
        """Copy a tensor of the file."""
        found = self.load(self.program.storages[tensor.storage]).reshape(tensor.shape)
        return found.astype(tensor.dtype, copy=False)

    def write(self, tensor: Tensor, values: np.ndarray) -> None:
        """Replace a tensor of the file."""
        self.store(self.program.storages[tensor.storage], values)


class Memory(Store):
    """Memory of the CPU. Regions in `shared` belong to another memory, and are taken where they are large enough;
    those of `without` are left out."""

    def __init__(
        self, program: Program, shared: Mapping[str, np.ndarray] | None = None, *, without: Collection[str] = ()
    ) -> None:
        self.program = program
        self.regions: dict[str, np.ndarray] = {}
        for name, size in program.regions.items():
            other = (shared or {}).get(name)
            if name not in without:
                self.regions[name] = other if other is not None and other.nbytes >= size else aligned(size)
        for index, value in program.initial.items():
            if program.storages[index].region in self.regions:
                self.flat(index)[:] = value

    def view(self, storage: Storage) -> np.ndarray:
        """View the elements of a storage."""
        return self.regions[storage.region][storage.offset : storage.offset + storage.bytes].view(storage.dtype)

    def flat(self, index: int) -> np.ndarray:
        """View the elements of a storage of the program."""
        return self.view(self.program.storages[index])

    def array(self, tensor: Tensor) -> np.ndarray:
        """View a tensor of the file."""
        return self.flat(tensor.storage).reshape(tensor.shape)

    def load(self, storage: Storage) -> np.ndarray:
        """Copy the elements of a storage, flat."""
        copied: np.ndarray = self.view(storage).copy()
        return copied

    def store(self, storage: Storage, values: np.ndarray) -> None:
        """Write the elements of a storage."""
        np.copyto(self.view(storage).reshape(values.shape), values, casting="same_kind")

    @property
    def bytes(self) -> int:
        """Size of all regions in bytes."""
        return sum(block.nbytes for block in self.regions.values())


def as_bits(array: np.ndarray) -> np.ndarray:
    """View what numpy has no type of its own for (bfloat16) as the integers that kernels of a CPU take it as."""
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array


def aligned(size: int) -> np.ndarray:
    """Zeroed bytes that start at a multiple of `ALIGNMENT`. Pages that nobody touches cost nothing."""
    block = np.zeros(size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size]
