"""Lowering of linear maps along axes whose matrices are sparse (kernels/common/taps.py).

That are Resize, Upsample, Pad that repeats what is there, means over dilated windows, and products with a constant
that has few entries in each row: the gradients of those. Maps stay as they lie; a matrix for each axis, one after the
other, those that make least first.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.opset.resampling import Matrices, mean_matrices, pad_matrices, resize_matrices, text
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.taps import TapsProblem, most_taps, taps_of
from bnfuse.runtime.kernels.kernel import MapType
from bnfuse.runtime.lowering.generic import lower_generic
from bnfuse.runtime.lowering.layout import ALIGN, MapRef, realigned
from bnfuse.runtime.lowering.operands import optional
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.values import attributes_of

# taps of a row up to which a product is sparse whatever its length: of dense tensors, and of maps, which a product of
# matrices would turn around twice; chosen by hand
FEW, FEW_OF_MAPS = 8, 32
SPARSE = 4  # so many times as many elements as taps: what taps cost beside the products of a dense matrix


def lower_resize(low: Lowering, node: ir.Node) -> None:
    """Lower a Resize or an Upsample: its roi, scales and sizes have to be constants."""
    x = low.operand(node, 0)
    names = ("scales",) if node.op_type == "Upsample" else ("roi", "scales", "sizes")
    given = {name: known(low, node, i, name) for i, name in enumerate(names, 1)}
    attributes = attributes_of(node)
    if "scales" in attributes:  # an old Upsample
        given["scales"] = np.asarray(attributes["scales"], np.float32)
    try:
        matrices = resize_matrices(node.op_type, attributes, low.shape(x), **given)
    except BnfuseError as error:
        raise low.error(node, str(error)) from None
    along_axes(low, node, x, matrices)


def known(low: Lowering, node: ir.Node, index: int, name: str) -> npt.NDArray[Any] | None:
    """Give a constant operand, None where it is left out or empty. Raises BnfuseError where it is not constant."""
    value = optional(node, index)
    if value is None or not value.name:
        return None
    found = low.constant(value)
    if found is None:
        raise low.error(node, f"reads its {name} from '{value.name}', which is not constant: shapes must be fixed")
    return found if found.size else None


def lower_pad(low: Lowering, node: ir.Node) -> None:
    """Lower a Pad: with a constant by the generic kernel, with what is there by one tap an element."""
    attributes = attributes_of(node)
    mode = text(attributes.get("mode", "constant"))
    if mode == "constant":
        lower_generic(low, node)
        return
    x = low.operand(node, 0)
    pads = known(low, node, 1, "pads") if "pads" not in attributes else np.asarray(attributes["pads"])
    axes = known(low, node, 3, "axes")
    try:
        given = [] if pads is None else [int(n) for n in pads]
        matrices = pad_matrices(mode, given, None if axes is None else [int(n) for n in axes], low.shape(x))
    except BnfuseError as error:
        raise low.error(node, str(error)) from None
    along_axes(low, node, x, matrices)


def lower_gather(low: Lowering, node: ir.Node) -> None:
    """Lower a Gather: constant channels of a map are picked where it lies, all else is generic."""
    x, indices = low.operand(node, 0), low.operand(node, 1)
    form, order = low.form(x), low.constant(indices)
    axis = attributes_of(node).get("axis", 0)
    if form.map is None or order is None or order.ndim != 1 or len(form.shape) != 4 or axis not in (1, -3):
        lower_generic(low, node)
        return
    n, c, h, w = form.shape
    made, held = low.new_map(node.outputs[0], (n, len(order), h, w)), low.map(x)
    problem = TapsProblem(held.type, made.type, "c", 1, weighted=False)
    picked = (order % c).astype(np.int32)
    refs: dict[str, Ref] = {"x": held, "index": low.constant_storage(picked), "y": made}
    low.launch(registry.TAPS, (problem, low.target), refs)


def lower_mean(low: Lowering, node: ir.Node, x: ir.Value, window: dict[str, Any]) -> None:
    """Lower an average pooling as means along its axes, one after the other."""
    along_axes(low, node, x, mean_matrices(window, low.shape(x)))


Operand = tuple[ir.Value, bool]  # matrices that lie in memory, and whether their last axes are exchanged


def lower_sparse(low: Lowering, node: ir.Node, a: Operand, b: Operand) -> bool:
    """Lower a product with a sparse constant matrix, and tell whether it is one."""
    for (matrix, transposed), (x, x_transposed), axis in ((a, b, -2), (b, a, -1)):
        constant, rank = low.constant(matrix), len(low.shape(x))
        if constant is None or constant.ndim != 2 or x_transposed or rank < 2 or low.constant(x) is not None:
            continue
        rows = constant if transposed == (axis == -1) else constant.T
        if low.form(x).dtype != "float32" or rows.dtype != np.float32 or low.shape(x)[axis] != rows.shape[1]:
            continue
        if rows.size and is_sparse(rows, FEW if low.form(x).map is None else FEW_OF_MAPS):
            along_axes(low, node, x, {rank + axis: rows})
            return True
    return False


def is_sparse(matrix: npt.NDArray[Any], few: int) -> bool:
    """Tell whether a matrix [out, in] is cheaper by its entries than as a whole: up to `few` of a row always."""
    taps = most_taps(matrix)
    return taps <= few or SPARSE * taps <= matrix.shape[1]


def along_axes(low: Lowering, node: ir.Node, x: ir.Value, matrices: Matrices) -> None:
    """Multiply x by a matrix [out, in] along each of some axes; the result is the node's first."""
    form, shape, result = low.form(x), list(low.shape(x)), node.outputs[0]
    if form.dtype != "float32":
        raise low.error(
            node, f"resamples {form.dtype}: only float32 is compiled. Cast it in front of the node and back"
        )
    if not matrices:
        low.alias(result, x)
        return
    as_map = len(shape) == 4 and form.map is not None and 1 not in matrices
    held = low.map(x) if as_map else MapRef(low.dense(x), 0, MapType(1, 1, 1, 1, 1))
    ordered = sorted(matrices.items(), key=lambda item: len(item[1]) / item[1].shape[1])
    for number, (axis, matrix) in enumerate(ordered, 1):
        before = tuple(shape)
        shape[axis] = len(matrix)
        value = result if number == len(ordered) else None
        if as_map:
            made = low.new_map(value, tuple(shape))
            own, along = lengthwise(held, axis), lengthwise(made, axis)
        else:
            made = MapRef(low.new_dense(value, tuple(shape)), 0, held.type)
            own, along = (_dense(low, ref.storage, s, axis) for ref, s in ((held, before), (made, tuple(shape))))
        _launch(low, own, along, "w" if as_map and axis == 3 else "h", matrix)
        held = made


