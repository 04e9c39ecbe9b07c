"""What a graph tells of a value: its shape, its type, its size."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """Give the shape where every dimension is known; None where one is symbolic, or there is no shape."""
    if value is None or value.shape is None:
        return None
    sizes = tuple(size for size in value.shape if isinstance(size, int))
    return sizes if len(sizes) == len(value.shape) else None


def declared_shape(value: ir.Value | None) -> list[Any]:
    """List the dimensions as the file has them: numbers, and text where they are symbolic; [] without a shape."""
    if value is None or value.shape is None:
        return []
    return [size if isinstance(size, int) else str(size) for size in value.shape]


def elements(value: ir.Value) -> int:
    """Count the elements; 0 where a dimension is symbolic."""
    sizes = declared_shape(value)
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0


def size_in_bytes(value: ir.Value) -> int:
    """Give the bytes at the stored type (float32 where the file names none); 0 where a dimension is symbolic."""
    return elements(value) * (value.dtype or ir.DataType.FLOAT).bitwidth // 8


def describe(value: ir.Value) -> str:
    """Write type and shape: float[2, 3, N, 8]."""
    return f"{(value.dtype or ir.DataType.FLOAT).name.lower()}[{', '.join(map(str, declared_shape(value)))}]"
