"""DLPack and the array interface, in and out. Arrays of the host stand in for those of a device."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref

import numpy as np
import pytest

from bnfuse.runtime.backends.cuda import dlpack


class Owner:
    pass


class OnDevice:
    """A numpy array that says that it is on a GPU. `taken` has the streams that were passed."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.taken: list[int] = []

    def __dlpack__(self, stream: int):
        self.taken.append(stream)
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, 0


class Interface:
    def __init__(self, array: np.ndarray, stream: int | None, **further: object) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__array_interface__, "stream": stream, "version": 3, **further}


def no_order(before: int, after: int) -> None:
    raise AssertionError


def read(view: dlpack.View) -> np.ndarray:
    """The elements of a view, by its own account of where they are."""
    raw = (ctypes.c_uint8 * (view.span * view.dtype.itemsize)).from_address(view.address)
    flat = np.frombuffer(raw, view.dtype)
    strides = [s * view.dtype.itemsize for s in view.strides]
    return np.lib.stride_tricks.as_strided(flat, view.shape, strides).copy()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64", "int32", "uint8", "bool"])
def test_an_array_of_another_library_is_seen_where_it_lies(dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    given = OnDevice(array)
    view = dlpack.view_of(given, 77, no_order)
    assert given.taken == [77]
    assert view.address == array.ctypes.data and view.is_contiguous and view.span == 24
    np.testing.assert_array_equal(read(view), array)


def test_strides_and_offsets_are_kept():
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    for part in (array[1:, :, 2:4], array.transpose(2, 0, 1), array[:, :1, ::2]):
        view = dlpack.view_of(OnDevice(part), 1, no_order)
        assert not view.is_contiguous
        np.testing.assert_array_equal(read(view), part)
    assert dlpack.view_of(OnDevice(array[1:2]), 1, no_order).is_contiguous
    assert dlpack.view_of(OnDevice(array[:, 1:2, :1]), 1, no_order).shape == (3, 1, 1)


def test_the_default_stream_has_the_number_that_dlpack_gives_it():
    given = OnDevice(np.zeros(3, np.float32))
    dlpack.view_of(given, 0, no_order)
    assert given.taken == [dlpack.LEGACY_STREAM]


def test_the_producer_gets_its_memory_back():
    array = np.zeros(5, np.float32)
    owner = weakref.ref(array)
    view = dlpack.view_of(OnDevice(array), 1, no_order)
    del array
    gc.collect()
    assert owner() is not None
    del view
    gc.collect()
    assert owner() is None


def test_a_capsule_is_taken_once():
    capsule = np.zeros(3).__dlpack__()
    dlpack.from_capsule(capsule)
    with pytest.raises(BufferError, match="nobody has used"):
        dlpack.from_capsule(capsule)
    with pytest.raises(BufferError):
        dlpack.from_capsule(None)


def test_an_array_interface_is_ordered_by_its_stream():
    array, orders = np.arange(6, dtype=np.int64).reshape(2, 3), []
    view = dlpack.view_of(Interface(array, 5), 9, lambda *streams: orders.append(streams))
    np.testing.assert_array_equal(read(view), array)
    dlpack.view_of(Interface(array, 1), 9, lambda *streams: orders.append(streams))
    dlpack.view_of(Interface(array, None), 9, no_order)
    assert orders == [(5, 9), (0, 9)]
    turned = dlpack.view_of(Interface(array.T, None), 9, no_order)
    np.testing.assert_array_equal(read(turned), array.T)
    with pytest.raises(BufferError, match="mask"):
        dlpack.view_of(Interface(array, None, mask=array), 9, no_order)


def test_where_an_array_lies():
    array = np.zeros(3, np.float32)
    assert dlpack.is_on_device(OnDevice(array)) and dlpack.is_on_device(Interface(array, None))
    assert not any(map(dlpack.is_on_device, (array, [1.0], 3, memoryview(array))))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_our_own_capsules_come_back_as_they_were(dtype, shape):
    array = np.ones(shape, dtype)
    view = dlpack.from_capsule(dlpack.to_capsule(array.ctypes.data, shape, array.dtype, 1, array))
    assert (view.address, view.shape, view.dtype, view.device) == (array.ctypes.data, shape, array.dtype, 1)
    assert view.is_contiguous


@pytest.mark.parametrize("is_taken", [True, False])
def test_the_owner_of_a_capsule_lives_as_long_as_anyone_needs_it(is_taken):
    array, owner = np.zeros(4, np.float32), Owner()
    alive = weakref.ref(owner)
    capsule = dlpack.to_capsule(array.ctypes.data, (4,), array.dtype, 0, owner)
    view = dlpack.from_capsule(capsule) if is_taken else None
    del owner
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert (alive() is not None) == is_taken
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.torch
def test_torch_reads_our_capsules():
    import torch

    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    capsule = dlpack.to_capsule(array.ctypes.data, (2, 3), array.dtype, 0, array)
    managed = dlpack.DLManagedTensor.from_address(dlpack._pointer(capsule, dlpack.NAME))
    managed.tensor.device.type = dlpack.CPU  # no GPU here to look at it
    tensor = torch.utils.dlpack.from_dlpack(capsule)
    assert tensor.data_ptr() == array.ctypes.data and tensor.tolist() == array.tolist()
    half = torch.arange(4, dtype=torch.bfloat16)
    view = dlpack.from_capsule(torch.utils.dlpack.to_dlpack(half))
    assert view.dtype == np.dtype("bfloat16") and view.address == half.data_ptr()


def test_a_tensor_of_an_unknown_type_is_given_back():
    array = np.zeros(3, np.float32)
    capsule = array.__dlpack__()
    managed = dlpack.DLManagedTensor.from_address(dlpack._pointer(capsule, dlpack.NAME))
    managed.tensor.dtype.lanes = 2
    before = sys.getrefcount(array)
    with pytest.raises(BufferError, match="2 lanes"):
        dlpack.from_capsule(capsule)
    gc.collect()
    assert sys.getrefcount(array) == before - 1