def lengthwise(ref: MapRef, axis: int) -> MapRef:
    """Give a map whose axis of the file (0, 2 or 3) is its height, or its width if that is what it is anyway."""
    kind = ref.type
    if axis == 0:
        kind = dataclasses.replace(kind, n=1, h=kind.n, w=kind.h * kind.w)
    return dataclasses.replace(ref, type=kind)


def _dense(low: Lowering, storage: int, shape: tuple[int, ...], axis: int) -> MapRef:
    """Give a dense tensor as a map whose height is one axis, and what is behind it are the channels."""
    inner = math.prod(shape[axis + 1 :])
    kind = MapType(math.prod(shape[:axis]), shape[axis], 1, inner, inner)
    if low.target.aligns_maps:
        kind = realigned(dataclasses.replace(kind, align=ALIGN), 0)
    return MapRef(storage, 0, kind)


def _launch(low: Lowering, x: MapRef, y: MapRef, axis: Literal["h", "w"], matrix: npt.NDArray[np.float32]) -> None:
    index, weight = taps_of(matrix)
    problem = TapsProblem(x.type, y.type, axis, index.shape[1], weight is not None)
    refs: dict[str, Ref] = {"x": x, "index": low.constant_storage(index), "y": y}
    if weight is not None:
        refs["weight"] = low.constant_storage(weight)
    low.launch(registry.TAPS, (problem, low.target), refs)
