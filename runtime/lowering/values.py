"""What lowering knows of the values of a graph: static type, constant value, and where it lies in memory.

A value may lie in memory in up to two forms: as a feature map (NHWC, perhaps a channel slot) and dense, in the
layout of the file. Operators ask for the form that they read; the other form is made when it is first asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.node_shapes import Type, result_types
from bnfuse.runtime.lowering.layout import MapRef

FOLDED_ELEMENTS = 1 << 16  # constants that take part in shape arithmetic are small
FOLDED_RESULT = 1 << 22  # elements: what is larger is not kept as a constant where a kernel can make it


@dataclasses.dataclass
class Form:
    """Where a value lies. `dense` is a storage in the file's layout; `constant` is known when lowering."""

    shape: tuple[int, ...]
    dtype: str
    map: MapRef | None = None
    dense: int | None = None
    constant: np.ndarray | None = None


def dtype_name(value: ir.Value) -> str | None:
    """Name the element type of a value as numpy does; None where the graph does not say it."""
    return None if value.dtype is None else np.dtype(value.dtype.numpy()).name


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Attributes by name, lists as tuples."""
    found = {}
    for name, attribute in node.attributes.items():
        value = attribute.value
        found[name] = tuple(value) if isinstance(value, (list, tuple)) else value
    return found


def infer_outputs(node: ir.Node, forms: Sequence[Form | None], opset: int) -> list[Type]:
    """Shapes and dtypes of the outputs of a node, by the schema of its operator. Constants help (Reshape, Expand)."""
    types = [None if form is None else (form.shape, form.dtype) for form in forms]
    return result_types(node, types, [None if form is None else form.constant for form in forms], opset)


def check_elements(name: str, shape: Sequence[int]) -> int:
    """Element count. Kernels index a buffer by int32."""
    count = math.prod(shape)
    if count >= 2**31:
        raise BnfuseError(f"tensor '{name}' of shape {list(shape)} has more than 2**31 elements: use a smaller batch")
    return count
