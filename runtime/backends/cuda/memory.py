"""The regions of a program on the device, buffers of the host to copy from, and memory for results."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.parallel.mapping import LEAST
from bnfuse.parallel.nccl import GpuWorld
from bnfuse.runtime.backends.cuda.dlpack import View
from bnfuse.runtime.backends.cuda.driver import Driver, Stream
from bnfuse.runtime.backends.cuda.queue import Queue
from bnfuse.runtime.backends.memory import Store
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.program import Program, Storage


class Region:
    """Zeroed memory of the device. It is freed when nobody has it any more."""

    def __init__(self, driver: Driver, size: int, what: str, stream: Stream) -> None:
        self.bytes = size
        self.address = driver.allocate(size, what)
        weakref.finalize(self, release, driver, self.address)
        driver.zero(self.address, max(size, 1), stream)


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A region of another rank's GPU, as it is seen from here."""

    bytes: int
    address: int


def mapped(program: Program, queue: Queue, world: GpuWorld) -> dict[str, Region | Mapped]:
    """Make the regions in which GPUs of other ranks write, and find theirs. All ranks call it for the same program."""
    names = p.mapped_regions(program)
    if not names:
        return {}
    size = max(program.regions[p.MAPPED], LEAST)
    own = Region(queue.driver, size, "what the ranks exchange", queue.stream)
    header = np.array([world.rank, 0], np.uint64)
    queue.driver.copy_in(own.address, header.ctypes.data, header.nbytes, queue.stream)
    queue.driver.synchronize(queue.stream)
    seen = world.share(own.address, own.address + p.STOP * header.itemsize, own)
    return dict(zip(names, [own, *(Mapped(size, address) for address in seen)], strict=True))


class DeviceMemory(Store):
    """Regions in `shared` belong to another memory, and are taken where they are large enough. The constructor wants
    the driver to be active; reading and writing see to it themselves, and wait for what is under way. What ranks share
    (`mapped`) is not there from the start on."""

    def __init__(self, program: Program, queue: Queue, shared: Mapping[str, Region | Mapped] | None = None) -> None:
        self.program, self.queue, self.driver = program, queue, queue.driver
        self.regions: dict[str, Region | Mapped] = {}
        others = p.mapped_regions(program)
        for name, size in program.regions.items():
            if name in others:
                continue
            other = (shared or {}).get(name)
            fits = other is not None and other.bytes >= size
            what = f"the step's {name.replace('_', ' ')}"
            self.regions[name] = other if other and fits else Region(self.driver, size, what, queue.stream)
        for index, value in program.initial.items():
            self.store(program.storages[index], value)

    def address(self, storage: Storage) -> int:
        """Give the address of a storage."""
        return self.regions[storage.region].address + storage.offset

    def load(self, storage: Storage) -> np.ndarray:
        """Copy a storage to the host, flat."""
        found = np.empty(storage.elements, storage.dtype)
        with self.driver.active():
            self.driver.copy_out(found.ctypes.data, self.address(storage), found.nbytes, self.queue.stream)
            self.driver.synchronize(self.queue.stream)
        return found

    def store(self, storage: Storage, values: np.ndarray) -> None:
        """Copy values into a storage, once those who were handed results are done with them."""
        given = np.empty(storage.elements, storage.dtype)
        np.copyto(given.reshape(values.shape), values, casting="same_kind")
        with self.driver.active():
            self.queue.wait_for_readers()
            self.driver.synchronize(self.queue.stream)  # the copy itself would wait for it, and not look at ranks
            self.driver.copy_in(self.address(storage), given.ctypes.data, given.nbytes, self.queue.stream)
            self.driver.synchronize(self.queue.stream)


class Staging:
    """A buffer of the host, for the elements of one input on their way to the device."""

    def __init__(self, driver: Driver, shape: tuple[int, ...], dtype: str) -> None:
        self._driver, kind = driver, np.dtype(dtype)
        self._bytes = math.prod(shape) * kind.itemsize
        self._address = driver.allocate_host(self._bytes)
        self._event = driver.new_event()
        weakref.finalize(self, release_host, driver, self._address)
        raw: Any = (ctypes.c_uint8 * self._bytes).from_address(self._address)
        self._array: np.ndarray = np.frombuffer(raw, kind).reshape(shape)

    def send(self, values: np.ndarray, target: int, stream: Stream) -> None:
        """Copy to the device behind what is on the stream. The values may change at once."""
        self._driver.wait_for(self._event)  # the former ones are on their way no more
        np.copyto(self._array, values, casting="same_kind")
        self._driver.copy_in(target, self._address, self._bytes, stream)
        self._driver.record(self._event, stream)


class Results:
    """Memory for results that outlive the next step. What is given back is used again: allocating takes its time."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._free: dict[int, list[int]] = {}
        weakref.finalize(self, release_all, queue.driver, self._free)

    def take(self, size: int) -> int:
        """Give the address of so many bytes for a result: free ones, or new ones."""
        found = self._free.setdefault(size, [])
        return found.pop() if found else self.queue.driver.allocate(size, "a result")

    def give_back(self, address: int, size: int, readers: set[Stream]) -> None:
        """Whoever read it on a stream of their own has to be done before it is written again."""
        with contextlib.suppress(BnfuseError), self.queue.driver.active():
            for stream in readers:
                self.queue.driver.order(stream, self.queue.stream)
            self._free[size].append(address)


def to_host(driver: Driver, view: View, stream: Stream) -> np.ndarray:
    """Copy an array of the device to the host, whatever its strides are."""
    flat = np.empty(view.span, view.dtype)
    if flat.size:
        driver.copy_out(flat.ctypes.data, view.address, flat.nbytes, stream)
        driver.synchronize(stream)
    strides = [stride * view.dtype.itemsize for stride in view.strides]
    copied: np.ndarray = np.lib.stride_tricks.as_strided(flat, view.shape, strides).copy()
    return copied


def release(driver: Driver, address: int) -> None:
    """Free memory, in whatever thread the last reference goes."""
    with contextlib.suppress(BnfuseError), driver.active():
        driver.free(address)


def release_all(driver: Driver, addresses: dict[int, list[int]]) -> None:
    """Free memory by sizes, in whatever thread the last reference goes."""
    for found in addresses.values():
        for address in found:
            release(driver, address)


def release_host(driver: Driver, address: int) -> None:
    """Free pinned memory, in whatever thread the last reference goes."""
    with contextlib.suppress(BnfuseError), driver.active():
        driver.free_host(address)
