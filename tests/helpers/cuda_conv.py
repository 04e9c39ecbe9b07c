"""A convolution's kernel for a GPU, run by the interpreter on maps in slots of wider buffers, beside its reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cuda_kernels
import ml_dtypes
import numpy as np
import rounded_reference
from conv_case import ConvCase
from packed_weights import packed_raw

from bnfuse.opset import reference
from bnfuse.opset.spec import (
    MAPS_LIKE_DY,
    MAPS_LIKE_X,
    is_numbered_map,
    may_be_of_samples,
    parse,
)
from bnfuse.runtime.kernels.common.sides import TOWARDS_OUTPUT
from bnfuse.runtime.kernels.cuda.merging import merged_groups
from bnfuse.runtime.kernels.cuda.weights import BACKWARD, FORWARD, is_packed
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Problem, is_gate
from bnfuse.runtime.targets.target import CudaTarget

NUMPY = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
STORED = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # by precision
# of norms, over what rounding the map costs: few elements of what the tensor cores read round to the other side
TOLERANCES = {"fp32": 3e-6, "tf32": 2e-6, "bf16": 5e-5, "fp16": 5e-5}
OUTPUT_SIDE = ("y", *MAPS_LIKE_DY)
MAPS = (*MAPS_LIKE_X, "stored", "dx", "acc", *OUTPUT_SIDE)


@dataclasses.dataclass(frozen=True)
class CudaCase(ConvCase):
    """`slots` channels lie before and after those of each map, four more behind those of `wider`; maps are stored as
    `dtype`, but those of `others`."""

    dtype: str = "float32"
    wider: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()  # maps of another type, by name
    by_sample: bool = False  # coefficients that may be of each sample are

    @property
    def ranges(self) -> dict[str, int]:
        return {"acc_start": 0, "acc_stop": self.cin, "grad_start": 0, "grad_stop": self.cout}

    def is_map(self, name: str) -> bool:
        return name in MAPS or is_numbered_map(name) or is_gate(name) or self.is_of_samples(name)

    def is_of_samples(self, name: str) -> bool:
        return self.by_sample and may_be_of_samples(name)

    def dtype_of(self, name: str) -> str:
        is_pixel = is_gate(name) and self.shape(name)[2:] == (1, 1)
        return dict(self.others).get(name, "float32" if is_pixel or self.is_of_samples(name) else self.dtype)

    def kind(self, name: str) -> MapType:
        """The type of a map."""
        n, c, h, w = self.shape(name)
        stride = c + 2 * self.slots
        align = next(a for a in (8, 4, 2, 1) if not (c % a or stride % a or self.slots % a))
        if name in self.wider:
            stride, align = stride + 4, 1
        return MapType(n, h, w, c, stride, self.dtype_of(name), align)

    def shape(self, name: str) -> tuple[int, ...]:
        out = reference.window_counts((self.h, self.w), self.geometry)
        if name == "grad_other" and "GateGradAddGrad" in self.op:  # what a pooling passes back
            return (self.n, self.cout, 1, 1)
        if name in OUTPUT_SIDE:
            return (self.n, self.cout, *out)
        if is_gate(name) or self.is_of_samples(name):
            return (self.n, self.cout if name.startswith("grad_") else self.cin, 1, 1)
        if self.is_map(name):
            return (self.n, self.cin, self.h, self.w)
        if name in ("weight", "dweight"):
            return (self.cout, self.cin // self.group, *self.kernel)
        output_side = name in ("bias", "dbias", "grad_a", "grad_b", "grad_p", "grad_q", "grad_w")
        forward_result = name in ("mean", "variance") and not parse(self.op).is_gradient
        return (self.cout if output_side or forward_result else self.cin,)

    @property
    def geometry(self) -> dict[str, Any]:
        return {
            "dilations": self.dilations,
            "kernel_shape": self.kernel,
            "pads": self.pads,
            "strides": self.strides,
        }

    def problem(self) -> Problem:
        spec = parse(self.op)
        names = [name for name in (*spec.operands, *spec.results) if self.is_map(name) and name != "acc"]
        maps = tuple((name, self.kind(name)) for name in names)
        return Problem(self.op, maps, tuple(self.attributes.items()), self.shape("weight"))

    def operands(self, seed: int = 0) -> dict[str, np.ndarray]:
        """As the maps can hold them, in float64; NCHW."""
        rng, values = np.random.default_rng(seed), {}
        for name in parse(self.op).operands:
            value = rng.standard_normal(self.shape(name)).astype(np.float32)
            if name.startswith("inv_std"):
                value = np.abs(value) + np.float32(0.5)
            values[name] = (value.astype(NUMPY[self.dtype_of(name)]) if self.is_map(name) else value).astype(np.float64)
        return values


def run_case(
    case: CudaCase, generator: Any, target: CudaTarget, operands: dict[str, np.ndarray] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Kernel]:
    """What the kernel finds (NCHW, float64), what the reference says, and the kernel.

    On tensor cores the reference rounds what they read as they do.
    """
    operands = operands or case.operands()
    weight = operands["weight"]
    on_tensor_cores = is_packed(weight.shape, parse(case.op).core, case.group)
    precision = target.precision if on_tensor_cores else "fp32"
    in_file = {name: v[..., 0, 0] if case.is_of_samples(name) else v for name, v in operands.items()}
    expected = rounded_reference.run(parse(case.op), in_file, case.attributes, precision)
    kernel = generator(case.problem(), target)
    arrays, offsets = {}, {}
    for param in kernel.params:
        if param.is_map:
            source = operands.get("acc" if param.name == "dx" and "acc" in operands else param.name)
            arrays[param.name] = in_slot(case, param.name, source)
            offsets[param.name] = case.slots
        elif param.name == "weight" and on_tensor_cores:
            form = FORWARD if parse(case.op).core in TOWARDS_OUTPUT else BACKWARD
            merged = merged_groups(weight.shape, case.group, target)
            arrays["weight"] = packed_raw(weight.astype(np.float32), case.group, form, precision, merged)
        elif param.name in operands:
            arrays[param.name] = operands[param.name].astype(np.float32)
    found = cuda_kernels.run_kernel(kernel, arrays, offsets)
    results = {}
    for name in parse(case.op).results:
        results[name] = (
            from_slot(case, name, found[name]) if case.is_map(name) else found[name].reshape(case.shape(name))
        ).astype(np.float64)
    if "variance" in expected:  # of y as it is stored
        y = results["y"]
        expected |= {"mean": y.mean(axis=(0, 2, 3)), "variance": y.var(axis=(0, 2, 3))}
    return results, expected, kernel


def in_slot(case: CudaCase, name: str, value: np.ndarray | None) -> np.ndarray:
    """A buffer with a map in its slot, raw; the rest, and a map that is yet to be written, is not a number."""
    kind = case.kind(name)
    buffer = np.full((kind.n, kind.h, kind.w, kind.stride), np.nan, NUMPY[case.dtype_of(name)])
    if value is not None:
        buffer[..., case.slots : case.slots + kind.c] = value.transpose(0, 2, 3, 1).astype(NUMPY[case.dtype_of(name)])
    return buffer if case.dtype_of(name) == "float32" else buffer.view(np.uint16)


def from_slot(case: CudaCase, name: str, buffer: np.ndarray) -> np.ndarray:
    """A map as NCHW; what lies around its slot must not have been touched."""
    kind = case.kind(name)
    values = buffer.view(NUMPY[case.dtype_of(name)]).reshape(kind.n, kind.h, kind.w, kind.stride)
    outside = [values[..., : case.slots], values[..., case.slots + kind.c :]]
    assert all(np.isnan(part.astype(np.float32)).all() for part in outside), f"{name}: written beside its slot"
    return values[..., case.slots : case.slots + kind.c].transpose(0, 3, 1, 2)


def assert_close(found: dict, expected: dict, dtype: str | Callable[[str], str], tolerance: float = 2e-6) -> None:
    """Norms of errors; maps of 16 bits are rounded once. `dtype` is that of the maps, or of each by name."""
    rounding = {"float32": 0.0, "bfloat16": 2.0**-9, "float16": 2.0**-12}
    for name, value in expected.items():
        is_map = value.ndim == 4 and name in MAPS
        once = rounding[dtype if isinstance(dtype, str) else dtype(name)] if is_map else 0.0
        bound = tolerance + 1.2 * once
        error = np.linalg.norm(found[name] - value) / (np.linalg.norm(value) + 1e-30)
        assert error < bound, f"{name}: {error:.2e}, allowed {bound:.2e}"
