"""Call one kernel on numpy arrays: for tests and measurements. A session has its own way (cache, arena)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm

from bnfuse.runtime.backends.backend import backend_of
from bnfuse.runtime.backends.cpu import permission
from bnfuse.runtime.backends.cpu.library import Library
from bnfuse.runtime.backends.launching import start_threads
from bnfuse.runtime.backends.memory import BFLOAT16, as_bits
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Problem
from bnfuse.runtime.targets.target import CpuTarget

ALIGNMENT = 64


def aligned(shape: Any, dtype: str = "float32", fill: float | None = None) -> np.ndarray:
    """Make an uninitialised (or filled) dense array that TVM takes without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    array: np.ndarray = raw[start : start + size].view(dtype).reshape(shape)
    if fill is not None:
        array[...] = fill
    return array


def aligned_copy(values: np.ndarray) -> np.ndarray:
    """Copy an array into one that TVM takes without a copy."""
    array = aligned(values.shape, str(values.dtype))
    array[...] = values
    return array


def compile_kernel(kernel: Kernel) -> Callable[..., Any]:
    """Compile one kernel to a function that runs at once, with as many threads as its target has."""
    assert isinstance(kernel.target, CpuTarget)
    permission.require(kernel.target)
    start_threads(kernel.target.threads)
    library = Library([kernel.name], [backend_of(kernel.target).compile(kernel)])

    def run(*arguments: Any) -> None:
        library.functions[0](*arguments)

    return run


def call(
    kernel: Kernel,
    arrays: Mapping[str, np.ndarray],
    offsets: Mapping[str, int] | None = None,
    scalars: tuple[float | int, ...] = (),
    function: Callable[..., Any] | None = None,
) -> dict[str, np.ndarray]:
    """Run on arrays by parameter name; outputs that are not among them are made here, filled with NaN (or 1).

    Returns all parameters' arrays by name, flat; maps of bfloat16 as float32. They are copies: the caller's arrays stay
    as they are.
    """
    given = {}
    for param in kernel.params:
        if param.name in arrays:
            array = aligned_copy(np.ascontiguousarray(arrays[param.name], dtype=param.dtype).reshape(-1))
        else:
            assert param.access == "out", f"{param.name} is missing"
            array = aligned(param.elements, param.dtype, np.nan if "float" in param.dtype else 1)
        assert array.size == param.elements, f"{param.name} has {array.size} elements, not {param.elements}"
        given[param.name] = array
    tensors = [tvm.runtime.from_dlpack(as_bits(given[p.name])) for p in kernel.params]
    places = [(offsets or {}).get(p.name, 0) for p in kernel.params if p.is_map]
    (function or compile_kernel(kernel))(*tensors, *places, *scalars)
    return {name: array.astype(np.float32) if array.dtype == BFLOAT16 else array for name, array in given.items()}


Slot = tuple[int, int]  # stride and offset of a map in a wider buffer


def operator(
    generator: Callable[[Problem, CpuTarget], Kernel],
    target: CpuTarget,
    op: str,
    operands: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    attributes: Mapping[str, Any] | None = None,
    slots: Mapping[str, Slot] | None = None,
) -> dict[str, np.ndarray]:
    """Run the kernel of an `ai.bnfuse` operator on NCHW arrays, as the lowering would, and return its results in NCHW.

    `shapes` are those of the results. Maps named in `slots` lie in a wider buffer, whose other channels must survive.
    A Slice becomes the slot of dy, an Accumulate that of dx.
    """
    attributes, slots = dict(attributes or {}), dict(slots or {})
    operands = dict(operands)
    shapes = dict(shapes)
    if "acc" in operands:
        acc = operands.pop("acc")
        slots["dx"] = (acc.shape[1], attributes.pop("acc_start"))
        attributes.pop("acc_stop")
        buffers = {"dx": _nhwc(acc)}
    else:
        buffers = {}
    if "grad_start" in attributes:
        start, stop = attributes.pop("grad_start"), attributes.pop("grad_stop")
        slots["dy"] = (operands["dy"].shape[1], start)
        buffers["dy"] = _nhwc(operands["dy"])
        operands["dy"] = operands["dy"][:, start:stop]
    map_types, offsets = {}, {}
    for name, shape in {**{k: v.shape for k, v in operands.items()}, **shapes}.items():
        if len(shape) == 4 and name not in ("weight", "dweight"):
            n, c, h, w = shape
            stride, offsets[name] = slots.get(name, (c, 0))
            map_types[name] = MapType(n, h, w, c, stride, target.map_dtype if h * w > 1 else "float32")
            if name not in buffers and (name in operands or stride != c):
                buffers[name] = np.full((n, h, w, stride), 7.0, np.float32)
                if name in operands:
                    buffers[name][..., offsets[name] : offsets[name] + c] = _nhwc(operands[name])
        elif name in operands:
            buffers[name] = operands[name]
    weight = tuple(operands["weight"].shape) if "weight" in operands else ()
    problem = Problem(op, tuple(map_types.items()), tuple((k, _frozen(v)) for k, v in attributes.items()), weight)
    kernel = generator(problem, target)
    after = call(kernel, {p.name: buffers[p.name] for p in kernel.params if p.name in buffers}, offsets)
    for name, kind in map_types.items():
        if name in after and name in buffers:
            _check_outside(name, kind, offsets[name], buffers[name].astype(kind.dtype), after[name])
    return {
        name: _result(after[name], shape, map_types.get(name), offsets.get(name, 0)) for name, shape in shapes.items()
    }


def _nhwc(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_outside(name: str, kind: MapType, offset: int, before: np.ndarray, after: np.ndarray) -> None:
    same = before.reshape(-1, kind.stride) == after.reshape(-1, kind.stride)
    same[:, offset : offset + kind.c] = True
    assert same.all(), f"{name}: the kernel wrote outside its slot"


def _result(flat: np.ndarray, shape: tuple[int, ...], kind: MapType | None, offset: int) -> np.ndarray:
    if kind is None:
        return flat.reshape(shape)
    slot: np.ndarray = flat.reshape(kind.n, kind.h, kind.w, kind.stride)[..., offset : offset + kind.c]
    result: np.ndarray = slot.transpose(0, 3, 1, 2)
    return result
