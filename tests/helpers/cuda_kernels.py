"""Kernels for a GPU, without one: run by the lockstep interpreter, and compiled for what they need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import lockstep
import numpy as np

from bnfuse.runtime.kernels.cuda import compile as compiling
from bnfuse.runtime.kernels.cuda.device import RAW
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CudaTarget

ARCHITECTURES = ("sm_80", "sm_90")


def gpu(precision: str = "fp32", arch: str = "sm_90", multiprocessors: int = 4) -> CudaTarget:
    """A small GPU: few multiprocessors make the interpreted grids small."""
    return CudaTarget(arch, multiprocessors, precision)


def run_kernel(
    kernel: Kernel,
    arrays: Mapping[str, np.ndarray],
    offsets: Mapping[str, int] | None = None,
    scalars: Mapping[str, float | int] | None = None,
) -> dict[str, np.ndarray]:
    """Run all stages on arrays by parameter name; 16-bit floats are raw uint16. Outputs that are not among them are
    made here, filled with NaN (or -1).

    Returns all parameters' arrays by name, flat. They are copies; one array given under two names stays one.
    """
    copies: dict[int, np.ndarray] = {}
    given = {}
    for param in kernel.params:
        if param.name in arrays:
            source = arrays[param.name]
            if id(source) not in copies:
                copies[id(source)] = _flat(source, param)
            given[param.name] = copies[id(source)]
        else:
            assert param.access == "out", f"{param.name} is missing"
            given[param.name] = _flat(np.frombuffer(b"\xff" * param.elements * _dtype(param).itemsize, np.uint8), param)
        assert given[param.name].size == param.elements, f"{param.name}: {given[param.name].size}, not {param.elements}"
    values: dict[str, Any] = {**given, **(scalars or {})}
    values |= {f"{p.name}_offset": (offsets or {}).get(p.name, 0) for p in kernel.params if p.is_map}
    for stage in kernel.build():
        lockstep.run(stage.function, {param.name: values[param.name] for param in stage.function.params})
    return given


def _dtype(param: Param) -> np.dtype[Any]:
    return np.dtype(RAW.get(param.dtype, param.dtype))


def _flat(values: np.ndarray, param: Param) -> np.ndarray:
    """A copy, aligned as the runtime aligns its buffers."""
    dtype = _dtype(param)
    values = np.ascontiguousarray(values).reshape(-1)
    raw = values.view(dtype) if values.dtype == np.uint8 else values.astype(dtype)
    whole = np.empty(raw.nbytes + 256, np.uint8)
    start = -whole.ctypes.data % 256
    array: np.ndarray = whole[start : start + raw.nbytes].view(dtype)
    array[...] = raw
    return array


def resources(kernel: Kernel) -> dict[str, dict[str, int]]:
    """Registers, spills and stack of each stage's function, as compiled."""
    header = json.loads(compiling.compile_kernel(kernel).split(b"\n", 1)[0])
    return {stage["symbol"]: header["resources"][stage["symbol"]] for stage in header["stages"]}


def assert_no_spills(kernel: Kernel) -> None:
    for symbol, found in resources(kernel).items():
        assert (found["spills"], found["stack"]) == (0, 0), f"{symbol}: {found}"
