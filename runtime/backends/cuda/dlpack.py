"""DLPack and `__cuda_array_interface__`, both ways, without a copy.

An array of another library becomes a `View`: where its elements lie and how. One of ours becomes a capsule.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np

CPU, CUDA, CUDA_MANAGED = 1, 2, 13  # DLDeviceType
DEVICE_KINDS = (CUDA, CUDA_MANAGED)
LEGACY_STREAM = 1  # how DLPack and the array interface write the default stream, which the driver writes 0

INT, UINT, FLOAT, BFLOAT, BOOL = 0, 1, 2, 4, 6  # DLDataTypeCode
CODES = {"i": INT, "u": UINT, "f": FLOAT, "b": BOOL}


class DLDevice(ctypes.Structure):
    """DLPack's struct of a device: its type and its number."""

    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    """DLPack's struct of an element type: its kind, bits, and lanes of a vector."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    """DLPack's struct of a tensor; strides count elements, and are NULL for the order of C."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """DLPack's struct of a tensor with what to call when its consumer is done."""


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER))

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_raw_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

NAME, USED = b"dltensor", b"used_dltensor"


@dataclasses.dataclass(frozen=True)
class View:
    """Elements on a device. `strides` are in elements; `owner` keeps them alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int
    owner: Any

    @property
    def is_contiguous(self) -> bool:
        """In the order of C; strides along an axis of one element, and of nothing, do not count."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True

    @property
    def span(self) -> int:
        """Elements from the first to the last one in memory. Strides are not negative."""
        return 0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


def is_on_device(array: Any) -> bool:
    """Whether an array says that it lies on a GPU."""
    if isinstance(array, np.ndarray | list | tuple | int | float):
        return False
    device = getattr(array, "__dlpack_device__", None)
    if device is not None:
        return int(device()[0]) in DEVICE_KINDS
    return getattr(array, "__cuda_array_interface__", None) is not None


def view_of(array: Any, stream: int, order: Callable[[int, int], None]) -> View:
    """View an array on a GPU.

    What produces it is ordered before whatever `stream` is given from now on: by the producer, or, where all that it
    offers is the array interface, by `order(its stream, ours)`.
    """
    if hasattr(array, "__dlpack__"):
        return from_capsule(array.__dlpack__(stream=stream or LEGACY_STREAM))
    return _from_interface(array, stream, order)


def from_capsule(capsule: Any) -> View:
    """Take over a capsule; its deleter is called when the view is gone."""
    if not _is_valid(capsule, NAME):
        raise BufferError("no DLPack capsule that nobody has used yet")
    managed = DLManagedTensor.from_address(_pointer(capsule, NAME))
    taken = _Taken(managed, capsule)  # from here on it is ours to give back, whatever is wrong with it
    ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), ctypes.c_char_p(USED))
    tensor = managed.tensor
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else dense_strides(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    return View(address, shape, strides, dtype_of(tensor.dtype), tensor.device.id, taken)


class _Taken:
    """A tensor taken out of its capsule, given back at the end."""

    def __init__(self, managed: DLManagedTensor, capsule: Any) -> None:
        self._managed, self._capsule = managed, capsule

    def __del__(self) -> None:
        if self._managed.deleter:
            self._managed.deleter(ctypes.byref(self._managed))


def _from_interface(array: Any, stream: int, order: Callable[[int, int], None]) -> View:
    found = array.__cuda_array_interface__
    dtype, shape = np.dtype(found["typestr"]), tuple(found["shape"])
    if found.get("mask") is not None:
        raise BufferError("an array with a mask")
    if (before := found.get("stream")) is not None:
        order(0 if before == LEGACY_STREAM else int(before), stream)
    strides = found.get("strides")
    elements = dense_strides(shape) if strides is None else tuple(s // dtype.itemsize for s in strides)
    return View(int(found["data"][0] or 0), shape, elements, dtype, -1, array)


def to_capsule(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: Any) -> Any:
    """Make a DLPack capsule over device memory in the order of C. `owner` lives as long as anyone has the tensor."""
    held = _Held(address, shape, dtype, device, owner)
    _held[held.address] = held
    return _new(held.address, NAME, ctypes.cast(_drop_capsule, ctypes.c_void_p))


class _Held:
    """What a capsule of ours points to."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: Any) -> None:
        sizes = ctypes.c_int64 * max(len(shape), 1)
        self._shape, self._strides, self._owner = sizes(*shape), sizes(*dense_strides(shape)), owner
        self.managed = DLManagedTensor()
        self.managed.tensor = DLTensor(
            address,
            DLDevice(CUDA, device),
            len(shape),
            DLDataType(BFLOAT if dtype.name == "bfloat16" else CODES[dtype.kind], 8 * dtype.itemsize, 1),
            ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)),
            ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64)),
            0,
        )
        self.managed.deleter = _delete
        self.address = ctypes.addressof(self.managed)


_held: dict[int, _Held] = {}


def _forget(managed: Any) -> None:
    """Let a tensor of ours go: its consumer is done with it."""
    _held.pop(ctypes.addressof(managed.contents), None)


def _forget_capsule(capsule: int) -> None:
    """Nobody took the tensor out of the capsule. It is passed as an address: the capsule is about to die."""
    if _raw_is_valid(capsule, NAME):
        _held.pop(_raw_pointer(capsule, NAME), None)


_delete = DELETER(_forget)
_drop_capsule = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_forget_capsule)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the order of C, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def dtype_of(found: DLDataType) -> np.dtype[Any]:
    """Give numpy's type."""
    if found.lanes == 1 and found.code == BFLOAT and found.bits == 16:
        return np.dtype("bfloat16")
    kinds = {code: kind for kind, code in CODES.items()}
    if found.lanes == 1 and found.code in kinds and found.bits % 8 == 0:
        return np.dtype(f"{kinds[found.code]}{found.bits // 8}")
    raise BufferError(f"elements of the DLPack type {found.code}, {found.bits} bits, {found.lanes} lanes")
