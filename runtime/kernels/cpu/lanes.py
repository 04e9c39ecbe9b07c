"""Types and constants of as many lanes as a value has."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

Expr = Any


def lanes_of(value: Expr) -> int:
    """Count the lanes of a value."""
    return int(tvm.DataType(value.ty.dtype).lanes)


def like(dtype: str, value: Expr) -> str:
    """Name the type of as many `dtype` as a value has lanes."""
    lanes = lanes_of(value)
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def constant(number: int, dtype: str, value: Expr) -> Expr:
    """Write an integer in as many lanes as a value has."""
    lanes = lanes_of(value)
    return tirx.const(number, dtype) if lanes == 1 else T.broadcast(tirx.const(number, dtype), lanes)
