"""Where coefficients lie: vectors [C], ranges of longer vectors, and matrices [groups, C] whose rows are vectors.

So that a kernel can take a row of a matrix as a vector of its own, rows begin on cache lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from bnfuse.runtime.kernels.kernel import MapType
from bnfuse.runtime.lowering.layout import LINE, MapRef, realigned
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.values import Form
from bnfuse.runtime.program import program as p

Values = Mapping[str, ir.Value]


def vectors(low: Lowering, operands: Values) -> dict[str, Ref]:
    """Give the storages of per-channel operands, by name."""
    return {name: low.dense(value) for name, value in operands.items()}


def new_vectors(low: Lowering, results: Values, channels: int) -> dict[str, Ref]:
    """Make a storage of `channels` float32 for each result, by name."""
    return {name: low.new_dense(value, (channels,)) for name, value in results.items()}


def vector_range(low: Lowering, value: ir.Value, start: int) -> MapRef:
    """Give a vector from `start` on, in the form in which kernels take offsets."""
    total = low.shape(value)[0]
    return MapRef(low.dense(value), start, MapType(1, 1, 1, total, total))


def padded(channels: int) -> int:
    """Elements from one row of coefficients to the next."""
    return -(-channels // LINE) * LINE


def rows_type(low: Lowering, groups: int, channels: int) -> MapType:
    """Describe [groups, channels] float32 whose rows begin on cache lines."""
    kind = dataclasses.replace(low.map_type((groups, channels, 1, 1)), stride=padded(channels))
    return realigned(kind, 0)


def new_rows(low: Lowering, value: ir.Value | None, groups: int, channels: int) -> MapRef:
    """Make [groups, channels] float32 in the arena. It is dense as well where no row has to be filled up."""
    kind = rows_type(low, groups, channels)
    ref = MapRef(low.storage(kind.elements), 0, kind)
    if value is not None:
        dense = ref.storage if ref.is_dense else None
        low.forms[value] = Form((groups, channels), "float32", map=ref, dense=dense)
    return ref


def rows(low: Lowering, value: ir.Value) -> MapRef:
    """Give a value [groups, channels] with its rows on cache lines: copied where it lies otherwise."""
    form = low.form(value)
    groups, channels = form.shape
    if form.map is None or low.storages[form.map.storage].region != p.ARENA:
        dense = MapRef(low.dense(value), 0, low.map_type((groups, channels, 1, 1)))
        if dense.type.stride == padded(channels) and low.storages[dense.storage].region == p.ARENA:
            form.map = dense
        else:
            form.map = new_rows(low, None, groups, channels)
            low.copy_map(dense, form.map)
    return form.map


def row(low: Lowering, matrix: MapRef, group: int) -> int:
    """Give the storage that is one row."""
    key = matrix.storage, group
    if key not in low.rows:
        low.rows[key] = low.part(matrix.storage, group * matrix.type.stride, matrix.type.c)
    return low.rows[key]


def coefficient_rows(low: Lowering, operands: Values, results: Values) -> tuple[int, dict[str, Ref]]:
    """Give what an operator takes that works on each coefficient alone, [C] or [groups, C].

    That is their number, the filling of rows counted, and where operands and results lie.
    """
    shape = low.shape(next(iter(operands.values())))
    if len(shape) == 1:
        return shape[0], {**vectors(low, operands), **new_vectors(low, results, shape[0])}
    refs: dict[str, Ref] = {name: rows(low, value).storage for name, value in operands.items()}
    refs |= {name: new_rows(low, value, *shape).storage for name, value in results.items()}
    return shape[0] * padded(shape[1]), refs
