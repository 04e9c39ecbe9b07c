"""A result on the device, as other libraries take it: DLPack and `__cuda_array_interface__`.

torch.from_dlpack(step.device_output("logits"));  cupy.asarray(loss);  float(loss)
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

from bnfuse.runtime.backends.cuda import dlpack
from bnfuse.runtime.backends.cuda.driver import Stream
from bnfuse.runtime.backends.cuda.memory import Results
from bnfuse.runtime.backends.cuda.queue import Queue


class DeviceArray:
    """Elements in device memory in the order of C. What the step has begun is ordered before whoever reads them."""

    def __init__(
        self,
        queue: Queue,
        address: int,
        shape: tuple[int, ...],
        dtype: str,
        owner: Any,
        readers: set[Stream] | None = None,
    ) -> None:
        self.shape, self.dtype, self.address = shape, np.dtype(dtype), address
        self._queue, self._owner = queue, owner
        self._readers = queue.readers if readers is None else readers

    @classmethod
    def copy_of(cls, results: Results, source: int, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Of its own memory: elements as they are when the stream gets there. Wants the driver to be active."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        address, readers, queue = results.take(size), set[int](), results.queue
        queue.driver.copy(address, source, size, queue.stream)
        owner = _Owner()
        weakref.finalize(owner, results.give_back, address, size, readers)
        return cls(queue, address, shape, dtype, owner, readers)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def reshape(self, *shape: Any) -> DeviceArray:
        """Give the same elements in another shape; none of the sizes is left to be found out."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if math.prod(sizes) != math.prod(self.shape):
            raise ValueError(f"{list(self.shape)} has not the elements of {list(sizes)}")
        return DeviceArray(self._queue, self.address, sizes, self.dtype.name, self._owner, self._readers)

    def numpy(self) -> np.ndarray:
        """Copy to the host. Waits for what the step has begun."""
        found = np.empty(self.shape, self.dtype)
        driver = self._queue.driver
        with driver.active():
            driver.copy_out(found.ctypes.data, self.address, found.nbytes, self._queue.stream)
            driver.synchronize(self._queue.stream)
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array on a GPU becomes numpy's by a copy")
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __float__(self) -> float:
        return float(self.numpy().reshape(()))

    def item(self) -> float:
        """Copy the one element to the host."""
        return float(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self._queue.driver.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Make a capsule.

        `stream`, the consumer's, waits for the step; -1 says that the consumer sees to that, None is the default
        stream.
        """
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("an array on a GPU is given where it is, without a copy")
        if stream != -1:
            consumer = 0 if stream in (None, dlpack.LEGACY_STREAM) else int(stream or 0)
            with self._queue.driver.active():
                self._queue.driver.order(self._queue.stream, consumer)
            self._readers.add(consumer)
        return dlpack.to_capsule(self.address, self.shape, self.dtype, self._queue.driver.ordinal, self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.kind not in "iufb":
            raise AttributeError(f"the array interface has no {self.dtype}")
        self._readers.add(0)  # it does not say which: the default stream waits for all that are not non-blocking
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": self._queue.stream or dlpack.LEGACY_STREAM,
        }

    def __repr__(self) -> str:
        return f"DeviceArray({list(self.shape)}, {self.dtype})"


class _Owner:
    """Lives as long as an array of some memory does."""
