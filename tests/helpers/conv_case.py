"""A convolution to be tested, forward or backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bnfuse.opset.spec import parse
from bnfuse.runtime.kernels.kernel import MapType


@dataclasses.dataclass(frozen=True)
class ConvCase:
    """A convolution in the terms of the ONNX file. `slots` widens the buffers of maps and moves the maps inside."""

    op: str
    n: int
    h: int
    w: int
    cin: int
    cout: int
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)
    group: int = 1
    slots: int = 0
    output_padding: tuple[int, int] = (0, 0)  # of a transposed one

    @property
    def ranges(self) -> dict[str, int]:
        """Values of attributes that name a range of channels."""
        return {}

    @property
    def attributes(self) -> dict[str, Any]:
        found = {
            "dilations": self.dilations,
            "group": self.group,
            "kernel_shape": self.kernel,
            "output_padding": self.output_padding,
            "pads": self.pads,
            "strides": self.strides,
            "min": -0.5,
            "max": 0.75,
            "alpha": 1.702,
            "start_1": 0,
            "start_2": 0,
            **self.ranges,
        }
        return {name: found[name] for name in parse(self.op).attributes}


def gradient_operands(case: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """float32 values, as float64, of shapes `case.shape(name)`. The means are far from zero, and one channel has a = 0
    (a BN's gamma)."""
    values = {}
    for name in parse(case.op).operands:
        values[name] = rng.standard_normal(case.shape(name)).astype(np.float32).astype(np.float64)
    if "a" in values:
        values["a"][0] = 0
    for name in values:
        if name.startswith("inv_std"):
            values[name] = np.abs(values[name]) + 0.5
    return values


def as_buffer(values: np.ndarray, kind: MapType, offset: int) -> np.ndarray:
    """An NCHW map in its slot of an NHWC buffer; what is around it is NaN, so that reading it shows."""
    buffer = np.full((kind.pixels, kind.stride), np.nan, np.float32)
    buffer[:, offset : offset + kind.c] = values.transpose(0, 2, 3, 1).reshape(kind.pixels, kind.c)
    return buffer


def from_buffer(buffer: np.ndarray, kind: MapType, offset: int) -> np.ndarray:
    found = buffer.reshape(kind.n, kind.h, kind.w, kind.stride)[..., offset : offset + kind.c]
    return found.transpose(0, 3, 1, 2)
