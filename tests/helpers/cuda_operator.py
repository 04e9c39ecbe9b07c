"""Run an operator's GPU kernel in the interpreter on NCHW arrays, as the lowering would."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import cuda_kernels
import ml_dtypes
import numpy as np

from bnfuse.runtime.kernels.common.windows import index_dtype
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Problem
from bnfuse.runtime.lowering.layout import stored_dtype
from bnfuse.runtime.targets.target import CudaTarget

STORED = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
NOT_MAPS = ("weight", "dweight")


def alignment(*numbers: int) -> int:
    """The largest power of two, at most 8, that divides all."""
    return math.gcd(8, *numbers)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """As float64, what a map of this type holds."""
    return np.asarray(values).astype(STORED[dtype]).astype(np.float64)


def raw(values: np.ndarray, dtype: str) -> np.ndarray:
    """A map's array as the interpreter takes it."""
    stored = np.ascontiguousarray(values).astype(STORED[dtype])
    return stored if dtype == "float32" else stored.view(np.uint16)


def values_of(stored: np.ndarray, dtype: str) -> np.ndarray:
    return stored if dtype == "float32" else stored.view(STORED[dtype]).astype(np.float32)


def nhwc(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1))


def operator(
    generator: Callable[[Problem, CudaTarget], Kernel],
    target: CudaTarget,
    op: str,
    operands: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    attributes: Mapping[str, Any] | None = None,
    slots: Mapping[str, tuple[int, int]] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """Results in NCHW, float32 (indices as they are).

    `shapes` are those of the results. `slots` gives some maps the (stride, offset) of a wider buffer, whose other
    channels must survive. `dtypes` are those of maps that are not of the target's type; indices are integers as given.
    A Slice becomes the slot of dy, an Accumulate that of dx.
    """
    attributes, slots = dict(attributes or {}), dict(slots or {})
    operands, dtypes = dict(operands), dict(dtypes or {})
    buffers: dict[str, np.ndarray] = {}
    if "acc" in operands:
        buffers["dx"] = nhwc(operands.pop("acc"))
        slots["dx"] = (buffers["dx"].shape[3], attributes.pop("acc_start"))
        attributes.pop("acc_stop")
    if "grad_start" in attributes:
        start, stop = attributes.pop("grad_start"), attributes.pop("grad_stop")
        buffers["dy"] = nhwc(operands["dy"])
        slots["dy"] = (buffers["dy"].shape[3], start)
        operands["dy"] = operands["dy"][:, start:stop]
    kinds, offsets = {}, {}
    for name, shape in {**{k: v.shape for k, v in operands.items()}, **shapes}.items():
        if len(shape) != 4 or name in NOT_MAPS:
            if name in operands:
                buffers[name] = operands[name]
            continue
        n, c, h, w = shape
        stride, offsets[name] = slots.get(name, (c, 0))
        dtype = (
            index_dtype(attributes["kernel_shape"])
            if name == "indices"
            else dtypes.get(name, stored_dtype(shape, "float32", target))
        )
        kinds[name] = MapType(n, h, w, c, stride, dtype, alignment(c, stride, offsets[name]))
        if name not in buffers and (name in operands or stride != c):
            fill = np.full((n, h, w, stride), 7, np.float32 if name != "indices" else np.int32)
            if name in operands:
                fill[..., offsets[name] : offsets[name] + c] = nhwc(operands[name])
            buffers[name] = fill
    weight = tuple(operands["weight"].shape) if "weight" in operands else ()
    frozen = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in attributes.items())
    kernel = generator(Problem(op, tuple(kinds.items()), frozen, weight), target)
    stored = {name: kinds[name].dtype for name in kinds if kinds[name].dtype in STORED}
    given = {name: raw(buffers[name], stored[name]) if name in stored else buffers[name] for name in buffers}
    after = cuda_kernels.run_kernel(kernel, {p.name: given[p.name] for p in kernel.params if p.name in given}, offsets)
    for name, kind in kinds.items():
        if name in after and name in given:
            same = after[name].reshape(-1, kind.stride) == given[name].reshape(-1, kind.stride)
            same[:, offsets[name] : offsets[name] + kind.c] = True
            assert same.all(), f"{name}: the kernel wrote outside its slot"
    return {name: _result(after[name], shape, kinds.get(name), offsets.get(name, 0)) for name, shape in shapes.items()}


def _result(flat: np.ndarray, shape: tuple[int, ...], kind: MapType | None, offset: int) -> np.ndarray:
    if kind is None:
        return flat.reshape(shape)
    values = values_of(flat, kind.dtype) if kind.dtype in STORED else flat
    return values.reshape(kind.n, kind.h, kind.w, kind.stride)[..., offset : offset + kind.c].transpose(0, 3, 1, 2)
